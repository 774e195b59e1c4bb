"""Gradients inside a chunk of KDA, once those of its states and updates are known.

Letters and formulas of the forward are those of `kda_within_triton`. With dU and dS' from the pass
back and Z = beta (V - Kd S), U = M Z:

    dZ = M^T dU ;  dV = beta dZ ;  dKd = -beta dZ S^T ;  dQd = dO S^T ;  dKe = U dS'^T
    dP = dO U^T  (j <= r) ;  dA = -dZ U^T  (j < r)

(dM never appears: dA = -M^T dM M^T with dM = dU Z^T.) With D = exp(G_r - G_j), level by level:

    dq_r  = sum_j dP k_j D + dQd exp(G_r)
    dk_r  = beta_r sum_j dA k_j D + dKd exp(G_r)                          as a row
          + sum_r D (dP q_r + dA beta_r k_r) + dKe exp(G_32 - G)          as a column
    dbeta = sum_v dZ V - sum_d Kd (dZ S^T) + sum_j dA A / beta

An exponent is a sum of g, so its gradient, row times dq and dk, goes to every g in that sum, by the
transposed 0 / 1 matrix: again only sums, no differences. exp(G_32) brings sum_v S dS' to all g.
A row's own pair, j = r, has no decay.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.kda_carry_triton import tile_of
from dspark_kernels.kda_within_triton import (
    add_up,
    dot,
    met_at,
    place,
    put_tile,
    rows_of,
    to_middle,
)


@triton.jit
def put_rows(x, value, stride, r, rows, columns, width):
    """Store the rows of a chunk that exist."""
    here = (r < rows)[:, None] & (columns < width)[None, :]
    at = x + r[:, None] * stride + columns[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["T", "per_row"])
def couplings_kernel(
    v, beta, dout, M, U, dU, table, dZ, dv, dP, dA, dbeta,
    T, per_row, H,
    v_batch, v_row, v_head, b_batch, b_row, b_head, o_batch, o_row, o_head,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    READS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    head = tile % H
    batch, first, rows = place(tile // H, table, T, per_row, C, PACKED)
    if rows <= 0:
        return
    v += batch * v_batch + first * v_row + head * v_head
    beta += batch * b_batch + first * b_row + head * b_head
    dout += batch * o_batch + first * o_row + head * o_head
    own = (batch * T + first) * H + head
    r = tl.arange(0, C)
    b = tl.load(beta + r * b_row, mask=r < rows, other=0.0).to(tl.float32)
    back = tl.trans(tile_of(M + tile * C * C, r, r, C))
    of_q = tl.zeros([C, C], tl.float32)
    of_k = tl.zeros([C, C], tl.float32)
    db = tl.zeros([C], tl.float32)
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        Ut = tl.trans(tile_of(U + tile * C * V, r, columns, V))
        dZs = dot(back, tile_of(dU + tile * C * V, r, columns, V), PRECISION)
        put_tile(dZ + tile * C * V, dZs, r, columns, V)
        put_rows(dv + own * V, dZs * b[:, None], H * V, r, rows, columns, V)
        db += tl.sum(dZs * rows_of(v, v_row, r, rows, columns, V), 1)
        of_k -= dot(dZs, Ut, PRECISION)
        if READS:
            of_q += dot(rows_of(dout, o_row, r, rows, columns, V), Ut, PRECISION)
    j = r[None, :]
    put_tile(dA + tile * C * C, tl.where(j < r[:, None], of_k, 0.0), r, r, C)
    if READS:
        put_tile(dP + tile * C * C, tl.where(j <= r[:, None], of_q, 0.0), r, r, C)
    tl.store(dbeta + own + r * H, db, mask=r < rows)


@triton.jit
def through_level(
    q, k, g, q_row, k_row, g_row, rows, columns, b, P, A, dq, dk, dg, db, HALF: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, DIRECT: tl.constexpr, READS: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Adds what the pairs of one level bring; P and A point to the chunk's dP and dA."""
    r, j = tl.arange(0, C), tl.arange(0, C)[None, :]
    gs = rows_of(g, g_row, r, rows, columns, K)
    distance = add_up(to_middle(r[:, None], j, HALF), gs, PARTS)
    if DIRECT:
        sign = tl.where(r % (2 * HALF) >= HALF, 1.0, -1.0)[:, None]
        back = tl.exp(-sign * distance)
        met = (r[:, None] // (2 * HALF) == j // (2 * HALF)) & (j < r[:, None])
        decay = tl.exp(sign * distance)
    else:
        decay = tl.exp(distance)
        back = decay
        met = met_at(r[:, None], j, HALF)
    at = r[:, None] * C + j
    ks = rows_of(k, k_row, r, rows, columns, K)
    right = ks * back
    moved = tl.zeros_like(right)
    if READS:
        qs = rows_of(q, q_row, r, rows, columns, K)
        found = dot(tl.load(P + at, mask=met, other=0.0), right, PRECISION) * decay
        dq += found
        moved = qs * found
    found = dot(tl.load(A + at, mask=met, other=0.0), right, PRECISION) * decay
    db += tl.sum(found * ks, 1)
    found *= b[:, None]
    dk += found
    moved += ks * found
    found = dot(tl.trans(tl.load(A + at, mask=met, other=0.0)), ks * decay * b[:, None], PRECISION)
    if READS:
        of_q = tl.trans(tl.load(P + at, mask=met, other=0.0))
        found += dot(of_q, qs * decay, PRECISION)
    found *= back
    dk += found
    if DIRECT:
        moved = sign * (moved - ks * found)
    else:
        moved += ks * found
    dg += add_up(to_middle(j, r[:, None], HALF), moved, PARTS)
    return dq, dk, dg, db


@triton.jit
def through_states(
    states, dstates, U, dZ, dout, o_row, r, rows, columns,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    READS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dO S^T, U dS'^T, -dZ S^T and sum_v S dS' of these key columns."""
    dQd = tl.zeros([C, BK], tl.float32)
    dKe = tl.zeros([C, BK], tl.float32)
    dKd = tl.zeros([C, BK], tl.float32)
    flow = tl.zeros([BK], tl.float32)
    for start in range(0, V, BV):
        value = start + tl.arange(0, BV)
        at = columns[:, None] * V + value[None, :]
        inside = (columns < K)[:, None] & (value < V)[None, :]
        S = tl.load(states + at, mask=inside, other=0.0)
        dS = tl.load(dstates + at, mask=inside, other=0.0)
        flow += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        St = tl.trans(S)
        dKe += dot(tile_of(U, r, value, V), tl.trans(dS), PRECISION)
        dKd -= dot(tile_of(dZ, r, value, V), St, PRECISION)
        if READS:
            dQd += dot(rows_of(dout, o_row, r, rows, value, V), St, PRECISION)
    return dQd, dKe, dKd, flow


@triton.jit(do_not_specialize=["T", "per_row", "tokens"])
def rows_kernel(
    q, k, g, beta, dout, states, dstates, U, dZ, dP, dA, end, more_dk, more_dg, table,
    dq, dk, dg, dbeta,
    T, per_row, H, tokens,
    q_batch, q_row, q_head, k_batch, k_row, k_head, g_batch, g_row, g_head,
    b_batch, b_row, b_head, o_batch, o_row, o_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BOUNDED: tl.constexpr, READS: tl.constexpr, MORE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, part = tl.program_id(0).to(tl.int64) // tiles, tl.program_id(0).to(tl.int64) % tiles
    head = tile % H
    batch, first, rows = place(tile // H, table, T, per_row, C, PACKED)
    if rows <= 0:
        return
    q += batch * q_batch + first * q_row + head * q_head
    k += batch * k_batch + first * k_row + head * k_head
    g += batch * g_batch + first * g_row + head * g_head
    r, columns = tl.arange(0, C), part * BK + tl.arange(0, BK)
    b = tl.load(beta + batch * b_batch + (first + r) * b_row + head * b_head,
                mask=r < rows, other=0.0).to(tl.float32)  # fmt: skip
    dQd, dKe, dKd, flow = through_states(
        states + tile * K * V, dstates + tile * K * V, U + tile * C * V, dZ + tile * C * V,
        dout + batch * o_batch + first * o_row + head * o_head, o_row, r, rows, columns,
        K, V, BK, BV, C, READS, PRECISION,
    )  # fmt: skip
    i, j = r[:, None], r[None, :]
    ks = rows_of(k, k_row, r, rows, columns, K)
    gs = rows_of(g, g_row, r, rows, columns, K)
    total = tl.exp(add_up(j <= i, gs, PARTS))
    dqs = dQd * total
    dks = dKd * total
    db = tl.sum(dks * ks, 1)
    dks *= b[:, None]
    moved = ks * dks
    if READS:
        moved += rows_of(q, q_row, r, rows, columns, K) * dqs
    dgs = add_up(j >= i, moved, PARTS)
    as_column = dKe * tl.exp(add_up(j > i, gs, PARTS))
    dks += as_column
    of_end = tl.load(end + tile * K + columns, mask=columns < K, other=0.0) * flow
    dgs += add_up(j < i, ks * as_column, PARTS) + of_end[None, :]
    P, A = dP + tile * C * C, dA + tile * C * C
    for level in tl.static_range(1 if BOUNDED else 5):
        dqs, dks, dgs, db = through_level(
            q, k, g, q_row, k_row, g_row, rows, columns, b, P, A, dqs, dks, dgs, db,
            C >> (level + 1), K, C, False, READS, PRECISION, PARTS,
        )  # fmt: skip
    if BOUNDED:
        dqs, dks, dgs, db = through_level(
            q, k, g, q_row, k_row, g_row, rows, columns, b, P, A, dqs, dks, dgs, db,
            C // 4, K, C, True, READS, PRECISION, PARTS,
        )  # fmt: skip
    own = (batch * T + first) * H + head
    if READS:
        self = tl.load(P + r * (C + 1))[:, None].to(tl.float32)
        dks += self * rows_of(q, q_row, r, rows, columns, K)
        dqs += self * rows_of(k, k_row, r, rows, columns, K)
        put_rows(dq + own * K, dqs, H * K, r, rows, columns, K)
    if MORE:
        dks += tile_of(more_dk + tile * C * K, r, columns, K)
        dgs += tile_of(more_dg + tile * C * K, r, columns, K)
    put_rows(dk + own * K, dks, H * K, r, rows, columns, K)
    put_rows(dg + own * K, dgs, H * K, r, rows, columns, K)
    tl.store(dbeta + part * tokens + own + r * H, db, mask=r < rows)
