"""Between the projections of a mixture of experts: who goes where, and the sum that comes back.

``route`` turns the first projection (router, latent inputs, shared gate and up, in float32) into
the chosen experts and their weights, the experts' inputs z, and the shared expert's hidden row.
``combine`` adds what the experts of each row gave, in the row's own order, so that neither the
other rows nor the order of programs shows in a result.

The top k: k times the largest of one sortable number per expert, score above, id below; of equal
scores the lowest id wins.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.mxfp4_tile import plane
from dspark_kernels.overlap import begin, wait
from dspark_kernels.rows_tile import activate


@triton.jit
def sort_key(score, e):
    """int64 that orders like (score, -e); a NaN is largest, so that no id is ever out of range."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - e).to(tl.int64)


@triton.jit
def top_k(
    logits, bias, scaling,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    RENORM: tl.constexpr,
):  # fmt: skip
    """Ids and weights [KP] of one row; EP and KP are powers of two, slots beyond K are empty."""
    e = tl.arange(0, EP)
    j = tl.arange(0, KP)
    score = tl.sigmoid(tl.load(logits + e, mask=e < E, other=0.0))
    key = sort_key(score + tl.load(bias + e, mask=e < E, other=0.0), e)
    lowest: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    key = tl.where(e < E, key, lowest)
    ids = tl.zeros([KP], tl.int32)
    for place in tl.static_range(K):
        best = tl.max(key, 0)
        key = tl.where(key == best, lowest, key)
        chosen = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)
        ids = tl.where(j == place, chosen, ids)
    weights = tl.sigmoid(tl.load(logits + ids, mask=j < K, other=0.0))
    weights = tl.where(j < K, weights, 0.0)
    if RENORM:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    return ids, weights * scaling


@triton.jit
def _store_z(
    z, value, c, inside, lift, L: tl.constexpr, PLANAR: tl.constexpr
):  # fmt: skip
    """bfloat16 first, then the lift: a power of two changes no digit."""
    if PLANAR:
        rounded = value.to(z.dtype.element_ty).to(tl.float32)
        tl.store(z + plane(c, L), (rounded * lift).to(z.dtype.element_ty), mask=inside)
    else:
        tl.store(z + c, value.to(z.dtype.element_ty), mask=inside)


@triton.jit
def _chunk(
    row, z, tail, start, lift, beta, linear_beta,
    L: tl.constexpr, S: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    PLANAR: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    """Columns start .. of [z | shared hidden]; ``row`` begins at z's first projected column."""
    c = start + tl.arange(0, BLOCK)
    is_z = c < OFFSET
    is_shared = (c >= OFFSET) & (c < OFFSET + S)
    gate = tl.load(row + c, mask=is_z | is_shared, other=0.0)
    if OFFSET > 0:
        _store_z(z, gate, c, is_z, lift, L, PLANAR)
    if S > 0:
        up = tl.load(row + c + S, mask=is_shared, other=0.0)
        value = activate(gate, up, beta, linear_beta, SITU)
        tl.store(tail + c, value.to(tail.dtype.element_ty), mask=is_shared)


@triton.jit
def route(
    projected, bias, x, norm, ids, weights, z, tail, eps, scaling, lift, beta, linear_beta,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, LATENT: tl.constexpr, NORM: tl.constexpr, RENORM: tl.constexpr,
    PLANAR: tl.constexpr, SITU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the choice, z of a layer without a latent space, or columns."""
    begin(EARLY)
    wait(EARLY)
    row = tl.program_id(0)
    part = tl.program_id(1)
    OFFSET: tl.constexpr = L if LATENT else 0
    mine = projected + row * (E + OFFSET + 2 * S)
    if part == 0:
        chosen, weight = top_k(mine, bias, scaling, E, EP, K, KP, RENORM)
        j = tl.arange(0, KP)
        tl.store(ids + row * K + j, chosen, mask=j < K)
        tl.store(weights + row * K + j, weight, mask=j < K)
    elif part == 1 and not LATENT:
        c = tl.arange(0, DP)
        value = tl.load(x + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        if NORM:
            value = value * tl.rsqrt(tl.sum(value * value, 0) / D + eps)
            scale = tl.load(norm + c, mask=c < D, other=0.0).to(tl.float32)
            value = value.to(x.dtype.element_ty).to(tl.float32) * scale
        _store_z(z + row * L, value, c, c < D, lift, L, PLANAR)
    else:
        first: tl.constexpr = 1 if LATENT else 2
        _chunk(
            mine + E, z + row * L, tail + row * (OFFSET + S), (part - first) * BLOCK, lift,
            beta, linear_beta, L, S, OFFSET, BLOCK, PLANAR, SITU,
        )  # fmt: skip


@triton.jit
def combine(
    partial, weights, shared, residual, norm, out, eps, stride,
    L: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
    SHARED: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[row] = norm(sum_j w_j partial[row, j]) + shared + residual; norm needs one block."""
    begin(EARLY)
    wait(EARLY)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < L
    y = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        w = tl.load(weights + row * K + j)
        y += w * tl.load(partial + (row * K + j) * L + c, mask=inside, other=0.0)
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y, 0) / L + eps)
        scale = tl.load(norm + c, mask=inside, other=0.0).to(tl.float32)
        y = y.to(out.dtype.element_ty).to(tl.float32) * scale
    if SHARED:
        y += tl.load(shared + row * L + c, mask=inside, other=0.0)
    if ADD:
        y += tl.load(residual + row * L + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride + c, y.to(out.dtype.element_ty), mask=inside)
