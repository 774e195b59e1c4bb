"""The experts' own products: gate and up with the activation, then down; and both of one row.

A program is (tile of outputs, slot). See `moe_decode_triton` for slots. Row r's j-th choice is pair
r k + j: its hidden row and its output have a place of their own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels import mxfp4_tile, rows_tile
from dspark_kernels.moe_route_triton import sort_key
from dspark_kernels.mxfp4_tile import plane
from dspark_kernels.overlap import begin, wait


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
def _product(
    x, a, b, scale_a, scale_b, rows, live,
    I: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr,  # noqa: E741
    STAGES: tl.constexpr, FORM: tl.constexpr, DUAL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """[BO, N] each; a, b: pointers to the rows of a form, BK words or numbers a step."""
    if not DOT:
        own = x + tl.sum(rows, 0) * I
    if FORM == 0:
        if DOT:
            acc_a, acc_b, _ = rows_tile.gemm(
                x, x, a, b, rows, live, 0, I, I, BO, BK, N, STAGES, False, DUAL, True
            )
        else:
            one_a, one_b, _ = rows_tile.gemv(
                own, x, a, b, 0, I, I, BO, BK, STAGES, False, DUAL, True, False
            )
            acc_a = one_a[:, None]
            acc_b = one_b[:, None]
    elif FORM == 1:
        if DOT:
            acc_a, acc_b = mxfp4_tile.gemm(
                x, a, b, scale_a, scale_b, rows, live, I, BO, BK, N, STAGES, DUAL
            )
        else:
            one_a, one_b = mxfp4_tile.gemv(own, a, b, scale_a, scale_b, I, BO, BK, STAGES, DUAL)
            acc_a = one_a[:, None]
            acc_b = one_b[:, None]
    else:
        acc_a, acc_b = mxfp4_tile.gemm_scaled(
            x, a, b, scale_a, scale_b, rows, live, I, BO, BK, N, STAGES, DUAL
        )
    return acc_a, acc_b


@triton.jit
def gate_up(
    z, ids, w1, w3, s1, s3, h, n, lift, beta, linear_beta,
    K: tl.constexpr, KP: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    DIRECT: tl.constexpr, FORM: tl.constexpr, SITU: tl.constexpr, DOT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """h[pair] = act(W1 z, W3 z) of the slot's expert, for every row that chose it."""
    begin(EARLY)
    wait(EARLY)
    expert, works, hit, pair = _who(ids, tl.program_id(1), n, K, KP, N, DIRECT)
    if not works:
        return
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    at = expert * INNER + tl.minimum(o, INNER - 1)
    ROW: tl.constexpr = L if FORM == 0 else (L // 8 if FORM == 1 else L // 2)
    rows = tl.arange(0, N)
    gate, up = _product(
        z, w1 + at * ROW, w3 + at * ROW, s1 + at * (L // 32), s3 + at * (L // 32), rows, hit,
        L, BO, BK, N, STAGES, FORM, True, DOT,
    )  # fmt: skip
    value = rows_tile.activate(gate, up, beta, linear_beta, SITU)
    value = value.to(h.dtype.element_ty)
    to = o
    if FORM == 1:
        value = (value.to(tl.float32) * lift).to(h.dtype.element_ty)
        to = plane(o, INNER)
    inside = hit[None, :] & (o < INNER)[:, None]
    tl.store(h + pair[None, :] * INNER + to[:, None], value, mask=inside)


@triton.jit
def down(
    h, ids, w2, s2, partial, tail, w_shared, shared, n,
    K: tl.constexpr, KP: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
    SLOTS: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, DIRECT: tl.constexpr, FORM: tl.constexpr, SHARED: tl.constexpr,
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
            acc, _ = _product(tail, a, a, a, a, rows, rows < n, S, BO, SK, N, STAGES, 0, False, DOT)
            inside = (rows < n)[None, :] & (o < L)[:, None]
            tl.store(shared + rows[None, :] * L + o[:, None], acc, mask=inside)
            return
    expert, works, hit, pair = _who(ids, slot, n, K, KP, N, DIRECT)
    if not works:
        return
    at = expert * L + tl.minimum(o, L - 1)
    ROW: tl.constexpr = INNER if FORM == 0 else (INNER // 8 if FORM == 1 else INNER // 2)
    a = w2 + at * ROW
    scale = s2 + at * (INNER // 32)
    acc, _ = _product(h, a, a, scale, scale, pair, hit, INNER, BO, BK, N, STAGES, FORM, False, DOT)
    inside = hit[None, :] & (o < L)[:, None]
    tl.store(partial + pair[None, :] * L + o[:, None], acc, mask=inside)


@triton.jit
def gate_up_one(
    logits, bias, x, norm, w1, w3, ids, weights, h, eps, scaling, beta, linear_beta,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, RENORM: tl.constexpr, SITU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row, few experts, no latent space: the slot-th best expert, found by every program.

    An expert's rank is the number of better ones: EP^2 comparisons at once instead of k rounds and
    a launch of their own. The first tile's programs write ids and weights.
    """
    begin(EARLY)
    wait(EARLY)
    slot = tl.program_id(1)
    e = tl.arange(0, EP)
    score = tl.sigmoid(tl.load(logits + e, mask=e < E, other=0.0))
    key = sort_key(score + tl.load(bias + e, mask=e < E, other=0.0), e)
    key = tl.where(e < E, key, -0x7FFFFFFFFFFFFFFF)
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
    expert = tl.sum(tl.where(rank == slot, e, 0), 0)
    if tl.program_id(0) == 0:
        weight = tl.sum(tl.where(rank == slot, score, 0.0), 0)
        if RENORM:
            weight = weight / (tl.sum(tl.where(rank < K, score, 0.0), 0) + 1e-20)
        tl.store(ids + slot, expert)
        tl.store(weights + slot, weight * scaling)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    at = (expert.to(tl.int64) * INNER + tl.minimum(o, INNER - 1)) * L
    gate, up, square = rows_tile.gemv(
        x, norm, w1 + at, w3 + at, 0, L, L, BO, BK, STAGES, NORM, True, True, False
    )
    if NORM:
        scale = tl.rsqrt(square / L + eps)
        gate = gate * scale
        up = up * scale
    value = rows_tile.activate(gate, up, beta, linear_beta, SITU)
    tl.store(h + slot * INNER + o, value.to(h.dtype.element_ty), mask=o < INNER)


@triton.jit
def down_one(
    h, ids, weights, w2, gate_and_up, w_shared, residual, out, beta, linear_beta,
    K: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, SITU: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row: out = sum_j w_j W2_j h_j + W_shared act(gate, up) + residual, in one pass."""
    begin(EARLY)
    wait(EARLY)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    row = tl.minimum(o, L - 1).to(tl.int64)
    cols = tl.arange(0, BK)
    acc = tl.zeros([BO, BK], tl.float32)
    for j in tl.static_range(K):
        a = w2 + (tl.load(ids + j).to(tl.int64) * L + row) * INNER
        w = tl.load(weights + j)
        for k in tl.static_range(0, INNER, BK):
            x = w * tl.load(h + j * INNER + k + cols).to(tl.float32)
            acc += tl.load(a[:, None] + (k + cols)[None, :]).to(tl.float32) * x[None, :]
    for k in tl.static_range(0, S, BK):
        inside = k + cols < S
        gate = tl.load(gate_and_up + k + cols, mask=inside, other=0.0)
        up = tl.load(gate_and_up + S + k + cols, mask=inside, other=0.0)
        x = rows_tile.activate(gate, up, beta, linear_beta, SITU).to(h.dtype.element_ty)
        a = w_shared + row * S
        tile = tl.load(a[:, None] + (k + cols)[None, :], mask=inside[None, :], other=0.0)
        acc += tile.to(tl.float32) * x.to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if ADD:
        total += tl.load(residual + o, mask=o < L, other=0.0).to(tl.float32)
    tl.store(out + o, total.to(out.dtype.element_ty), mask=o < L)
