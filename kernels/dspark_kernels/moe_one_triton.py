"""A mixture of experts over one row without a latent space, in three launches (Triton).

    router_one     score and key of every expert, and the row as the experts read it
    gate_up_one    h_j = act(W1_j z, W3_j z) of the chosen experts and of the shared one
    down_one       out = sum_j w_j W2_j h_j + W_shared h_shared + residual

At batch 1 what is not bytes is waiting, so each asks for all that it may before it waits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, var-annotated, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels import rows_tile
from dspark_kernels.moe_route_triton import sort_key
from dspark_kernels.overlap import ahead, begin, publish, wait


@triton.jit
def _hidden_one(
    z, scale, a, b, out, o, width, beta, linear_beta,
    I: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,  # noqa: E741
    SITU: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[o] = act(a z, b z), z times its scale."""
    if HELD > 0:
        gate, up, _ = rows_tile.gemv_held(
            z, z, a, b, a, I, BO, BK, HELD if EARLY else 1, False, True, 0, EARLY
        )
    else:
        gate, up, _ = rows_tile.gemv(z, z, a, b, 0, I, I, BO, BK, STAGES, False, True, True, EARLY)
    factor = tl.load(scale)
    gate = tl.sum(gate, 1) * factor
    up = tl.sum(up, 1) * factor
    value = rows_tile.activate(gate, up, beta, linear_beta, SITU)
    tl.store(out + o, value.to(out.dtype.element_ty), mask=o < width)


