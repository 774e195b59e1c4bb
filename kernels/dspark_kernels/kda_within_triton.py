"""What a chunk of 32 rows of KDA does by itself, before the state is known: one program per chunk.

With G the sum of g from the chunk's first row, Kd = K exp(G), Ke = K exp(G_32 - G), Qd = Q exp(G):

    A[r,j] = beta_r sum_d k_r k_j exp(G_r - G_j)  (j < r) ;  M = (I + A)^-1
    w = M beta Kd ;  u = M beta V ;  P[r,j] = sum_d q_r k_j exp(G_r - G_j)  (j <= r)

which leaves U = u - w S, O = Qd S + P U and S' = exp(G_32) S + Ke^T U to the pass over the chunks.

**Decay between rows, for any g.** A pair (r, j) is met at the level `half` = 16, 8, .. at which r
lies in the right and j in the left half of one block of 2 half rows. With m the block's middle,

    exp(G_r - G_j) = exp(g_m + .. + g_r) exp(g_(j+1) + .. + g_(m-1))

and both exponents are sums of numbers <= 0: no factor can overflow, and no digits are lost to
differences. One product of [32, K] by [K, 32] per level, masked to the level's pairs. Where the
gate promises 16 |g| <= 80, level 16 is followed by one product for the blocks of 16 rows, factored
at their middle, with exponents within +-40; otherwise by levels 8, 4, 2 and 1. The row
itself, j = r, has no decay. The sums of g are products too, of 0 / 1 matrices with g in bfloat16
parts, which are exact.

(I + A)^-1 grows by the same levels: with X the inverse of the blocks of `half` rows, that of the
blocks of 2 half rows is X - X A_level X, so that only true inverses are ever formed.

Everything that leaves the kernel lies by chunk and head, [chunks, H, 32, *].

**No product has 64 rows.** On Hopper Triton would make it one of a warp group that reads its left
factor from registers, which ptxas before CUDA 13.3 may reuse too early (triton-lang/triton issue
9433). Chunks of 64 rows with tiles of 32 columns gave NaN and read outside memory.

Letters: C = 32 rows of a chunk, H heads, K key width, V value width, BK and BV columns of a tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b with float32 sums; the factors as bfloat16, or in the parts that PRECISION names."""
    tl.static_assert(a.shape[0] < 64, "a product of 64 rows is one of a warp group")
    if PRECISION == "bf16":
        product = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return product


@triton.jit
def add_up(which, g, PARTS: tl.constexpr):
    """which @ g for a 0 / 1 matrix; g in PARTS bfloat16 numbers of 8 bits each."""
    ones, part = tl.where(which, 1.0, 0.0).to(tl.bfloat16), g.to(tl.bfloat16)
    tl.static_assert(which.shape[0] < 64, "a product of 64 rows is one of a warp group")
    total = tl.dot(ones, part)
    for _ in tl.static_range(PARTS - 1):
        g -= part.to(tl.float32)
        part = g.to(tl.bfloat16)
        total += tl.dot(ones, part)
    return total


@triton.jit
def met_at(r, j, HALF: tl.constexpr):
    """Pairs whose j is in the left and r in the right half of one block."""
    same = r // (2 * HALF) == j // (2 * HALF)
    return same & (r % (2 * HALF) >= HALF) & (j % (2 * HALF) < HALF)


@triton.jit
def to_middle(r, j, HALF: tl.constexpr):
    """The rows j between the middle of r's block and r: those whose decay parts r from it."""
    middle = r // (2 * HALF) * (2 * HALF) + HALF
    return ((j >= middle) & (j <= r)) | ((j > r) & (j < middle))


@triton.jit
def place(chunk, table, T, per_row, C: tl.constexpr, PACKED: tl.constexpr):
    """Batch row, first row and number of rows (0 or less: none) of a chunk."""
    if PACKED:
        return chunk * 0, tl.load(table + 2 * chunk), tl.load(table + 2 * chunk + 1)
    first = chunk % per_row * C
    return chunk // per_row, first, tl.minimum(T - first, C)


@triton.jit
def rows_of(x, stride, r, rows, columns, width):
    """[C, columns] of a tensor in memory as float32, zero outside."""
    here = (r < rows)[:, None] & (columns < width)[None, :]
    return tl.load(x + r[:, None] * stride + columns[None, :], mask=here, other=0.0).to(tl.float32)


@triton.jit
def put_tile(x, value, r, columns, width):
    """Store all C rows of a chunk's own tile."""
    at = x + r[:, None] * width + columns[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(columns < width)[None, :])


