"""The law of what a round says, by exact enumeration on vocabularies up to 5: it is p, to 1e-12.

Negative controls at the end: known defects, planted in the same enumeration, move the law by a
total variation above 0.01. So the enumeration would see them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dspark.runtime import judge
from dspark.runtime.siblings import Ladder, ladder
from tests.exact import Draft, World, everything, output_law

EXACT = 1e-12
METHODS: tuple[judge.Method, ...] = ("token", "block")
every_method = pytest.mark.parametrize("method", METHODS)


def distance(law: Tensor, wanted: Tensor) -> float:
    return 0.5 * float((law - wanted).abs().sum())


def stopping(world: World, seed: int, *, anticipate: bool = False) -> Callable[[Draft], tuple]:
    """A plan that may go on to position k by x_{<k} alone (`anticipate`: by x_k too).

    The number of siblings is any function of all primaries, which the rule allows.
    """

    def planner(draft: Draft) -> tuple[int, tuple[int, ...]]:
        length = 0
        while length < world.length:
            seen = draft.tokens[: length + 1] if anticipate else draft.tokens[:length]
            if hash((seed, *seen)) % 3 == 0:
                break
            length += 1
        m = len(draft.siblings[0]) if draft.siblings else 0
        counts = [hash((seed, k, *draft.tokens)) % (m + 1) for k in range(world.length)]
        return length, tuple(counts)

    return planner


CASES = [(2, 3, 2), (3, 3, 2), (4, 2, 2), (5, 2, 1)]
"""Vocabulary, draft length, siblings."""


@every_method
@pytest.mark.parametrize("holes", [0.0, 0.4])
@pytest.mark.parametrize(("vocab", "length", "siblings"), CASES)
def test_whole_trees(
    vocab: int, length: int, siblings: int, holes: float, method: judge.Method,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for seed in range(3):
        world = World.random(vocab, length, seed, holes=holes)
        for m in (0, siblings):
            law = output_law(world, monkeypatch, siblings=m, method=method)
            torch.testing.assert_close(law, world.target_law(), rtol=0, atol=EXACT)


@every_method
@pytest.mark.parametrize("holes", [0.0, 0.4])
@pytest.mark.parametrize(("vocab", "length", "siblings"), CASES)
def test_trees_cut_by_a_plan(
    vocab: int, length: int, siblings: int, holes: float, method: judge.Method,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for seed in range(4):
        world = World.random(vocab, length, seed, holes=holes)
        plan = stopping(world, seed)
        law = output_law(world, monkeypatch, siblings=siblings, planner=plan, method=method)
        torch.testing.assert_close(law, world.target_law(), rtol=0, atol=EXACT)


@every_method
@pytest.mark.parametrize(("vocab", "length", "siblings"), CASES)
def test_drafts_that_are_point_masses(
    vocab: int, length: int, siblings: int, method: judge.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greedy or copied draft under sampling, its siblings in a fixed order."""
    for seed in range(3):
        world = World.random(vocab, length, seed, holes=0.3, point_mass=True)
        for m in (0, siblings):
            law = output_law(world, monkeypatch, siblings=m, method=method)
            torch.testing.assert_close(law, world.target_law(), rtol=0, atol=EXACT)


@every_method
@pytest.mark.parametrize(("vocab", "length", "siblings"), [(1, 2, 2), (2, 1, 3), (3, 1, 4)])
def test_more_siblings_than_tokens(
    vocab: int, length: int, siblings: int, method: judge.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of one or two, draft length one, and no token left for the last siblings."""
    world = World.random(vocab, length, 5)
    law = output_law(world, monkeypatch, siblings=siblings, method=method)
    torch.testing.assert_close(law, world.target_law(), rtol=0, atol=EXACT)


@every_method
def test_equal_and_disjoint_laws(method: judge.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be rejected, and where nothing can be accepted."""
    world = World.random(4, 2, 1)
    equal = World(4, 2, world.p, {prefix: world.p[prefix] for prefix in world.q})
    halves = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)
    p = {prefix: law * halves / (law * halves).sum() for prefix, law in world.p.items()}
    q = {prefix: law * (1 - halves) / (law * (1 - halves)).sum() for prefix, law in world.q.items()}
    for odd in (equal, World(4, 2, p, q)):
        law = output_law(odd, monkeypatch, siblings=2, method=method)
        torch.testing.assert_close(law, odd.target_law(), rtol=0, atol=EXACT)


def test_block_verification_never_accepts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected accepted length, summed over every draft and coin, in both methods."""

    def expected(world: World, method: judge.Method) -> float:
        total = 0.0
        real = judge.draw_at

        def count(
            joint: object, world: World, round_: object, judged: judge.Judged, weight: Tensor
        ) -> None:
            nonlocal total
            total += float((judged.accepted * weight).sum())

        with monkeypatch.context() as patch:
            patch.setattr("tests.exact._add", count)
            output_law(world, patch, method=method)
        assert judge.draw_at is real
        return total

    gains = []
    for seed in range(8):
        world = World.random(3, 3, seed)
        gains.append(expected(world, "block") - expected(world, "token"))
    assert min(gains) > -EXACT
    assert max(gains) > 0.02


# Negative controls ------------------------------------------------------------------------------


@every_method
def test_a_plan_that_looks_at_the_token_shows(
    method: judge.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World.random(3, 2, 0)
    plan = stopping(world, 4, anticipate=True)
    law = output_law(world, monkeypatch, siblings=1, planner=plan, method=method)
    assert distance(law, world.target_law()) > 0.01


def test_siblings_drawn_with_replacement_show(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.random(4, 1, 0)
    law = output_law(world, monkeypatch, siblings=2, replace=True)
    assert distance(law, world.target_law()) > 0.01


def test_a_correction_from_the_first_residual_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(residual: Tensor, *rest: Tensor) -> Ladder:
        return Ladder(ladder(residual, *rest).chances, residual)

    monkeypatch.setattr(judge, "ladder", first)
    world = World.random(4, 2, 0)
    law = output_law(world, monkeypatch, siblings=2)
    assert distance(law, world.target_law()) > 0.01


def test_a_block_that_uses_the_draft_behind_its_cut_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = judge.block_chances

    def longer(p: Tensor, q: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
        chances = real(p, q, weights, torch.full_like(lengths, q.shape[1]))
        position = torch.arange(1, q.shape[1] + 1)
        return torch.where(position <= lengths.unsqueeze(1), chances, 0.0)

    monkeypatch.setattr(judge, "block_chances", longer)
    world = World.random(3, 3, 0)
    plan = stopping(world, 1)
    law = output_law(world, monkeypatch, planner=plan, method="block")
    assert distance(law, world.target_law()) > 0.01
    whole = output_law(world, monkeypatch, planner=everything, method="block")
    assert distance(whole, world.target_law()) < EXACT
