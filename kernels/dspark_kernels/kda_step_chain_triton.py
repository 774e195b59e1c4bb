"""Rows of a chain over one state (Triton): one row, and several; see `kda.step`.

A program holds BV columns of one head's state. Several rows are made ready at once and then pass
one by one (`kda_pass_triton`); a row alone needs no such preparation.

With ``GATED`` the rows are raw: q, k, v after the convolution, g before dt and gate, beta before
the sigmoid.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda_pass_triton import places, read_rows, read_scaled_rows
from dspark_kernels.kda_rows_triton import LOG2E, UNIT_EPS, log_decay, sigmoid, unit
from dspark_kernels.overlap import ahead, begin, wait

allow_loops()
exact_floats()


@triton.jit
def chain_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, end_ptr, rate_ptr, dt_ptr, ready_ptr,
    scale, bound, keep,
    s_qb, s_qt, s_kb, s_kt, s_vb, s_vt, s_gb, s_gt, s_bb, s_bt,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    VV: tl.constexpr, TP: tl.constexpr, GATED: tl.constexpr, BOUNDED: tl.constexpr,
    WRITE: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of a chain: all made ready at once, then one after another over a tile of state."""
    part, place = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    b, h = (place // H).to(tl.int64), place % H
    t, ks, vs = tl.arange(0, TP), tl.arange(0, K), part * BV + tl.arange(0, BV)
    tile = (b * H + h) * K * V + part * BV + places(K, V, BV // VV, VV)
    begin(EARLY)
    ahead(state_ptr + (b * H + h) * K * V + part * (K * BV), K * BV, EARLY)
    wait(EARLY)
    real, at = (t < T)[:, None], t[:, None]
    q = tl.load(q_ptr + b * s_qb + at * s_qt + h * K + ks, mask=real, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + b * s_kb + at * s_kt + h * K + ks, mask=real, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + b * s_gb + at * s_gt + h * K + ks, mask=real, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + b * s_vb + at * s_vt + h * V + vs, mask=real, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + b * s_bb + t * s_bt + h, mask=t < T, other=0.0).to(tl.float32)
    state = tl.load(state_ptr + tile)
    if GATED:
        rate = tl.exp(tl.load(rate_ptr + h))
        g = log_decay(g + tl.load(dt_ptr + h * K + ks), rate, bound, BOUNDED)
        q, k, beta = scale * unit(q), unit(k), sigmoid(beta)
    else:
        g = LOG2E * g
    q_ptr = ready_ptr + tl.program_id(0).to(tl.int64) * (T + 1) * (4 * K + BV + 16)
    k_ptr, d_ptr = q_ptr + (T + 1) * K, q_ptr + 2 * (T + 1) * K
    w_ptr, v_ptr = q_ptr + 3 * (T + 1) * K, q_ptr + 4 * (T + 1) * K
    beta_ptr = v_ptr + (T + 1) * BV
    if SCALED:
        g = tl.cumsum(g, 0)
        tl.store(w_ptr + at * K + ks, k * tl.exp2(-g), real)
    d = tl.exp2(g)
    if SCALED:
        q, k = q * d, k * d
    tl.store(q_ptr + at * K + ks, q, real)
    tl.store(k_ptr + at * K + ks, k, real)
    tl.store(d_ptr + at * K + ks, d, real)
    tl.store(v_ptr + at * BV + tl.arange(0, BV), v, real)
    tl.store(beta_ptr + t, beta, t < T)
    tl.debug_barrier()
    out_ptr += (b * T * H + h) * V + part * BV
    end_ptr += tile
    if SCALED:
        read_scaled_rows(state, q_ptr, k_ptr, w_ptr, d_ptr, v_ptr, beta_ptr, out_ptr, end_ptr, T,
                         keep, H * V, K, BV, WRITE)  # fmt: skip
    else:
        read_rows(state, q_ptr, k_ptr, d_ptr, v_ptr, beta_ptr, out_ptr, end_ptr, T, keep, H * V, K,
                  BV, WRITE)  # fmt: skip


@triton.jit
def row_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, end_ptr, rate_ptr, dt_ptr,
    scale, bound, s_qb, s_kb, s_vb, s_gb, s_bb,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, BOUNDED: tl.constexpr, WRITE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A single row, without tiles of rows: two sums over the state, and one product of vectors."""
    place, part = tl.program_id(0) // (V // BV), tl.program_id(0) % (V // BV)
    b, h = (place // H).to(tl.int64), place % H
    cols, ks = part * BV + tl.arange(0, BV), tl.arange(0, K)
    begin(EARLY)
    ahead(state_ptr + (b * H + h) * K * V + part * (K * BV), K * BV, EARLY)
    wait(EARLY)
    q = tl.load(q_ptr + b * s_qb + h * K + ks).to(tl.float32)
    k = tl.load(k_ptr + b * s_kb + h * K + ks).to(tl.float32)
    g = tl.load(g_ptr + b * s_gb + h * K + ks).to(tl.float32)
    v = tl.load(v_ptr + b * s_vb + h * V + cols).to(tl.float32)
    beta = tl.load(beta_ptr + b * s_bb + h).to(tl.float32)
    tile = (b * H + h) * K * V + ks[:, None] * V + cols[None, :]
    if GATED:
        rate = tl.exp(tl.load(rate_ptr + h))
        dt = tl.load(dt_ptr + h * K + ks).to(tl.float32)
    state = tl.load(state_ptr + tile)
    squares, both = tl.split(tl.sum(tl.join(tl.join(k * k, q * q), tl.join(q * k, q * k)), 0))
    k_norm, q_norm = tl.split(squares)
    if GATED:
        decay = tl.exp2(log_decay(g + dt, rate, bound, BOUNDED))
        beta = sigmoid(beta)
        k_norm, q_norm = tl.rsqrt(k_norm + UNIT_EPS), scale * tl.rsqrt(q_norm + UNIT_EPS)
    else:
        decay = tl.exp2(LOG2E * g)
        k_norm, q_norm = 1.0, 1.0
    both, _ = tl.split(both)
    # norms are factors of sums: none of the sums waits for another
    sums = tl.sum(tl.join((k * decay)[:, None] * state, (q * decay)[:, None] * state), 0)
    seen, read = tl.split(sums)
    u = beta * (v - k_norm * seen)
    tl.store(out_ptr + (b * H + h) * V + cols, q_norm * (read + k_norm * both * u))
    if WRITE:
        k *= k_norm
        tl.store(end_ptr + tile, decay[:, None] * state + k[:, None] * u[None, :])