@triton.jit
def pair_up(
    q, k, g, q_row, k_row, g_row, rows, scores, A, HALF: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DIRECT: tl.constexpr, READS: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Adds sum q_r k_j exp(G_r - G_j) and the same of k for the pairs of one level.

    DIRECT instead takes all pairs j < r of a block of 2 half rows, with factors that may exceed 1.
    """
    r, j = tl.arange(0, C), tl.arange(0, C)[None, :]
    way = to_middle(r[:, None], j, HALF)
    sign = tl.where(r % (2 * HALF) >= HALF, 1.0, -1.0)[:, None]
    of_q = tl.zeros([C, C], tl.float32)
    of_k = tl.zeros([C, C], tl.float32)
    for start in range(0, K, BK):
        columns = start + tl.arange(0, BK)
        gs = rows_of(g, g_row, r, rows, columns, K)
        ks = rows_of(k, k_row, r, rows, columns, K)
        distance = add_up(way, gs, PARTS)
        if DIRECT:
            distance *= sign
            right = tl.trans(ks * tl.exp(-distance))
            decay = tl.exp(distance)
            left = ks * decay
        else:
            decay = tl.exp(distance)
            left = ks * decay
            right = tl.trans(left)
        of_k += dot(left, right, PRECISION)
        if READS:
            qs = rows_of(q, q_row, r, rows, columns, K)
            of_q += dot(qs * decay, right, PRECISION)
    if DIRECT:
        met = (r[:, None] // (2 * HALF) == j // (2 * HALF)) & (j < r[:, None])
    else:
        met = met_at(r[:, None], j, HALF)
    return scores + tl.where(met, of_q, 0.0), A + tl.where(met, of_k, 0.0)


@triton.jit
def inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A."""
    r, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    found = tl.where(r == j, 1.0, 0.0) - tl.where(met_at(r, j, 1), A, 0.0)
    for level in tl.static_range(1, 5):
        between = tl.where(met_at(r, j, 1 << level), A, 0.0)
        found -= dot(dot(found, between, PRECISION), found, PRECISION)
    return found


@triton.jit(do_not_specialize=["T", "per_row"])
def within_kernel(
    q, k, v, g, beta, table, w, u, Qd, Ke, P, M, end,
    T, per_row, H,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    g_batch, g_row, g_head, b_batch, b_row, b_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    BOUNDED: tl.constexpr, READS: tl.constexpr, KEEPS: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr, PARTS: tl.constexpr,
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
    r = tl.arange(0, C)
    b = tl.load(beta + r * b_row, mask=r < rows, other=0.0).to(tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    A = tl.zeros([C, C], tl.float32)
    for level in tl.static_range(1 if BOUNDED else 5):
        scores, A = pair_up(q, k, g, q_row, k_row, g_row, rows, scores, A, C >> (level + 1),
                            K, BK, C, False, READS, PRECISION, PARTS)  # fmt: skip
    if BOUNDED:
        scores, A = pair_up(q, k, g, q_row, k_row, g_row, rows, scores, A, C // 4,
                            K, BK, C, True, READS, PRECISION, PARTS)  # fmt: skip
    found = inverse(A * b[:, None], C, SOLVE)
    if KEEPS:
        put_tile(M + tile * C * C, found, r, r, C)
    found *= b[None, :]
    for start in range(0, V, BV):
        columns = start + tl.arange(0, BV)
        vs = rows_of(v, v_row, r, rows, columns, V)
        put_tile(u + tile * C * V, dot(found, vs, PRECISION), r, columns, V)
    own = tl.zeros([C], tl.float32)
    for start in range(0, K, BK):
        columns = start + tl.arange(0, BK)
        gs = rows_of(g, g_row, r, rows, columns, K)
        ks = rows_of(k, k_row, r, rows, columns, K)
        total = tl.exp(add_up(r[None, :] <= r[:, None], gs, PARTS))
        put_tile(w + tile * C * K, dot(found, ks * total, PRECISION), r, columns, K)
        rest = tl.exp(add_up(r[None, :] > r[:, None], gs, PARTS))
        put_tile(Ke + tile * C * K, ks * rest, r, columns, K)
        tl.store(end + tile * K + columns, tl.exp(tl.sum(gs, 0)), mask=columns < K)
        if READS:
            qs = rows_of(q, q_row, r, rows, columns, K)
            put_tile(Qd + tile * C * K, qs * total, r, columns, K)
            own += tl.sum(qs * ks, 1)
    if READS:
        scores += tl.where(r[:, None] == r[None, :], own[:, None], 0.0)
        put_tile(P + tile * C * C, scores, r, r, C)
