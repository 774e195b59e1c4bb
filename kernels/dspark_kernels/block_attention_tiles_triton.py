"""What the kernels of `block_attention` share: tiles of rows and of keys, and who sees whom.

A tile of queries is a run of slots times the query heads that share a key head, which take a power
of two of its rows, P, so that a tile is a box of [N, H, D]. Rows are numbered slot P + head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats

allow_loops()
exact_floats()


@triton.jit
def query_rows(pointer, batch, slot, head, count, H: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [ROWS, D] of a tensor [B, N, H, D]."""
    at = (slot * H + head) * D
    base = pointer + batch.to(tl.int64) * count * (H * D)
    return tl.load(base + at[:, None] + tl.arange(0, D)[None, :])


@triton.jit
def key_rows(pointer, batch, key, head, total, J: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [KEYS, D] of a tensor [B, S + N, J, D]; past its end the last one."""
    at = (tl.minimum(key, total - 1) * J + head) * D
    base = pointer + batch.to(tl.int64) * total * (J * D)
    return tl.load(base + at[:, None] + tl.arange(0, D)[None, :])


@triton.jit
def seen_context(key, anchor, there, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which context keys rows see, for `key` and `anchor` that broadcast against each other."""
    seen = (key < anchor) & (key < there)
    if W > 0:
        seen = seen & (key >= anchor - W)
    return seen


@triton.jit
def seen_own(own, slot, G: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which slots rows see, for `own` and `slot` that broadcast against each other."""
    seen = own // G == slot // G
    if CAUSAL:
        seen = seen & (own <= slot)
    return seen


@triton.jit
def tile_rows(  # type: ignore[no-untyped-def]
    start, head, count, SHARED: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Slots from `start` on, query heads, and which of them are there: all [ROWS].

    Rows that are not there repeat others, so that nothing they lead to has to be masked.
    """
    row = tl.arange(0, ROWS)
    slot, of_head = start + row // P, row % P
    inside = (slot < count) & (of_head < SHARED)
    return tl.minimum(slot, count - 1), head * SHARED + tl.minimum(of_head, SHARED - 1), inside


@triton.jit
def row_anchors(anchors, batch, count, slot, inside, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Anchors of rows, 0 where they are not there."""
    return tl.load(anchors + batch * (count // G) + slot // G, mask=inside, other=0)


@triton.jit
def tile_span(  # type: ignore[no-untyped-def]
    slot, inside, anchor, there, G: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Of a tile: first context key, where unmasked steps begin and end, end; own slots."""
    lowest, highest = tl.min(tl.where(inside, anchor, 2147483647), 0), tl.max(anchor, 0)
    end = tl.minimum(highest, there)
    whole = tl.minimum(lowest, there) // KEYS * KEYS
    start = end * 0
    bare = start
    if W > 0:
        start = tl.maximum(lowest - W, 0) // KEYS * KEYS
        bare = (tl.maximum(highest - W, 0) + KEYS - 1) // KEYS * KEYS
    first = tl.min(tl.where(inside, slot, 2147483647), 0) // G * G
    last = tl.max(tl.where(inside, slot, 0), 0) // G * G + G
    # Where nothing is seen by all rows, everything is masked: bare = whole.
    whole = tl.maximum(whole, start)
    bare = tl.minimum(tl.maximum(bare, start), whole)
    return start, bare, whole, end, first, last


@triton.jit
def slot_span(  # type: ignore[no-untyped-def]
    anchors, batch, blocks, there, start, G: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Slots that see a tile of the context: first, from where on all see all of it, end.

    Between the first two, and everywhere behind a window or where padding begins, blocks are masked
    (anchors need not ascend).
    """
    first, whole, last = blocks, blocks * 0, blocks * 0
    for begin in tl.range(0, blocks, 128):
        at = begin + tl.arange(0, 128)
        anchor = tl.load(anchors + batch * blocks + at, mask=at < blocks, other=0)
        sees = (at < blocks) & (anchor > start) & (there > start)
        blind = (at < blocks) & ((anchor < start + KEYS) | (there < start + KEYS))
        if W > 0:
            sees = sees & (anchor - W < start + KEYS)
            blind = at < blocks
        first = tl.minimum(first, tl.min(tl.where(sees, at, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(sees, at + 1, 0), 0))
        whole = tl.maximum(whole, tl.max(tl.where(blind, at + 1, 0), 0))
    last = tl.maximum(last, first)
    whole = tl.minimum(tl.maximum(whole, first), last)
    return first * G, whole * G, last * G
