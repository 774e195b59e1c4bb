"""From the states that enter chunks to the states at positions inside them, and back.

A position p stands r = p mod 32 rows into a chunk whose entering state S and updates U are known:

    S_p = diag(exp G_r) S + sum_(j < r) (k_j exp(G_r - G_j)) U_j^T

Backward one program takes all positions of one chunk, in ascending order, so that nothing is added
by two programs and results do not change from run to run:

    dS += exp(G_r) dS_p ;  dU_j += (k_j exp(G_r - G_j)) dS_p ;  dk_j += exp(G_r - G_j) X_j
    dg_i += sum_(j < i) k_j exp(G_r - G_j) X_j + exp(G_r) sum_v S dS_p   (i < r) ;  X = U dS_p^T
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.kda_carry_triton import tile_of
from dspark_kernels.kda_within_triton import add_up, dot, put_tile, rows_of


@triton.jit
def before(k, g, k_row, g_row, r, inside, columns, K: tl.constexpr, PARTS: tl.constexpr):
    """Of the rows before a position: k_j exp(G_r - G_j), exp(G_r - G_j) and exp(G_r); else 0."""
    gs = rows_of(g, g_row, r, inside, columns, K)
    rest = tl.exp(add_up(r[None, :] > r[:, None], gs, PARTS))
    rest = tl.where((r < inside)[:, None], rest, 0.0)
    return rows_of(k, k_row, r, inside, columns, K) * rest, rest, tl.exp(tl.sum(gs, 0))


@triton.jit(do_not_specialize=["T", "per_row", "A"])
def states_kernel(
    k, g, states, U, positions, out, T, per_row, H, A,
    k_batch, k_row, k_head, g_batch, g_row, g_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    anchor, head = program // tiles // H, program // tiles % H
    batch = anchor // A
    position = tl.minimum(tl.maximum(tl.load(positions + anchor), 0), T)
    chunk = position // C
    inside = position - chunk * C
    tile = (batch * per_row + chunk) * H + head
    k += batch * k_batch + chunk * C * k_row + head * k_head
    g += batch * g_batch + chunk * C * g_row + head * g_head
    r, value = tl.arange(0, C), program % tiles * BV + tl.arange(0, BV)
    Us = tile_of(U + tile * C * V, r, value, V)
    for start in range(0, K, BK):
        key = start + tl.arange(0, BK)
        kept, _, decay = before(k, g, k_row, g_row, r, inside, key, K, PARTS)
        at = key[:, None] * V + value[None, :]
        here = (key < K)[:, None] & (value < V)[None, :]
        S = tl.load(states + tile * K * V + at, mask=here, other=0.0)
        S = S * decay[:, None] + dot(tl.trans(kept), Us, PRECISION)
        tl.store(out + (anchor * H + head) * K * V + at, S.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["per_row", "A"])
def states_back_kernel(
    k, g, dout, positions, order, firsts, dU, dS, per_row, H, A,
    k_batch, k_row, k_head, g_batch, g_row, g_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    tile, head = program // tiles, program // tiles % H
    batch, chunk = tile // H // per_row, tile // H % per_row
    k += batch * k_batch + chunk * C * k_row + head * k_head
    g += batch * g_batch + chunk * C * g_row + head * g_head
    first = tl.load(firsts + batch * (per_row + 1) + chunk)
    last = tl.load(firsts + batch * (per_row + 1) + chunk + 1)
    r, value = tl.arange(0, C), program % tiles * BV + tl.arange(0, BV)
    dUs = tl.zeros([C, BV], tl.float32)
    for start in range(0, K, BK):
        key = start + tl.arange(0, BK)
        at = key[:, None] * V + value[None, :]
        here = (key < K)[:, None] & (value < V)[None, :]
        total = tl.zeros([BK, BV], tl.float32)
        for i in tl.range(first, last):
            anchor = batch * A + tl.load(order + batch * A + i)
            inside = tl.load(positions + anchor) - chunk * C
            kept, _, decay = before(k, g, k_row, g_row, r, inside, key, K, PARTS)
            given = tl.load(dout + (anchor * H + head) * K * V + at, mask=here, other=0.0)
            dUs += dot(kept, given, PRECISION)
            total += given * decay[:, None]
        tl.store(dS + tile * K * V + at, total, mask=here)
    put_tile(dU + tile * C * V, dUs, r, value, V)


@triton.jit(do_not_specialize=["per_row", "A"])
def rows_back_kernel(
    k, g, dout, positions, order, firsts, states, U, dk, dg, per_row, H, A,
    k_batch, k_row, k_head, g_batch, g_row, g_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (K + BK - 1) // BK
    program = tl.program_id(0).to(tl.int64)
    tile, head = program // tiles, program // tiles % H
    batch, chunk = tile // H // per_row, tile // H % per_row
    k += batch * k_batch + chunk * C * k_row + head * k_head
    g += batch * g_batch + chunk * C * g_row + head * g_head
    first = tl.load(firsts + batch * (per_row + 1) + chunk)
    last = tl.load(firsts + batch * (per_row + 1) + chunk + 1)
    r, key = tl.arange(0, C), program % tiles * BK + tl.arange(0, BK)
    dks = tl.zeros([C, BK], tl.float32)
    dgs = tl.zeros([C, BK], tl.float32)
    for i in tl.range(first, last):
        anchor = batch * A + tl.load(order + batch * A + i)
        inside = tl.load(positions + anchor) - chunk * C
        kept, rest, decay = before(k, g, k_row, g_row, r, inside, key, K, PARTS)
        X = tl.zeros([C, BK], tl.float32)
        flow = tl.zeros([BK], tl.float32)
        for start in range(0, V, BV):
            value = start + tl.arange(0, BV)
            at = key[:, None] * V + value[None, :]
            here = (key < K)[:, None] & (value < V)[None, :]
            given = tl.load(dout + (anchor * H + head) * K * V + at, mask=here, other=0.0)
            S = tl.load(states + tile * K * V + at, mask=here, other=0.0)
            flow += tl.sum(S * given, 1)
            X += dot(tile_of(U + tile * C * V, r, value, V), tl.trans(given), PRECISION)
        dks += X * rest
        passed = add_up(r[None, :] < r[:, None], X * kept, PARTS) + (decay * flow)[None, :]
        dgs += tl.where((r < inside)[:, None], passed, 0.0)
    put_tile(dk + tile * C * K, dks, r, key, K)
    put_tile(dg + tile * C * K, dgs, r, key, K)
