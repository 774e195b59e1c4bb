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
from dspark_kernels.overlap import begin, publish, wait


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
def _of_row(where, at, WIDTH: tl.constexpr, BK: tl.constexpr):
    """Numbers ``at`` of rows of WIDTH, whose first are at ``where``; beyond the last 0."""
    if WIDTH % BK == 0:
        return rows_tile.once(where)
    return tl.load(where, mask=at < WIDTH, other=0.0)


@triton.jit
def _gate_and_up(a, b, L: tl.constexpr, BK: tl.constexpr):
    """Rows of both matrices in tiles, gate and up in turn; a, b: pointers [BO, BK]."""
    tiles = ()
    for k in tl.static_range(0, L, BK):
        tiles = tiles + (rows_tile.once(a + k), rows_tile.once(b + k))  # noqa: RUF005
    return tiles


@triton.jit
def _hidden(
    tiles, row, factor, beta, linear_beta,
    BO: tl.constexpr, BK: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    """act(gate, up) of tiles and the row, times its factor: [BO]."""
    gate = tl.zeros([BO, BK // 8], tl.float32)
    up = tl.zeros([BO, BK // 8], tl.float32)
    for t in tl.static_range(len(row)):
        x = row[t].to(tl.float32)
        gate += rows_tile.fold(tiles[2 * t].to(tl.float32) * x, BO, BK)
        up += rows_tile.fold(tiles[2 * t + 1].to(tl.float32) * x, BO, BK)
    return rows_tile.activate(
        tl.sum(gate, 1) * factor, tl.sum(up, 1) * factor, beta, linear_beta, SITU
    )


@triton.jit
def _tell(
    rank, scores, ids, weights, scaling,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, RENORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The choice in memory, before the next launch may begin: it asks for the same experts."""
    e = tl.arange(0, EP)
    weight = tl.load(scores + e, mask=e < E, other=0.0)
    if RENORM:
        weight = weight / (tl.sum(tl.where(rank < K, weight, 0.0), 0) + 1e-20)
    tl.store(ids + rank, e, mask=rank < K)
    tl.store(weights + rank, weight * scaling, mask=rank < K)
    publish(EARLY)


@triton.jit
def gate_up_one(
    keys, scores, z, scale, w1, w3, w_shared, ids, weights, h, tail, scaling, beta, linear_beta,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr,
    S: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
    RENORM: tl.constexpr, SITU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same BO outputs of the shared expert and of all chosen ones; L is a multiple of BK.

    An expert's rank is the number of better ones: EP^2 comparisons at once instead of k rounds and
    a launch of their own. Programs are few enough to run all at once, and each finds its experts
    once. The first one writes ids and weights, and the next launch, which asks for the same
    experts, may begin when it has. The shared expert's weights need no router: they are in
    registers when it ends.
    """
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    at = tl.arange(0, BK)[None, :]
    if S > 0:
        a = w_shared + tl.minimum(o, S - 1).to(tl.int64)[:, None] * L + at
        tiles = _gate_and_up(a, a + S * L, L, BK)
    wait(EARLY)
    e = tl.arange(0, EP)
    key = tl.load(keys + e, mask=e < E, other=-0x7FFFFFFFFFFFFFFF)
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
    if tl.program_id(0) == 0:
        _tell(rank, scores, ids, weights, scaling, E, EP, K, RENORM, EARLY)
    begin(EARLY)
    factor = tl.load(scale)
    row = ()
    for k in tl.static_range(0, L, BK):
        row = row + (tl.load(z + k + at),)  # noqa: RUF005
    inside = tl.minimum(o, INNER - 1).to(tl.int64)[:, None]
    if S > 0:
        value = _hidden(tiles, row, factor, beta, linear_beta, BO, BK, SITU)
        tl.store(tail + o, value.to(tail.dtype.element_ty), mask=o < S)
    for j in tl.static_range(K):
        expert = tl.sum(tl.where(rank == j, e, 0), 0).to(tl.int64)
        a = (expert * INNER + inside) * L + at
        value = _hidden(
            _gate_and_up(w1 + a, w3 + a, L, BK), row, factor, beta, linear_beta, BO, BK, SITU
        )
        tl.store(h + j * INNER + o, value.to(h.dtype.element_ty), mask=o < INNER)


@triton.jit
def _rows_of_all(
    w_shared, w2, experts, row, at,
    INNER: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows ``row`` of the shared expert and of the chosen ones, side by side, in tiles."""
    tiles = ()
    for k in tl.static_range(0, S, BK):
        where = w_shared + row[:, None] * S + k + at
        tiles = tiles + (_of_row(where, k + at, S, BK),)  # noqa: RUF005
    for j in tl.static_range(len(experts)):
        for k in tl.static_range(0, INNER, BK):
            where = w2 + (experts[j] * L + row[:, None]) * INNER + k + at
            tiles = tiles + (_of_row(where, k + at, INNER, BK),)  # noqa: RUF005
    return tiles


@triton.jit
def down_one(
    h, ids, weights, w2, tail, w_shared, residual, out,
    K: tl.constexpr, INNER: tl.constexpr, L: tl.constexpr, S: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row: out = sum_j w_j W2_j h_j + W_shared tail + residual, in one pass.

    A program takes TILES times BO outputs; the weights of the next are on their way while it adds
    up these. A thread holds the numbers of h that its weights meet. The launch before told the
    choice before it let this one begin, so that the first weights are there when it ends.
    """
    begin(EARLY)
    first = tl.program_id(0) * (TILES * BO)
    o = first + tl.arange(0, BO)
    at = tl.arange(0, BK)[None, :]
    experts = ()
    for j in tl.static_range(K):  # no cache of this processor may have old ids
        experts = experts + (tl.load(ids + j, cache_modifier=".cg").to(tl.int64),)  # noqa: RUF005
    row = tl.minimum(o, L - 1).to(tl.int64)
    tiles = _rows_of_all(w_shared, w2, experts, row, at, INNER, L, S, BK)
    wait(EARLY)
    x = ()
    for k in tl.static_range(0, S, BK):
        x = x + (tl.load(tail + k + at, mask=k + at < S, other=0.0),)  # noqa: RUF005
    for j in tl.static_range(K):
        for k in tl.static_range(0, INNER, BK):
            part = tl.load(h + j * INNER + k + at, mask=k + at < INNER, other=0.0)
            x = x + (part,)  # noqa: RUF005
    factors = ()
    for j in tl.static_range(K):
        factors = factors + (tl.load(weights + j),)  # noqa: RUF005
    SHARED: tl.constexpr = (S + BK - 1) // BK
    EACH: tl.constexpr = (INNER + BK - 1) // BK
    for step in tl.static_range(TILES):
        o = first + step * BO + tl.arange(0, BO)
        if ADD:
            added = tl.load(residual + o, mask=o < L, other=0.0).to(tl.float32)
        here = tiles
        if step + 1 < TILES:
            row = tl.minimum(o + BO, L - 1).to(tl.int64)
            tiles = _rows_of_all(w_shared, w2, experts, row, at, INNER, L, S, BK)
        acc = tl.zeros([BO, BK // 8], tl.float32)
        for t in tl.static_range(len(x)):
            part = rows_tile.fold(here[t].to(tl.float32) * x[t].to(tl.float32), BO, BK)
            if t < SHARED:
                acc += part
            else:
                acc += factors[(t - SHARED) // EACH] * part
        total = tl.sum(acc, 1)
        if ADD:
            total += added
        tl.store(out + o, total.to(out.dtype.element_ty), mask=o < L)
