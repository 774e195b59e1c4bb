"""A KDA layer of one round by blocks of up to eight rows (Gluon, NVIDIA); see `kda_decode`.

A program takes one head of one sequence. Its accepted rows are one block over the state
(`kda_block_gluon`), which is stored behind them; its new rows are another, over the same registers.
`kda_round_triton` does the same row by row on any card.

Letters: B batch, T new rows, R slots, H heads, K key width, V = 16 WARPS value width, W width of
the convolution, X width of a tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dspark_kernels.kda_block_gluon import (
    LOG2E,
    begin,
    behind,
    put_grams,
    put_rows,
    put_solution,
    put_sums,
    room_for,
    settled,
    sigmoid,
    unit,
    unsettled,
)
from dspark_kernels.kda_block_places import row_places, solve_places, state_places, sum_places
from dspark_kernels.kda_block_state_gluon import (
    load_state,
    places_in,
    rows_across,
    rows_back,
    seen_by,
    seen_by_both,
    state_across,
    store_state,
)


@gluon.jit
def _convolved(held_ptr, rows_ptr, conv_ptr, i, n, at, real, s_ht, s_rt, C, W: gl.constexpr,
               NEW: gl.constexpr):  # fmt: skip
    """silu of the convolution of rows i [8, 1], counted from the first accepted one: [8, X].

    Accepted rows (not NEW) and their windows are all held.
    """
    x = gl.load(conv_ptr + at + 0 * i) * 0.0
    for w in gl.static_range(W):
        back = i + w - (W - 1) - n
        held = real & (back < 0)
        u = gl.load(held_ptr + (i + w) * s_ht + at, mask=held, other=0.0).to(gl.float32)
        if NEW:
            new = real & (back >= 0)
            u += gl.load(rows_ptr + back * s_rt + at, mask=new, other=0.0).to(gl.float32)
        x += u * gl.load(conv_ptr + w * C + at)
    return x * sigmoid(x)


@gluon.jit
def _strengths(ptr, stride, n, warps: gl.constexpr):
    """Logits of n rows as `put_solution` wants their beta, and the factor of `put_sums`."""
    j = gl.arange(0, 8, gl.SliceLayout(0, solve_places(warps)))
    s = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, sum_places(warps))))
    beta = gl.load(ptr + j * stride, mask=j < n, other=-float("inf")).to(gl.float32)
    factor = gl.load(ptr + s * stride, mask=s < n, other=-float("inf")).to(gl.float32)
    return sigmoid(beta), gl.where(s < 8, sigmoid(factor), -1.0)


@gluon.jit
def _raw(
    rows_ptr, held_ptr, at, n, s_rt, s_ht, places: gl.constexpr,
    T: gl.constexpr, W: gl.constexpr, FOLD: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Channels ``at`` [1, X] of the rows that the next round shall find: [HELD, X]."""
    i = gl.arange(0, HELD, gl.SliceLayout(1, places))[:, None]
    if FOLD:
        in_held, new = i + T < W - 1, i + T - (W - 1)
        held = n + T + i
        in_new = (i + T >= W - 1) & (i < W - 1)
    else:
        in_held, new = i < W - 1, i - (W - 1)
        held = n + i
        in_new = (i >= W - 1) & (new < T)
    x = gl.load(held_ptr + held * s_ht + at, mask=in_held & (at >= 0), other=0.0)
    return x + gl.load(rows_ptr + new * s_rt + at, mask=in_new & (at >= 0), other=0.0)


