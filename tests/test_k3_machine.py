"""Any sequence of operations on a K3 cache leaves the state of a fresh prefill of the same text.

Hypothesis draws rounds (chains and trees, ragged, with idle slots), forks, snapshots and pieces of
them, requests that join and leave, selections and trips to host memory, and plays them against a
model that only remembers the committed tokens. Everything runs in float64, so that the limit can
be 1e-9 however long the sequence is, and over memory full of NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from dspark.k3.cache import K3Cache
from dspark.k3.snapshot import Snapshot
from tests.k3_fresh import Poisoned, assert_same, in_double
from tests.k3_tiny import PLAIN, TINY, tiny_tokens
from tests.test_k3_tree import padded, path_to

LENGTH = 40
LIMIT = 1e-9
SEEDS = st.integers(0, 10_000)


class World:
    """A cache and the tokens that each of its rows has committed."""

    def __init__(self, held: K3Cache, texts: list[Tensor]) -> None:
        self.held, self.texts = held, texts

    @property
    def room(self) -> int:
        return LENGTH - max(map(len, self.texts))

    def commit(self, rows: Tensor, chosen: list[list[int]]) -> None:
        pairs = zip(self.texts, rows, chosen, strict=True)
        self.texts = [torch.cat((text, row[one])) for text, row, one in pairs]


class Requests(RuleBasedStateMachine):
    config = TINY

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.model = self.stack.enter_context(in_double(self.config))
        self.kept: list[tuple[list[Snapshot], Tensor]] = []
        self.other: World | None = None

    @initialize(batch=st.integers(1, 3))
    def start(self, batch: int) -> None:
        held = self.model.new_cache(batch, LENGTH, Poisoned())
        self.world = World(held, [torch.zeros(0, dtype=torch.int64)] * batch)

    # --- blocks ---

    @rule(data=st.data(), seed=SEEDS, side=st.sampled_from(["left", "right"]))
    def prefill(self, data: st.DataObject, seed: int, side: str) -> None:
        world, width = self.world, data.draw(st.integers(1, 20))
        if width > world.room:
            return
        batch = len(world.texts)
        counts = data.draw(st.lists(st.integers(0, width), min_size=batch, max_size=batch))
        tokens, place = tiny_tokens(batch, width, seed=seed), torch.arange(width)
        real = torch.tensor(counts).unsqueeze(1)
        valid = place < real if side == "right" else place >= width - real
        self.model(tokens, world.held, valid=valid)
        world.commit(tokens, [place[mask].tolist() for mask in valid])

    @rule(data=st.data(), seed=SEEDS, ragged=st.booleans(), alike=st.booleans())
    def chain(self, data: st.DataObject, seed: int, ragged: bool, alike: bool) -> None:
        world, rows = self.world, data.draw(st.integers(1, 9))
        if rows > world.room:
            return
        batch = len(world.texts)
        tokens, valid, limits = tiny_tokens(batch, rows, seed=seed), None, [rows] * batch
        if ragged:
            limits = data.draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch))
            valid = torch.arange(rows) < torch.tensor(limits).unsqueeze(1)
        self.model(tokens, world.held, valid=valid, commit=False)
        counts = [data.draw(st.integers(0, limit)) for limit in limits]
        if alike:
            counts = [min(counts)] * batch
        world.held.commit(min(counts) if alike else torch.tensor(counts))
        world.commit(tokens, [list(range(n)) for n in counts])

    @rule(data=st.data(), seed=SEEDS)
    def tree(self, data: st.DataObject, seed: int) -> None:
        world, rows = self.world, data.draw(st.integers(1, 9))
        if rows > world.room:
            return
        batch = len(world.texts)
        tokens = tiny_tokens(batch, rows, seed=seed)
        parents, valid, chosen = [], [], []
        for _ in range(batch):
            real = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
            tree: list[int] = []
            for row in range(rows):
                above = [-1, *(r for r in range(row) if real[r])]
                tree.append(data.draw(st.sampled_from(above)))
            end = data.draw(st.sampled_from([-1, *(r for r in range(rows) if real[r])]))
            parents.append(tree)
            valid.append(real)
            chosen.append(path_to(end, tree))
        mask, above_each = torch.tensor(valid), torch.tensor(parents)
        self.model(tokens, world.held, parents=above_each, valid=mask, commit=False)
        world.held.commit_path(padded(chosen))
        world.commit(tokens, chosen)

    @rule(rows=st.integers(1, 9), seed=SEEDS, tree=st.booleans())
    def rollback(self, rows: int, seed: int, tree: bool) -> None:
        world = self.world
        if rows > world.room:
            return
        parents = torch.tensor([-1] + [0] * (rows - 1)) if tree else None
        tokens = tiny_tokens(len(world.texts), rows, seed=seed)
        self.model(tokens, world.held, parents=parents, commit=False)
        world.held.rollback()

    @precondition(lambda self: self.world.room < 9)
    @rule()
    def too_long(self) -> None:
        tokens = tiny_tokens(len(self.world.texts), self.world.room + 1)
        with pytest.raises(ValueError, match="max_length"):
            self.model(tokens, self.world.held, commit=False)

    # --- requests ---

    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.world.texts) - 1))
        self.kept.append(([self.world.held.snapshot(row)], self.world.texts[row]))

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), seed=SEEDS, rows=st.integers(1, 4))
    def restore(self, data: st.DataObject, seed: int, rows: int) -> None:
        """And, where it fits, one more piece of snapshot on top of those restored."""
        world = self.world
        row = data.draw(st.integers(0, len(world.texts) - 1))
        pieces, text = data.draw(st.sampled_from(self.kept))
        *before, last = pieces
        world.held.restore(row, last, *before)
        world.texts[row] = text
        if rows <= world.room:
            tokens = tiny_tokens(len(world.texts), rows, seed=seed)
            self.model(tokens, world.held)
            world.commit(tokens, [list(range(rows))] * len(world.texts))
            piece = world.held.snapshot(row, start=len(text))
            self.kept.append(([*pieces, piece], world.texts[row]))

    @rule(data=st.data(), seed=SEEDS, length=st.integers(1, 12))
    def join(self, data: st.DataObject, seed: int, length: int) -> None:
        row = data.draw(st.integers(0, len(self.world.texts) - 1))
        text = tiny_tokens(1, length + 3, seed=seed)
        alone = self.model.new_cache(1, LENGTH, Poisoned())
        self.model(text[:, :length], alone)
        self.model(text[:, length:], alone, commit=False)
        alone.commit(2)
        self.world.held.put(row, alone)
        self.world.texts[row] = text[0, : length + 2]

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.world.texts) - 1))
        self.world.held.reset(row)
        self.world.texts[row] = self.world.texts[row][:0]

    @precondition(lambda self: len(self.world.texts) > 1)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.world.texts))))
        rows = order[: data.draw(st.integers(1, len(order)))]
        self.world.held.select(torch.tensor(rows))
        self.world.texts = [self.world.texts[row] for row in rows]

    @rule()
    def fork(self) -> None:
        self.other = World(self.world.held.fork(Poisoned()), list(self.world.texts))

    @precondition(lambda self: self.other is not None)
    @rule()
    def swap(self) -> None:
        assert self.other is not None
        self.world, self.other = self.other, self.world

    @rule()
    def trip_to_host_memory(self) -> None:
        self.world.held.offload()
        self.world.held.onload()

    @rule()
    def fold(self) -> None:
        self.world.held.fold()

    @invariant()
    def lengths(self) -> None:
        if hasattr(self, "world"):
            assert self.world.held.lengths.tolist() == [len(text) for text in self.world.texts]

    @rule()
    def check(self) -> None:
        for world in self.worlds():
            for row, text in enumerate(world.texts):
                if len(text) < LENGTH and world.room:
                    assert_same(self.model, world.held, row, text, torch.tensor(7), LIMIT)

    def worlds(self) -> Iterator[World]:
        yield self.world
        if self.other is not None:
            yield self.other

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.check()
        finally:
            self.stack.close()


class RequestsOfKimiLinear(Requests):
    config = PLAIN


def play(machine: type[Requests], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_sequence_of_operations_short():
    play(Requests, 10, 12)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Requests, RequestsOfKimiLinear])
def test_any_sequence_of_operations(machine: type[Requests]):
    play(machine, 50, 30)
