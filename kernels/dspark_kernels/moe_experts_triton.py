"""The experts' own products: gate and up with the activation, then down.

A program is (tile of outputs, slot). See `moe_decode_triton` for slots. Row r's j-th choice is pair
r k + j: its hidden row and its output have a place of their own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels import mxfp4_tile, rows_tile
from dspark_kernels.interpreted import allow_loops
from dspark_kernels.mxfp4_tile import plane
from dspark_kernels.overlap import begin, wait

allow_loops()


@triton.jit
def _who(
    ids, slot, n,
    K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The slot's expert, whether it works, which rows [N] chose it and as which pair."""
    r = tl.arange(0, N)
    j = tl.arange(0, KP)
    flat = r[:, None] * K + j[None, :]
    table = tl.load(ids + flat, mask=(r < n)[:, None] & (j < K)[None, :], other=-1)
    expert = slot if DIRECT else tl.load(ids + slot)
    match = table == expert
    hit = tl.sum(match.to(tl.int32), 1) > 0
    pair = r * K + tl.sum(tl.where(match, j[None, :], 0), 1)
    if DIRECT:
        works = tl.sum(hit.to(tl.int32), 0) > 0
    else:
        works = tl.sum(tl.sum((match & (flat < slot)).to(tl.int32), 1), 0) == 0
    return expert.to(tl.int64), works, hit, pair


@triton.jit
def _which(ids, r, expert, K: tl.constexpr, KP: tl.constexpr):
    """Whether row r chose the expert, and as which pair."""
    j = tl.arange(0, KP)
    match = tl.load(ids + r * K + j, mask=j < K, other=-1) == expert
    return tl.sum(match.to(tl.int32), 0) > 0, r * K + tl.sum(tl.where(match, j, 0), 0)


@triton.jit
def several(
    x, a, b, scale_a, scale_b, rows, live,
    I: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr,  # noqa: E741
    STAGES: tl.constexpr, PACKED: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """Rows [N] of x at once: [BO, N] each; BK words or numbers a step."""
    if PACKED:
        acc_a, acc_b = mxfp4_tile.gemm(
            x, a, b, scale_a, scale_b, rows, live, I, BO, BK, N, STAGES, DUAL
        )
    else:
        acc_a, acc_b, _ = rows_tile.gemm(
            x, x, a, b, rows, live, 0, I, I, BO, BK, N, STAGES, False, DUAL, True
        )
    return acc_a, acc_b


@triton.jit
def _one(
    x, a, b, scale_a, scale_b,
    I: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,  # noqa: E741
    PACKED: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """One row: [BO] each."""
    if PACKED:
        acc_a, acc_b = mxfp4_tile.gemv(x, a, b, scale_a, scale_b, I, BO, BK, STAGES, DUAL)
    else:
        sum_a, sum_b, _ = rows_tile.gemv(
            x, x, a, b, 0, I, I, BO, BK, STAGES, False, DUAL, True, False
        )
        acc_a = tl.sum(sum_a, 1)
        acc_b = tl.sum(sum_b, 1)
    return acc_a, acc_b


@triton.jit
def hidden(
    h, gate, up, pair, o, inside, lift, beta, linear_beta,
    INNER: tl.constexpr, PACKED: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    """Store act(gate, up) as ``down`` reads it."""
    value = rows_tile.activate(gate, up, beta, linear_beta, SITU).to(h.dtype.element_ty)
    if PACKED:
        value = (value.to(tl.float32) * lift).to(h.dtype.element_ty)
        o = plane(o, INNER)
    tl.store(h + pair * INNER + o, value, mask=inside)


@triton.jit
def gate_up(
    z, ids, w1, w3, s1, s3, h, n, lift, beta, linear_beta,
    K: tl.constexpr, KP: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    DIRECT: tl.constexpr, PACKED: tl.constexpr, SITU: tl.constexpr, DOT: tl.constexpr,
    TOLD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h[pair] = act(W1 z, W3 z) of the slot's expert, for every row that chose it.

    DOT: all rows at once. Otherwise one after the other, for an expert has few: the tile comes from
    memory once and from the caches after that. TOLD: the next launch reads ``ids`` before its own
    wait, so it may begin only when they are there.
    """
    if TOLD:
        wait(EARLY)
    begin(EARLY)
    wait(EARLY)
    expert, works, hit, pairs = _who(ids, tl.program_id(1), n, K, KP, N, DIRECT)
    if not works:
        return
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    at = expert * INNER + tl.minimum(o, INNER - 1)
    ROW: tl.constexpr = L // 8 if PACKED else L
    a = w1 + at * ROW
    b = w3 + at * ROW
    s_a = s1 + at * (L // 32)
    s_b = s3 + at * (L // 32)
    if DOT:
        rows = tl.arange(0, N)
        gate, up = several(z, a, b, s_a, s_b, rows, hit, L, BO, BK, N, STAGES, PACKED, True)
        inside = hit[None, :] & (o < INNER)[:, None]
        hidden(
            h, gate, up, pairs[None, :], o[:, None], inside, lift, beta, linear_beta,
            INNER, PACKED, SITU,
        )  # fmt: skip
    else:
        for r in tl.range(0, n):
            chose, pair = _which(ids, r, expert, K, KP)
            if chose:
                gate, up = _one(z + r * L, a, b, s_a, s_b, L, BO, BK, STAGES, PACKED, True)
                hidden(
                    h, gate, up, pair, o, o < INNER, lift, beta, linear_beta,
                    INNER, PACKED, SITU,
                )  # fmt: skip


@triton.jit
def down(
    h, ids, w2, s2, partial, tail, w_shared, shared, n,
    K: tl.constexpr, KP: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
    SLOTS: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, DIRECT: tl.constexpr, PACKED: tl.constexpr, SHARED: tl.constexpr,
    DOT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """partial[pair] = W2 h[pair]; the slot behind the last is the shared expert."""
    begin(EARLY)
    wait(EARLY)
    slot = tl.program_id(1)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    rows = tl.arange(0, N)
    if SHARED:  # noqa: SIM102
        if slot == SLOTS:
            a = w_shared + tl.minimum(o, L - 1).to(tl.int64) * S
            SK: tl.constexpr = 64 if S % 64 == 0 else 16
            acc, _ = several(tail, a, a, a, a, rows, rows < n, S, BO, SK, N, STAGES, False, False)
            inside = (rows < n)[None, :] & (o < L)[:, None]
            tl.store(shared + rows[None, :] * L + o[:, None], acc, mask=inside)
            return
    expert, works, hit, pairs = _who(ids, slot, n, K, KP, N, DIRECT)
    if not works:
        return
    at = expert * L + tl.minimum(o, L - 1)
    ROW: tl.constexpr = INNER // 8 if PACKED else INNER
    a = w2 + at * ROW
    scale = s2 + at * (INNER // 32)
    if DOT:
        acc, _ = several(h, a, a, scale, scale, pairs, hit, INNER, BO, BK, N, STAGES, PACKED, False)
        inside = hit[None, :] & (o < L)[:, None]
        tl.store(partial + pairs[None, :] * L + o[:, None], acc, mask=inside)
    else:
        for r in tl.range(0, n):
            chose, pair = _which(ids, r, expert, K, KP)
            if chose:
                one, _ = _one(
                    h + pair * INNER, a, a, scale, scale, INNER, BO, BK, STAGES, PACKED, False
                )
                tl.store(partial + pair * L + o, one, mask=o < L)
