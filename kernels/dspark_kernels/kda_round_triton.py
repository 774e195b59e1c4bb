"""A KDA layer of one round whose new rows follow one another (Triton); see `kda_decode`.

A program takes one head of one sequence after another. Of each it makes all rows ready at once, n
accepted ones and T new ones: convolution, unit norms, decay, write strength. Then they pass one by
one over the state (`kda_pass_triton`). Ready rows and outputs cross between warps through a few
kilobytes per program, which stay in the L2.

Letters: B batch, T new rows, R slots, H heads, K key width, V = P VV value width, W width of the
convolution, X width of a tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda_pass_triton import fold_rows, places, read_rows
from dspark_kernels.kda_rows_triton import log_decay, sigmoid, unit
from dspark_kernels.overlap import ahead, begin, wait

allow_loops()
exact_floats()


@triton.jit
def _either(held_ptr, rows_ptr, held, new, s_ht, s_rt, at, real, in_held):
    """Rows ``held`` or ``new``, [N, X], whichever is meant, zeros where not real."""
    x = tl.load(held_ptr + held[:, None] * s_ht + at, mask=(real & in_held)[:, None], other=0.0)
    y = tl.load(rows_ptr + new[:, None] * s_rt + at, mask=(real & ~in_held)[:, None], other=0.0)
    return x.to(tl.float32) + y.to(tl.float32)


@triton.jit
def _convolved(held_ptr, rows_ptr, conv_ptr, i, n, at, real, s_ht, s_rt, C, W: tl.constexpr):
    """silu of the convolution of rows i, counted from the first accepted one, [N, X]."""
    x = tl.zeros((i.shape[0], at.shape[1]), dtype=tl.float32)
    for w in tl.static_range(W):
        place = i + w
        behind = place - (W - 1) - n
        u = _either(held_ptr, rows_ptr, place, behind, s_ht, s_rt, at, real, behind < 0)
        x += u * tl.load(conv_ptr + w * C + at)
    return x * sigmoid(x)


@triton.jit
def _prepare(
    rows_ptr, decay_ptr, beta_ptr, held_ptr, held_decay_ptr, held_beta_ptr,
    conv_ptr, rate_ptr, dt_ptr, k_ptr, d_ptr, q_ptr, v_ptr, b_ptr,
    h, n, scale, bound, s_rt, s_dt, s_bt, s_ht, s_hdt, s_hbt,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    NR: tl.constexpr, TQ: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Accepted and new rows, made ready."""
    C: tl.constexpr = H * (2 * K + V)
    i, j, ks, vs = tl.arange(0, NR), tl.arange(0, TQ), tl.arange(0, K), tl.arange(0, V)
    real = i < n + T
    at_q, at_v = (h * K + ks)[None, :], (2 * H * K + h * V + vs)[None, :]
    a = _either(held_decay_ptr, decay_ptr, i, i - n, s_hdt, s_dt, at_q, real, i < n)
    logits = tl.load(held_beta_ptr + i * s_hbt + h, mask=i < n, other=0.0).to(tl.float32)
    logits += tl.load(beta_ptr + (i - n) * s_bt + h, mask=real & (i >= n), other=0.0)
    k = _convolved(held_ptr, rows_ptr, conv_ptr, i, n, H * K + at_q, real, s_ht, s_rt, C, W)
    q = _convolved(held_ptr, rows_ptr, conv_ptr, n + j, n, at_q, j < T, s_ht, s_rt, C, W)
    v = _convolved(held_ptr, rows_ptr, conv_ptr, i, n, at_v, real, s_ht, s_rt, C, W)
    rate, dt = tl.exp(tl.load(rate_ptr + h)), tl.load(dt_ptr + at_q)
    inside = real[:, None]
    tl.store(d_ptr + i[:, None] * K + ks, tl.exp2(log_decay(a + dt, rate, bound, BOUNDED)), inside)
    tl.store(b_ptr + i, sigmoid(logits), real)
    tl.store(k_ptr + i[:, None] * K + ks, unit(k), inside)
    tl.store(q_ptr + j[:, None] * K + ks, scale * unit(q), (j < T)[:, None])
    tl.store(v_ptr + i[:, None] * V + vs, v, inside)


@triton.jit
def finish(
    o_ptr, gate_ptr, norm_ptr, out_ptr, h, eps, s_gt,
    T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, TQ: tl.constexpr,
):  # fmt: skip
    """Norm and gate of the outputs."""
    j, vs = tl.arange(0, TQ)[:, None], tl.arange(0, V)[None, :]
    gate = tl.load(gate_ptr + j * s_gt + h * V + vs, mask=j < T, other=0.0).to(tl.float32)
    out = tl.load(o_ptr + j * V + vs, mask=j < T, other=0.0)
    out *= tl.rsqrt(tl.sum(out * out, 1) / V + eps)[:, None]
    out *= tl.load(norm_ptr + vs) * sigmoid(gate)
    tl.store(out_ptr + (j * H + h) * V + vs, out, mask=j < T)


