"""`kda_within_triton` for bfloat16 rows whose gate is bounded: one pass, two exponentials a number.

With m the middle of the chunk's 32 rows and d_r = G_r - G_m, whose size is at most 16 |g| <= 80,

    exp(G_r - G_j) = exp(d_r) exp(-d_j) ;  exp(G_r) = exp(d_r) exp(G_m)
    exp(G_32 - G_j) = exp(-d_j) exp(G_32 - G_m)

so all decays of a row come from exp(d) and exp(-d), and one product holds the scores of all pairs.
Pairs j > r may overflow; they are not taken. d is a sum of g to the row from the middle, never a
difference of sums. bfloat16 has float32's exponents, so factors of e^80 cost it no digits; float32
multiplied in bfloat16 parts would lose some at e^-80, and takes the other kernel.

A program holds all key columns: nothing is read or added up twice.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.kda_within_triton import (
    add_up,
    dot,
    inverse,
    place,
    put_tile,
    rows_of,
    to_middle,
)


@triton.jit(do_not_specialize=["T", "per_row"])
def near_kernel(
    q, k, v, g, beta, table, w, u, Qd, Ke, P, M, end,
    T, per_row, H,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    g_batch, g_row, g_head, b_batch, b_row, b_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    READS: tl.constexpr, KEEPS: tl.constexpr, PACKED: tl.constexpr,
    SOLVE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    head = tile % H
    batch, first, rows = place(tile // H, table, T, per_row, C, PACKED)
    if rows <= 0 and PACKED:
        return
    q += batch * q_batch + first * q_row + head * q_head
    k += batch * k_batch + first * k_row + head * k_head
    v += batch * v_batch + first * v_row + head * v_head
    g += batch * g_batch + first * g_row + head * g_head
    beta += batch * b_batch + first * b_row + head * b_head
    r, key = tl.arange(0, C), tl.arange(0, BK)
    i, j = r[:, None], r[None, :]
    b = tl.load(beta + r * b_row, mask=r < rows, other=0.0).to(tl.float32)
    gs = rows_of(g, g_row, r, rows, key, K)
    ks = rows_of(k, k_row, r, rows, key, K)
    distance = add_up(to_middle(i, j, C // 2), gs, PARTS)
    distance = tl.where(i >= C // 2, distance, -distance)
    to_half = tl.exp(tl.sum(tl.where(i < C // 2, gs, 0.0), 0))
    from_half = tl.exp(tl.sum(tl.where(i < C // 2, 0.0, gs), 0))
    tl.store(end + tile * K + key, to_half * from_half, mask=key < K)
    right = ks * tl.exp(-distance)
    put_tile(Ke + tile * C * K, right * from_half[None, :], r, key, K)
    right = tl.trans(right.to(tl.bfloat16))
    left = tl.exp(distance)
    if READS:
        of_q = rows_of(q, q_row, r, rows, key, K)
        own = tl.sum(of_q * ks, 1)
        of_q *= left
        put_tile(Qd + tile * C * K, of_q * to_half[None, :], r, key, K)
        scores = tl.where(j < i, dot(of_q, right, "bf16"), 0.0)
        scores += tl.where(i == j, own[:, None], 0.0)
        put_tile(P + tile * C * C, scores, r, r, C)
    left *= ks
    A = tl.where(j < i, dot(left, right, "bf16") * b[:, None], 0.0)
    Kd = (left * to_half[None, :]).to(tl.bfloat16)
    found = inverse(A, C, SOLVE)
    if KEEPS:
        put_tile(M + tile * C * C, found, r, r, C)
    found = (found * b[None, :]).to(tl.bfloat16)
    put_tile(w + tile * C * K, dot(found, Kd, "bf16"), r, key, K)
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        vs = rows_of(v, v_row, r, rows, columns, V)
        put_tile(u + tile * C * V, dot(found, vs, "bf16"), r, columns, V)
