"""Experts of many rows: pairs sorted by expert, cut into blocks of one expert, a block at a time.

Row r's j-th choice is pair r k + j. ``sort`` lists the pairs of expert 0, of expert 1, ..; ``cut``
cuts each expert's stretch of the list into blocks of N pairs, the last one ragged. ``gate_up`` and
``down`` are a program per block and tile of outputs: a tile of weights times N rows that need not
lie side by side. What they leave has a place per pair, so that a row's sum has an order of its own.

Blocks of one expert stand next to each other in the grid and tiles come after blocks: the second
block finds the tile of weights in the L2 cache, so memory is read once. How many blocks there are
is known on the device alone; the grid is the most that there can be, and programs behind the last
block end at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels import rows_tile
from dspark_kernels.interpreted import allow_loops
from dspark_kernels.moe_experts_triton import hidden, several
from dspark_kernels.overlap import begin, wait

allow_loops()


@triton.jit
def dense(
    x, norm, weight, residual, out, n, eps,
    I: tl.constexpr, O: tl.constexpr,  # noqa: E741
    BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out = norm(x) W^T + residual, program (N rows, tile of outputs); BK divides I."""
    begin(EARLY)
    wait(EARLY)
    rows = tl.program_id(0) * N + tl.arange(0, N)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    a = weight + tl.minimum(o, O - 1).to(tl.int64) * I
    acc, _, square = rows_tile.gemm(
        x, norm, a, a, rows, rows < n, 0, I, I, BO, BK, N, STAGES, NORM, False, True
    )
    if NORM:
        acc = acc * tl.rsqrt(square / I + eps)[None, :]
    inside = (rows < n)[None, :] & (o < O)[:, None]
    at = rows[None, :] * O + o[:, None]
    if ADD:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sort(
    ids, order, starts, pairs,
    E: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program e lists the pairs that chose expert e, ascending, behind those of the experts before.

    order: [pairs]; starts: [E + 1]. Every program reads all ids: they are in the L2 cache, and no
    program waits for another.
    """
    begin(EARLY)
    wait(EARLY)
    e = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, pairs, BLOCK):
        chosen = tl.load(ids + first + at, mask=first + at < pairs, other=E)
        before += (chosen < e).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + e, place)
    for first in tl.range(0, pairs, BLOCK):
        chosen = tl.load(ids + first + at, mask=first + at < pairs, other=E)
        mine = (chosen == e).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, first + at, mask=mine > 0)
        place += tl.sum(mine, 0)
    if e == E - 1:
        tl.store(starts + E, place)


@triton.jit
def cut(
    starts, blocks, count,
    E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program e writes the blocks of expert e, at most MOST: [block, (expert, first, end)].

    Places in ``order``; ``count``: of all blocks.
    """
    begin(EARLY)
    wait(EARLY)
    e = tl.program_id(0)
    i = tl.arange(0, EP)
    begins = tl.load(starts + i, mask=i < E, other=0)
    ends = tl.load(starts + i + 1, mask=i < E, other=0)
    each = (ends - begins + N - 1) // N
    place = tl.sum(tl.where(i < e, each, 0), 0)
    end = tl.load(starts + e + 1)
    j = tl.arange(0, MOST)
    first = tl.load(starts + e) + j * N
    at = blocks + (place + j) * 3
    tl.store(at, tl.zeros([MOST], tl.int32) + e, mask=first < end)
    tl.store(at + 1, first, mask=first < end)
    tl.store(at + 2, tl.zeros([MOST], tl.int32) + end, mask=first < end)
    if e == E - 1:
        tl.store(count, tl.sum(each, 0))


@triton.jit
def _block(blocks, order, which, N: tl.constexpr):
    """A block's expert, its pairs [N] and which of them are there."""
    expert = tl.load(blocks + which * 3).to(tl.int64)
    place = tl.load(blocks + which * 3 + 1) + tl.arange(0, N)
    live = place < tl.load(blocks + which * 3 + 2)
    return expert, tl.load(order + place, mask=live, other=0), live


@triton.jit
def gate_up(
    z, order, blocks, count, w1, w3, s1, s3, h, lift, beta, linear_beta,
    K: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, SITU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h[pair] = act(W1 z, W3 z) of a block's pairs."""
    begin(EARLY)
    wait(EARLY)
    which = tl.program_id(0)
    if which >= tl.load(count):
        return
    expert, pairs, live = _block(blocks, order, which, N)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    at = expert * INNER + tl.minimum(o, INNER - 1)
    ROW: tl.constexpr = L // 8 if PACKED else L
    a = w1 + at * ROW
    b = w3 + at * ROW
    s_a = s1 + at * (L // 32)
    s_b = s3 + at * (L // 32)
    gate, up = several(z, a, b, s_a, s_b, pairs // K, live, L, BO, BK, N, STAGES, PACKED, True)
    inside = live[None, :] & (o < INNER)[:, None]
    hidden(
        h, gate, up, pairs[None, :], o[:, None], inside, lift, beta, linear_beta,
        INNER, PACKED, SITU,
    )  # fmt: skip


@triton.jit
def down(
    h, order, blocks, count, w2, s2, partial,
    INNER: tl.constexpr, L: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """partial[pair] = W2 h[pair] of a block's pairs."""
    begin(EARLY)
    wait(EARLY)
    which = tl.program_id(0)
    if which >= tl.load(count):
        return
    expert, pairs, live = _block(blocks, order, which, N)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    at = expert * L + tl.minimum(o, L - 1)
    ROW: tl.constexpr = INNER // 8 if PACKED else INNER
    a = w2 + at * ROW
    scale = s2 + at * (INNER // 32)
    acc, _ = several(h, a, a, scale, scale, pairs, live, INNER, BO, BK, N, STAGES, PACKED, False)
    inside = live[None, :] & (o < L)[:, None]
    tl.store(partial + pairs[None, :] * L + o[:, None], acc, mask=inside)