@triton.jit
def _raw(
    rows_ptr, held_ptr, at, n, s_rt, s_ht,
    T: tl.constexpr, W: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Channels ``at`` [1, X] of the rows that the next round shall find: [ROWS, X]."""
    i = tl.arange(0, ROWS)[:, None]
    if FOLD:
        in_held, new = i + T < W - 1, i + T - (W - 1)
        held = n + T + i
        in_new = ~in_held & (i < W - 1)
    else:
        in_held, new = i < W - 1, i - (W - 1)
        held = n + i
        in_new = ~in_held & (new < T)
    x = tl.load(held_ptr + held * s_ht + at, mask=in_held, other=0.0)
    return x + tl.load(rows_ptr + new * s_rt + at, mask=in_new, other=0.0)


@triton.jit
def _put(held_ptr, at, x, s_ht, T: tl.constexpr, W: tl.constexpr, FOLD: tl.constexpr):
    """What `_raw` found, to where the next round looks for it."""
    i = tl.arange(0, x.shape[0])[:, None]
    tl.store(held_ptr + i * s_ht + at, x, mask=i < (W - 1 if FOLD else W - 1 + T))


@triton.jit
def hold(
    rows_ptr, decay_ptr, beta_ptr, held_ptr, held_decay_ptr, held_beta_ptr,
    h, n, s_rt, s_dt, s_bt, s_ht, s_hdt, s_hbt,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    FOLD: tl.constexpr, HELD: tl.constexpr, TQ: tl.constexpr,
):  # fmt: skip
    """Window and slots of one head, for the next round."""
    at_q = (h * K + tl.arange(0, K))[None, :]
    at_v = (2 * H * K + h * V + tl.arange(0, V))[None, :]
    q = _raw(rows_ptr, held_ptr, at_q, n, s_rt, s_ht, T, W, FOLD, HELD)
    k = _raw(rows_ptr, held_ptr, H * K + at_q, n, s_rt, s_ht, T, W, FOLD, HELD)
    v = _raw(rows_ptr, held_ptr, at_v, n, s_rt, s_ht, T, W, FOLD, HELD)
    tl.debug_barrier()
    _put(held_ptr, at_q, q, s_ht, T, W, FOLD)
    _put(held_ptr, H * K + at_q, k, s_ht, T, W, FOLD)
    _put(held_ptr, at_v, v, s_ht, T, W, FOLD)
    if not FOLD:
        j = tl.arange(0, TQ)
        a = tl.load(decay_ptr + j[:, None] * s_dt + at_q, mask=j[:, None] < T)
        tl.store(held_decay_ptr + j[:, None] * s_hdt + at_q, a, mask=j[:, None] < T)
        logits = tl.load(beta_ptr + j * s_bt + h, mask=j < T)
        tl.store(held_beta_ptr + j * s_hbt + h, logits, mask=j < T)


@triton.jit
def round_kernel(
    rows_ptr, decay_ptr, beta_ptr, gate_ptr, held_ptr, held_decay_ptr, held_beta_ptr, accepted_ptr,
    state_ptr, conv_ptr, rate_ptr, dt_ptr, norm_ptr, out_ptr, ready_ptr,
    heads, scale, eps, bound,
    s_rb, s_rt, s_db, s_dt, s_bb, s_bt, s_gb, s_gt, s_hb, s_ht, s_hdb, s_hdt, s_hbb, s_hbt, s_sb,
    T: tl.constexpr, R: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, NR: tl.constexpr, TQ: tl.constexpr, HELD: tl.constexpr, VV: tl.constexpr,
    FOLD: tl.constexpr, BOUNDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = R + T + 1  # the row after the last is asked for, and not used
    k_ptr = ready_ptr + tl.program_id(0) * (N * (2 * K + V + 16) + (T + 1) * (K + V))
    d_ptr = k_ptr + N * K
    v_ptr = d_ptr + N * K
    b_ptr = v_ptr + N * V
    q_ptr = b_ptr + N * 16
    o_ptr = q_ptr + (T + 1) * K
    begin(EARLY)
    first = tl.program_id(0)
    ahead(state_ptr + (first // H).to(tl.int64) * s_sb + first % H * K * V, K * V, EARLY)
    wait(EARLY)
    for item in range(tl.program_id(0), heads, tl.num_programs(0)):
        b, h = tl.full((), item // H, tl.int64), item % H
        n = tl.load(accepted_ptr + b).to(tl.int32)
        tile = state_ptr + b * s_sb + h * K * V + places(K, V, V // VV, VV)
        state = tl.load(tile)
        _prepare(
            rows_ptr + b * s_rb, decay_ptr + b * s_db, beta_ptr + b * s_bb, held_ptr + b * s_hb,
            held_decay_ptr + b * s_hdb, held_beta_ptr + b * s_hbb, conv_ptr, rate_ptr, dt_ptr,
            k_ptr, d_ptr, q_ptr, v_ptr, b_ptr, h, n, scale, bound, s_rt, s_dt, s_bt, s_ht, s_hdt,
            s_hbt, T, H, K, V, W, NR, TQ, BOUNDED,
        )  # fmt: skip
        tl.debug_barrier()
        state = fold_rows(state, k_ptr, d_ptr, v_ptr, b_ptr, n, K, V)
        if (not FOLD) and n > 0:
            tl.store(tile, state)
        read_rows(
            state, q_ptr, k_ptr + n * K, d_ptr + n * K, v_ptr + n * V, b_ptr + n, o_ptr, tile, T,
            T, V, K, V, FOLD,
        )  # fmt: skip
        tl.debug_barrier()
        finish(o_ptr, gate_ptr + b * s_gb, norm_ptr, out_ptr + b * T * H * V, h, eps, s_gt, T, H,
                V, TQ)  # fmt: skip
        hold(
            rows_ptr + b * s_rb, decay_ptr + b * s_db, beta_ptr + b * s_bb, held_ptr + b * s_hb,
            held_decay_ptr + b * s_hdb, held_beta_ptr + b * s_hbb, h, n, s_rt, s_dt, s_bt, s_ht,
            s_hdt, s_hbt, T, H, K, V, W, FOLD, HELD, TQ,
        )  # fmt: skip