@triton.jit
def router_one(
    x, norm, router, bias, keys, scores, z, scale, eps,
    L: tl.constexpr, LP: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row, a program per expert: its score, and a key that orders experts by choice.

    The first program leaves the row as the experts read it, x times the norm's weight, and the
    factor that the norm divides it by. All but x is in registers before x is there.
    """
    begin(EARLY)
    e = tl.program_id(0)
    c = tl.arange(0, LP)
    inside = c < L
    w = tl.load(router + e.to(tl.int64) * L + c, mask=inside, other=0.0)
    moved = tl.load(bias + e)
    if NORM:
        by = tl.load(norm + c, mask=inside, other=0.0)
    wait(EARLY)
    row = tl.load(x + c, mask=inside, other=0.0)
    factor = 1.0
    wide = row.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / L + eps)
        row = (wide * by.to(tl.float32)).to(row.dtype)
    logit = factor * tl.sum(row.to(tl.float32) * w.to(tl.float32), 0)
    score = tl.sigmoid(logit)
    tl.store(scores + e, score)
    tl.store(keys + e, sort_key(score + moved, e))
    if e == 0:
        tl.store(z + c, row, mask=inside)
        tl.store(scale, factor)


@triton.jit
def gate_up_one(
    keys, scores, z, scale, w1, w3, w_shared, ids, weights, h, tail, scaling, beta, linear_beta,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr,
    S: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    RENORM: tl.constexpr, SITU: tl.constexpr, AHEAD: tl.constexpr,
    HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row, few experts, no latent space: the slot-th best expert, found by every program.

    An expert's rank is the number of better ones: EP^2 comparisons at once instead of k rounds and
    a launch of their own. The first tile's programs write ids and weights, and the next launch,
    which asks for the same experts, may begin when they have. Slot 0 is the shared expert where
    there is one: its weights are on their way while the router ends.
    """
    slot = tl.program_id(1)
    first = tl.program_id(0) * BO
    o = first + tl.arange(0, BO)
    if S > 0:
        if slot == 0:
            a = w_shared + tl.minimum(o, S - 1).to(tl.int64) * L
            if AHEAD > 0:
                at = w_shared + tl.minimum(first, S - 1).to(tl.int64) * L
                count = tl.minimum(AHEAD, tl.maximum(S - first, 1)) * L
                ahead(at, count, EARLY)
                ahead(at + S * L, count, EARLY)
            _hidden_one(
                z, scale, a, a + S * L, tail, o, S, beta, linear_beta,
                L, BO, BK, STAGES, SITU, HELD, EARLY,
            )  # fmt: skip
            return
        slot -= 1
    wait(EARLY)
    if tl.program_id(0) > 0:
        begin(EARLY)
    e = tl.arange(0, EP)
    key = tl.load(keys + e, mask=e < E, other=-0x7FFFFFFFFFFFFFFF)
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
    expert = tl.sum(tl.where(rank == slot, e, 0), 0)
    if tl.program_id(0) == 0:
        score = tl.load(scores + e, mask=e < E, other=0.0)
        weight = tl.sum(tl.where(rank == slot, score, 0.0), 0)
        if RENORM:
            weight = weight / (tl.sum(tl.where(rank < K, score, 0.0), 0) + 1e-20)
        tl.store(ids + slot, expert)
        tl.store(weights + slot, weight * scaling)
        publish(EARLY)
        begin(EARLY)
    at = (expert.to(tl.int64) * INNER + tl.minimum(o, INNER - 1)) * L
    _hidden_one(
        z, scale, w1 + at, w3 + at, h + slot * INNER, o, INNER, beta, linear_beta,
        L, BO, BK, STAGES, SITU, HELD, False,
    )  # fmt: skip


@triton.jit
def _shared_tile(w_shared, row, at, S: tl.constexpr, BK: tl.constexpr):
    """Columns of the shared expert's rows."""
    where = w_shared + row[:, None] * S + at
    return rows_tile.once(where) if S % BK == 0 else tl.load(where, mask=at < S, other=0.0)


@triton.jit
def _expert_tile(w2, ids, row, k, at, L: tl.constexpr, INNER: tl.constexpr):
    """Columns k + at of the experts' rows side by side. No cache of this processor has old ids."""
    expert = tl.load(ids + k // INNER, cache_modifier=".cg").to(tl.int64)
    return rows_tile.once(w2 + (expert * L + row[:, None]) * INNER + (k % INNER + at))


@triton.jit
def down_one(
    h, ids, weights, w2, tail, w_shared, residual, out,
    K: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, HELD: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row: out = sum_j w_j W2_j h_j + W_shared tail + residual, in one pass.

    A thread loads the numbers of h that its weights meet: no load waits for another thread. The
    launch before told the choice before it let this one begin, so that HELD tiles of the shared
    expert and of the chosen ones are in registers when it ends.
    """
    begin(EARLY)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    row = tl.minimum(o, L - 1).to(tl.int64)
    at = tl.arange(0, BK)[None, :] + tl.zeros([BO, 1], tl.int32)
    held = ()
    for k in tl.static_range(0, S, BK):
        if k < HELD * BK:
            held = held + (_shared_tile(w_shared, row, k + at, S, BK),)  # noqa: RUF005
    SHARED: tl.constexpr = (S + BK - 1) // BK
    for k in tl.static_range(0, K * INNER, BK):
        if SHARED * BK + k < HELD * BK:
            held = held + (_expert_tile(w2, ids, row, k, at, L, INNER),)  # noqa: RUF005
    wait(EARLY)
    acc = tl.zeros([BO, BK // 8], tl.float32)
    for k in tl.static_range(0, S, BK):
        tile = held[k // BK] if k < HELD * BK else _shared_tile(w_shared, row, k + at, S, BK)
        x = tl.load(tail + k + at, mask=k + at < S, other=0.0)
        acc += rows_tile.fold(tile.to(tl.float32) * x.to(tl.float32), BO, BK)
    for k in tl.static_range(0, K * INNER, BK):
        if SHARED * BK + k < HELD * BK:
            tile = held[SHARED + k // BK]
        else:
            tile = _expert_tile(w2, ids, row, k, at, L, INNER)
        x = tl.load(h + k + at).to(tl.float32)
        w = tl.load(weights + k // INNER)
        acc += w * rows_tile.fold(tile.to(tl.float32) * x, BO, BK)
    if ADD:
        added = tl.load(residual + o, mask=o < L, other=0.0).to(tl.float32)
    total = tl.sum(acc, 1)
    if ADD:
        total += added
    tl.store(out + o, total.to(out.dtype.element_ty), mask=o < L)
