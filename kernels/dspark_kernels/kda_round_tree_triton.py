"""A KDA layer of one round whose new rows form a tree, in one launch (Triton); see `kda_decode`.

One program holds one head of one sequence. Its rows are a tile of four parts, each of TP rows:

    0  k of the slots        1  q of the new rows        2  k of the new rows        3  none

of which the first two are read against the state: slots are folded in, new rows read. The algebra
is that of `kda_rows_triton`. The state passes in tiles of BV columns.

Letters: B batch, T new rows, R slots, H heads, K key width, V value width, C channels, W width of
the convolution, S = 4 TP rows of a tile, X width of a tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda_round_triton import finish, hold
from dspark_kernels.kda_rows_triton import (
    first,
    gram_by_difference,
    gram_by_factors,
    log_decay,
    product,
    read,
    sigmoid,
    substitute,
    unit,
    write,
)
from dspark_kernels.overlap import begin, wait

exact_floats()


@triton.jit
def _convolved(
    rows_ptr, held_ptr, conv_ptr, taps_ptr, at, at_q, at_k, query, n, t, slot, real, s_rt, s_ht, C,
    W: tl.constexpr,
):  # fmt: skip
    """silu of the convolution at channels ``at`` of every row, [S, X], zeros where not real; the
    weights stand at ``at_q`` for query rows and at ``at_k`` for others, [1, X]."""
    x = tl.zeros((t.shape[0], at_q.shape[1]), dtype=tl.float32)
    for w in tl.static_range(W):
        place = tl.load(taps_ptr + t * W + w, mask=real & ~slot, other=0)
        in_held = real & (slot | (place < W - 1))
        held, new = tl.where(slot, t + w, n + place)[:, None], (place - (W - 1))[:, None]
        u = tl.load(held_ptr + held * s_ht + at, mask=in_held[:, None], other=0.0).to(tl.float32)
        u += tl.load(rows_ptr + new * s_rt + at, mask=(real & ~in_held)[:, None], other=0.0)
        weight = tl.load(conv_ptr + w * C + at_k)
        x += u * tl.where(query[:, None], tl.load(conv_ptr + w * C + at_q), weight)
    return x * sigmoid(x)


@triton.jit
def _gates(
    decay_ptr, beta_ptr, held_decay_ptr, held_beta_ptr, rate_ptr, dt_ptr, at, h, t, slot, new_key,
    bound, s_dt, s_bt, s_hdt, s_hbt, BOUNDED: tl.constexpr,
):  # fmt: skip
    """g [S, K], zeros but for real k rows, and beta [S], one for q rows; ``slot`` and ``new_key``
    are those that are real."""
    rows, in_slot, in_new = t[:, None], slot[:, None], new_key[:, None]
    a = tl.load(held_decay_ptr + rows * s_hdt + at, mask=in_slot, other=0.0).to(tl.float32)
    a += tl.load(decay_ptr + rows * s_dt + at, mask=in_new, other=0.0)
    b = tl.load(held_beta_ptr + t * s_hbt + h, mask=slot, other=0.0).to(tl.float32)
    b += tl.load(beta_ptr + t * s_bt + h, mask=new_key, other=0.0)
    rate = tl.exp(tl.load(rate_ptr + h))
    g = log_decay(a + tl.load(dt_ptr + at), rate, bound, BOUNDED)
    return tl.where(in_slot | in_new, g, 0.0), tl.where(slot | new_key, sigmoid(b), 0.0)


@triton.jit
def _matrices(
    z, g, beta, above, own, R: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
    FACTORED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """G [S, K], and N beta and X [2 TP, ..] of `kda_rows_triton`."""
    S: tl.constexpr = z.shape[0]
    G = product(tl.where(above, 1.0, 0.0), g, PRECISION)
    if FACTORED:
        Z = gram_by_factors(z, G, PRECISION)
    else:
        Z = gram_by_difference(z, G, tl.zeros((S, S), tl.float32), 0, R)
        Z = gram_by_difference(z, G, Z, 2 * TP, T)
    Z = tl.where(above & ~own, Z * beta[:, None], 0.0)
    N = substitute(tl.where(own, 1.0, 0.0), Z, 0, R)
    N = first(substitute(N, Z, 2 * TP, T) * beta[None, :], 2 * TP)
    return G, N, product(N, z * tl.exp2(G), PRECISION)


@triton.jit
def tree_kernel(
    rows_ptr, decay_ptr, beta_ptr, gate_ptr, held_ptr, held_decay_ptr, held_beta_ptr, accepted_ptr,
    state_ptr, conv_ptr, rate_ptr, dt_ptr, norm_ptr, upto_ptr, taps_ptr, out_ptr, o_ptr,
    scale, eps, bound, upto_stride, taps_stride,
    s_rb, s_rt, s_db, s_dt, s_bb, s_bt, s_gb, s_gt, s_hb, s_ht, s_hdb, s_hdt, s_hbb, s_hbt, s_sb,
    T: tl.constexpr, R: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, BV: tl.constexpr, TP: tl.constexpr, TQ: tl.constexpr, HELD: tl.constexpr,
    BOUNDED: tl.constexpr, FACTORED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = H * (2 * K + V)
    begin(EARLY)
    wait(EARLY)
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    ks, s = tl.arange(0, K), tl.arange(0, 4 * TP)
    n = tl.load(accepted_ptr + b).to(tl.int32)
    rows_ptr, held_ptr = rows_ptr + b * s_rb, held_ptr + b * s_hb
    decay_ptr, beta_ptr = decay_ptr + b * s_db, beta_ptr + b * s_bb
    held_decay_ptr, held_beta_ptr = held_decay_ptr + b * s_hdb, held_beta_ptr + b * s_hbb
    taps_ptr, upto_ptr = taps_ptr + b * taps_stride, upto_ptr + b * upto_stride
    t, slot, query, new_key = s % TP, s // TP == 0, s // TP == 1, s // TP == 2
    real = (slot & (t < n)) | ((query | new_key) & (t < T))
    key = (slot | new_key) & real

    at_q, at_k = (h * K + ks)[None, :], ((H + h) * K + ks)[None, :]
    at = tl.where(query[:, None], at_q, at_k)
    z = _convolved(rows_ptr, held_ptr, conv_ptr, taps_ptr, at, at_q, at_k, query, n, t, slot, real,
                   s_rt, s_ht, C, W)  # fmt: skip
    z = unit(z) * tl.where(query, scale, 1.0)[:, None]
    g, beta = _gates(
        decay_ptr, beta_ptr, held_decay_ptr, held_beta_ptr, rate_ptr, dt_ptr, at_q, h, t,
        slot & real, new_key & real, bound, s_dt, s_bt, s_hdt, s_hbt, BOUNDED,
    )  # fmt: skip
    beta = tl.where(query, 1.0, beta)
    both = (~slot & real)[:, None] & (new_key & real)[None, :]
    upto = tl.load(upto_ptr + t[:, None] * T + t[None, :], mask=both, other=0) != 0
    behind = ~slot[:, None] | (t[:, None] >= t[None, :])
    above = key[None, :] & tl.where(slot[None, :], behind, upto)
    G, N, X = _matrices(z, g, beta, above, s[:, None] == s[None, :], R, T, TP, FACTORED, PRECISION)
    kept = (slot & real)[:, None]
    end = tl.sum(tl.where(kept, g, 0.0), 0)
    E = first(tl.where(kept, z * tl.exp2(tl.minimum(end[None, :] - G, 0.0)), 0.0), 2 * TP)

    o_ptr += tl.program_id(0) * T * V
    row = tl.arange(0, 2 * TP)[:, None] - TP
    for j in tl.static_range(V // BV):
        cols = j * BV + tl.arange(0, BV)
        at_v = (2 * H * K + h * V + cols)[None, :]
        v = _convolved(rows_ptr, held_ptr, conv_ptr, taps_ptr, at_v, at_v, at_v, query, n, t, slot,
                       key, s_rt, s_ht, C, W)  # fmt: skip
        tile = state_ptr + b * s_sb + h * K * V + ks[:, None] * V + cols[None, :]
        state = tl.load(tile)
        updates = product(N, v, PRECISION) - read(X, state, PRECISION)
        if n > 0:
            tl.store(tile, write(state, tl.exp2(end), E, updates, PRECISION))
        tl.store(o_ptr + row * V + cols[None, :], -updates, mask=(row >= 0) & (row < T))
    tl.debug_barrier()
    finish(o_ptr, gate_ptr + b * s_gb, norm_ptr, out_ptr + b * T * H * V, h, eps, s_gt, T, H, V, TQ)
    hold(rows_ptr, decay_ptr, beta_ptr, held_ptr, held_decay_ptr, held_beta_ptr, h, n, s_rt, s_dt,
         s_bt, s_ht, s_hdt, s_hbt, T, H, K, V, W, False, HELD, TQ)  # fmt: skip
