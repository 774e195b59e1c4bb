"""Rows of a draft context come and go: after any operations it drafts as one that read it all anew.

Random sequences of extend, put, reset, select and fork run beside plain lists of the features that
each row should hold. The context that was forked keeps its own list.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.draft import DraftConfig, DraftContext, DSparkDrafter
from dspark.draft.shapes import KDAShape
from tests.tiny_drafters import CASES, FULL, TAP_WIDTH, draft, make_drafter
from tests.tolerance import assert_close

KDA = replace(
    FULL, backbone="kda", num_key_value_heads=FULL.num_attention_heads, kda=KDAShape(gate_rank=4)
)
ALL = {"full": FULL, **CASES, "kda": KDA}
every_case = pytest.mark.parametrize("config", ALL.values(), ids=ALL)
G, D, LONGEST = FULL.block_size, FULL.hidden_size, 40


@lru_cache
def _drafter(config: DraftConfig) -> DSparkDrafter:
    return make_drafter(config)


def _features(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randn(rows, TAP_WIDTH, generator=generator)


class _Texts:
    """A context beside the features [n, N*D] that every row of it should have read."""

    def __init__(self, drafter: DSparkDrafter, batch: int, fixed: bool, seed: int) -> None:
        self.drafter, self.generator = drafter, torch.Generator().manual_seed(seed)
        self.context: DraftContext = drafter.new_context(batch, LONGEST)
        if fixed:
            self.context.fix_shapes()
        self.rows = [torch.empty(0, TAP_WIDTH) for _ in range(batch)]

    def extend(self, size: int) -> None:
        """Another count for every row, 0 included, and rejected rows of NaN behind each."""
        counts = [(size + 3 * b) % (G + 2) for b in range(len(self.rows))]
        counts = [min(n, LONGEST - len(row)) for n, row in zip(counts, self.rows, strict=True)]
        block = torch.full((len(counts), G + 1, TAP_WIDTH), torch.nan)
        for b, count in enumerate(counts):
            block[b, :count] = _features(self.generator, count)
            self.rows[b] = torch.cat((self.rows[b], block[b, :count]))
        self.drafter.extend(self.context, block, torch.tensor(counts))

    def put(self, size: int) -> None:
        row, length = size % len(self.rows), (7 * size) % LONGEST
        other = self.drafter.new_context(1, max(1, length + size % 3))
        self.rows[row] = _features(self.generator, length)
        self.drafter.extend(other, self.rows[row][None])
        self.context.put(row, other)

    def reset(self, size: int) -> None:
        row = size % len(self.rows)
        self.context.reset(row)
        self.rows[row] = self.rows[row][:0]

    def select(self, size: int) -> None:
        order = torch.randperm(len(self.rows), generator=self.generator)
        order = order[: max(1, len(order) - size % 2)]
        self.context.select(order)
        self.rows = [self.rows[b] for b in order.tolist()]

    def fork(self, size: int) -> None:
        """Goes on with the copy; what is done to it must not reach the original."""
        before, rows = self.context, list(self.rows)
        self.context = before.fork()
        self.extend(size)
        self.check(before, rows)

    def check(self, context: DraftContext, rows: list[Tensor]) -> None:
        embeds = torch.randn(len(rows), G, D, generator=self.generator)
        drafted = self.drafter.block_hidden(embeds, context)
        assert context.lengths.tolist() == [len(row) for row in rows]
        for b, row in enumerate(rows):
            alone = draft(self.drafter, row[None], embeds[b : b + 1], LONGEST)
            limit = 1e-5 if drafted.dtype == torch.float32 else 1e-12
            assert_close(drafted[b], alone[0], limit=limit, what=f"row {b} of {len(row)}")


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "put", "reset", "select", "fork"]), st.integers(0, 20)
    ),
    min_size=1,
    max_size=12,
)


@every_case
@settings(max_examples=10, deadline=None)
@given(operations=OPERATIONS, fixed=st.booleans())
def test_any_operations_equal_reading_anew(
    config: DraftConfig, operations: list[tuple[str, int]], fixed: bool
) -> None:
    """In float64: in float32 a state folded row by row drifts by more than one pass is allowed."""
    texts = _Texts(deepcopy(_drafter(config)).double(), 3, fixed, seed=len(operations))
    for name, size in operations:
        getattr(texts, name)(size)
    texts.check(texts.context, texts.rows)


@every_case
def test_a_row_that_held_nan_is_clean_for_the_next_request(config: DraftConfig) -> None:
    drafter = _drafter(config)
    clean, used = drafter.new_context(2, 20), drafter.new_context(2, 20)
    features = torch.randn(2, 9, TAP_WIDTH)
    drafter.extend(clean, features, torch.tensor([9, 0]))
    poisoned = features.clone()
    poisoned[1] = torch.nan
    drafter.extend(used, poisoned)
    used.reset(1)
    assert clean.row_lengths == used.row_lengths == [9, 0]
    embeds = torch.randn(2, G, D)
    assert torch.equal(drafter.block_hidden(embeds, clean), drafter.block_hidden(embeds, used))


@every_case
def test_operations_leave_other_rows_bit_identical(config: DraftConfig) -> None:
    """Shapes are fixed, so nothing may change for a row whatever its neighbour does."""
    drafter = _drafter(config)
    context = drafter.new_context(2, 20)
    context.fix_shapes()
    drafter.extend(context, torch.randn(2, 6, TAP_WIDTH), torch.tensor([6, 3]))
    embeds = torch.randn(2, G, D)
    before = drafter.block_hidden(embeds, context)[0]
    other = drafter.new_context(1, 11)
    drafter.extend(other, torch.randn(1, 11, TAP_WIDTH))
    context.put(1, other)
    assert torch.equal(drafter.block_hidden(embeds, context)[0], before)
    context.reset(1)
    assert torch.equal(drafter.block_hidden(embeds, context)[0], before)
    drafter.extend(context, torch.full((2, 4, TAP_WIDTH), torch.nan), torch.tensor([0, 0]))
    assert torch.equal(drafter.block_hidden(embeds, context)[0], before)


@every_case
def test_bytes_do_not_grow_with_rounds(config: DraftConfig) -> None:
    drafter = _drafter(config)
    context = drafter.new_context(2, 24)
    at_start = context.nbytes
    for turn in range(60):
        drafter.extend(context, torch.randn(2, 3, TAP_WIDTH), torch.tensor([turn % 4, 1]))
        if turn % 5 == 4:
            context.reset(0)
            context.reset(1)
    assert context.nbytes == at_start


def test_wrong_operations_are_refused() -> None:
    drafter, stranger = _drafter(FULL), make_drafter(FULL, seed=1)
    context = drafter.new_context(2, 8)
    long = drafter.new_context(1, 30)
    drafter.extend(long, torch.randn(1, 9, TAP_WIDTH))
    with pytest.raises(ValueError, match="text of 9 tokens into a context made for 8"):
        context.put(0, long)
    for row in (-1, 2):  # -1 is a legal index of Python, and a neighbour's row
        with pytest.raises(ValueError, match=r"expected 0\.\.1"):
            context.reset(row)
        with pytest.raises(ValueError, match=r"expected 0\.\.1"):
            context.put(row, drafter.new_context(1, 8))
    with pytest.raises(ValueError, match="another drafter, or other weights"):
        context.put(0, stranger.new_context(1, 8))
    with pytest.raises(ValueError, match="another drafter, or other weights"):
        context.put(0, _drafter(KDA).new_context(1, 8))
    with pytest.raises(ValueError, match="a context of one row"):
        context.put(0, drafter.new_context(2, 8))