@gluon.jit
def _hold(
    rows_ptr, decay_ptr, beta_ptr, held_ptr, held_decay_ptr, held_beta_ptr,
    h, n, s_rt, s_dt, s_bt, s_ht, s_hdt, s_hbt,
    T: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr,
    FOLD: gl.constexpr, HELD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Window and slots of one head, for the next round."""
    wide: gl.constexpr = row_places(K, WARPS)
    wide_v: gl.constexpr = row_places(V, WARPS)
    at_q = h * K + gl.arange(0, K, gl.SliceLayout(0, wide))[None, :]
    at_v = 2 * H * K + h * V + gl.arange(0, V, gl.SliceLayout(0, wide_v))[None, :]
    q = _raw(rows_ptr, held_ptr, at_q, n, s_rt, s_ht, wide, T, W, FOLD, HELD)
    k = _raw(rows_ptr, held_ptr, H * K + at_q, n, s_rt, s_ht, wide, T, W, FOLD, HELD)
    v = _raw(rows_ptr, held_ptr, at_v, n, s_rt, s_ht, wide_v, T, W, FOLD, HELD)
    kept: gl.constexpr = W - 1 if FOLD else W - 1 + T
    i = gl.arange(0, HELD, gl.SliceLayout(1, wide))[:, None]
    iv = gl.arange(0, HELD, gl.SliceLayout(1, wide_v))[:, None]
    gl.thread_barrier()  # all of the held rows are read
    gl.store(held_ptr + i * s_ht + at_q, q, mask=(i < kept) & (at_q >= 0))
    gl.store(held_ptr + i * s_ht + H * K + at_q, k, mask=(i < kept) & (at_q >= 0))
    gl.store(held_ptr + iv * s_ht + at_v, v, mask=(iv < kept) & (at_v >= 0))
    if not FOLD:
        j = gl.arange(0, 8, gl.SliceLayout(1, wide))[:, None]
        real = (j < T) & (at_q >= 0)
        a = gl.load(decay_ptr + j * s_dt + at_q, mask=real)
        gl.store(held_decay_ptr + j * s_hdt + at_q, a, mask=real)
        one: gl.constexpr = gl.SliceLayout(1, wide)
        each = gl.arange(0, 8, one)
        logits = gl.load(beta_ptr + each * s_bt + h, mask=each < T)
        gl.store(held_beta_ptr + each * s_hbt + h, logits, mask=each < T)


@gluon.jit
def _block(
    room, rows_ptr, decay_ptr, beta_ptr, held_ptr, conv_ptr, rate_ptr, dt_ptr,
    h, first, n, count, scale, bound, s_rt, s_dt, s_bt, s_ht,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, NEW: gl.constexpr,
    WRITES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """``count`` rows from ``first`` on, counted from the first accepted one, made ready but for
    their solution; their v [8, V], and their beta for `put_solution`.

    Rows that are not NEW are accepted ones: decay and beta are the held ones then.
    """
    C: gl.constexpr = H * (2 * K + V)
    wide: gl.constexpr = row_places(K, WARPS)
    v_places: gl.constexpr = state_places(8, WARPS)
    t = gl.arange(0, 8, gl.SliceLayout(1, wide))[:, None]
    at = h * K + gl.arange(0, K, gl.SliceLayout(0, wide))[None, :]
    tv = gl.arange(0, 8, gl.SliceLayout(1, v_places))[:, None]
    at_v = 2 * H * K + h * V + gl.arange(0, V, gl.SliceLayout(0, v_places))[None, :]
    real, real_v = (t < count) & (at >= 0), (tv < count) & (at_v >= 0)
    a = gl.load(decay_ptr + t * s_dt + at, mask=real, other=0.0).to(gl.float32)
    rate = gl.exp2(LOG2E * gl.load(rate_ptr + h))
    g = (LOG2E * bound) * sigmoid(rate * (a + gl.load(dt_ptr + at)))
    room[4].store(gl.where(real, g, 0.0))
    i = first + t
    k = _convolved(held_ptr, rows_ptr, conv_ptr, i, n, H * K + at, real, s_ht, s_rt, C, W, NEW)
    q = k
    if NEW:
        q = _convolved(held_ptr, rows_ptr, conv_ptr, i, n, at, real, s_ht, s_rt, C, W, NEW)
        q = scale * unit(q)
    v = _convolved(held_ptr, rows_ptr, conv_ptr, first + tv, n, at_v, real_v, s_ht, s_rt, C, W, NEW)
    put_rows(room, unit(k), q, count, NEW, WRITES, WARPS)
    beta, factor = _strengths(beta_ptr + h, s_bt, count, WARPS)
    put_grams(room, NEW, WARPS)
    put_sums(room, factor, WARPS)
    return v, beta


@gluon.jit
def _finish(
    out, gate_ptr, norm_ptr, out_ptr, h, eps, s_gt,
    T: gl.constexpr, H: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Norm and gate of the outputs [8, V], which go to ``out_ptr``."""
    places: gl.constexpr = state_places(8, WARPS)
    t = gl.arange(0, 8, gl.SliceLayout(1, places))[:, None]
    vs = gl.arange(0, V, gl.SliceLayout(0, places))[None, :]
    here = (t < T) & (vs < V)
    gate = gl.load(gate_ptr + t * s_gt + h * V + vs, mask=here, other=0.0).to(gl.float32)
    out *= gl.rsqrt(gl.sum(out * out, 1) / V + eps)[:, None]
    out *= gl.load(norm_ptr + vs) * sigmoid(gate)
    gl.store(out_ptr + (t * H + h) * V + vs, out.to(out_ptr.dtype.element_ty), mask=here)


@gluon.jit
def round_block_kernel(
    rows_ptr, decay_ptr, beta_ptr, gate_ptr, held_ptr, held_decay_ptr, held_beta_ptr, accepted_ptr,
    state_ptr, conv_ptr, rate_ptr, dt_ptr, norm_ptr, out_ptr,
    scale, eps, bound,
    s_rb, s_rt, s_db, s_dt, s_bb, s_bt, s_gb, s_gt, s_hb, s_ht, s_hdb, s_hdt, s_hbb, s_hbt, s_sb,
    T: gl.constexpr, R: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    W: gl.constexpr, HELD: gl.constexpr, FOLD: gl.constexpr, WARPS: gl.constexpr,
    AHEAD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One head of one sequence. AHEAD: its state waits in the L2 cache and not in registers."""
    STEP: gl.constexpr = K // 4 * V
    b, h = (gl.program_id(0) // H).to(gl.int64), gl.program_id(0) % H
    state_ptr += b * s_sb + h * K * V
    begin(state_ptr, K * V, AHEAD, EARLY)
    rows_ptr += b * s_rb
    decay_ptr += b * s_db
    beta_ptr += b * s_bb
    held_ptr += b * s_hb
    held_decay_ptr += b * s_hdb
    held_beta_ptr += b * s_hbb
    n = gl.load(accepted_ptr + b).to(gl.int32)
    tile = state_ptr + places_in(K, V, WARPS)
    if not AHEAD:
        state = load_state(tile, STEP)
    fresh = room_for(K, WARPS)
    if R > 0:
        old = room_for(K, WARPS)
        old_v, old_beta = _block(
            old, rows_ptr, held_decay_ptr, held_beta_ptr, held_ptr, conv_ptr, rate_ptr, dt_ptr,
            h, 0, n, n, scale, bound, s_rt, s_hdt, s_hbt, s_ht, H, K, V, W, False, True, WARPS,
        )  # fmt: skip
    v, beta = _block(
        fresh, rows_ptr, decay_ptr, beta_ptr, held_ptr, conv_ptr, rate_ptr, dt_ptr,
        h, n, n, T, scale, bound, s_rt, s_dt, s_bt, s_ht, H, K, V, W, True, FOLD, WARPS,
    )  # fmt: skip
    if AHEAD:
        state = load_state(tile, STEP)
    state = state_across(state, WARPS)
    if R > 0:
        found = seen_by(state, old[0], WARPS)
        put_solution(old, old_beta, WARPS)
        X = unsettled(rows_across(old_v, WARPS), found, WARPS)
        state = behind(state, old, X, n, WARPS)
        if (not FOLD) and n > 0:
            store_state(tile, STEP, state, WARPS)
    found, read = seen_by_both(state, fresh[0], fresh[1], WARPS)
    put_solution(fresh, beta, WARPS)
    X = unsettled(rows_across(v, WARPS), found, WARPS)
    out = rows_back(settled(fresh, X, read, 8, WARPS), WARPS)
    if FOLD:
        store_state(tile, STEP, behind(state, fresh, X, T, WARPS), WARPS)
    _finish(out, gate_ptr + b * s_gb, norm_ptr, out_ptr + b * T * H * V, h, eps, s_gt, T, H, V,
            WARPS)  # fmt: skip
    _hold(rows_ptr, decay_ptr, beta_ptr, held_ptr, held_decay_ptr, held_beta_ptr, h, n, s_rt, s_dt,
          s_bt, s_ht, s_hdt, s_hbt, T, H, K, V, W, FOLD, HELD, WARPS)  # fmt: skip
