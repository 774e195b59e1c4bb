"""A KDA layer of one row that counts at once, as in plain decoding (Triton); see `kda_decode`.

A program takes one head of one sequence from its raw row to its normed one, without rows made ready
in memory: convolution, second factors of decay and gate, both sums over the state, norm. Factors
and state, which no earlier launch of the step writes, are on their way while the projections run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.kda_rows_triton import UNIT_EPS, log_decay, sigmoid
from dspark_kernels.overlap import ahead, begin, wait


@triton.jit
def _window(row_ptr, held_ptr, at, s_ht, W: tl.constexpr, WP: tl.constexpr):
    """Channels ``at`` of the window, oldest first, and of the row behind it: [WP, X]."""
    w = tl.arange(0, WP)[:, None]
    held = tl.load(held_ptr + w * s_ht + at[None, :], mask=w < W - 1, other=0.0)
    return held + tl.load(row_ptr + 0 * w + at[None, :], mask=w == W - 1, other=0.0)


@triton.jit
def _convolved(u, conv_ptr, at, C: tl.constexpr, W: tl.constexpr, WP: tl.constexpr):
    """silu of their convolution: [X]."""
    w = tl.arange(0, WP)[:, None]
    taps = tl.load(conv_ptr + w * C + at[None, :], mask=w < W, other=0.0)
    x = tl.sum(u.to(tl.float32) * taps, 0)
    return x * sigmoid(x)


@triton.jit
def _move(held_ptr, u, at, s_ht, W: tl.constexpr, WP: tl.constexpr):
    """The window goes past the row."""
    w = tl.arange(0, WP)[:, None]
    tl.store(held_ptr + (w - 1) * s_ht + at[None, :], u, mask=(w > 0) & (w < W))


@triton.jit
def _factor(low_ptr, weight, r):
    """weight [n, R] times one low-rank row: [n]."""
    return tl.sum(weight.to(tl.float32) * tl.load(low_ptr + r).to(tl.float32)[None, :], 1)


@triton.jit
def row_kernel(
    row_ptr, decay_ptr, beta_ptr, gate_ptr, held_ptr, state_ptr, second_ptr, conv_ptr, rate_ptr,
    dt_ptr, norm_ptr, out_ptr, scale, eps, bound, s_rb, s_db, s_bb, s_gb, s_hb, s_ht, s_sb,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    R: tl.constexpr, FACTORS: tl.constexpr, BOUNDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """FACTORS: of decay and gate (2), of the decay (1) or of none (0)."""
    C: tl.constexpr = H * (2 * K + V)
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    ks, vs, r = tl.arange(0, K), tl.arange(0, V), tl.arange(0, R)
    begin(EARLY)
    first = state_ptr + b * s_sb + h * K * V
    ahead(first, K * V, EARLY)
    if FACTORS > 0:
        at = ((FACTORS - 1) * H + h) * K * R
        decay_weight = tl.load(second_ptr + at + ks[:, None] * R + r[None, :])
    if FACTORS > 1:
        gate_weight = tl.load(second_ptr + h * V * R + vs[:, None] * R + r[None, :])
    rate, dt = tl.exp(tl.load(rate_ptr + h)), tl.load(dt_ptr + h * K + ks)
    norm = tl.load(norm_ptr + vs)
    wait(EARLY)
    row_ptr += b * s_rb
    held_ptr += b * s_hb
    at_q, at_v = h * K + ks, 2 * H * K + h * V + vs
    if FACTORS > 0:
        a = _factor(decay_ptr + b * s_db, decay_weight, r)
    else:
        a = tl.load(decay_ptr + b * s_db + h * K + ks).to(tl.float32)
    if FACTORS > 1:
        gate = _factor(gate_ptr + b * s_gb, gate_weight, r)
    else:
        gate = tl.load(gate_ptr + b * s_gb + h * V + vs).to(tl.float32)
    beta = sigmoid(tl.load(beta_ptr + b * s_bb + h).to(tl.float32))
    u_q = _window(row_ptr, held_ptr, at_q, s_ht, W, WP)
    u_k = _window(row_ptr, held_ptr, H * K + at_q, s_ht, W, WP)
    u_v = _window(row_ptr, held_ptr, at_v, s_ht, W, WP)
    q = _convolved(u_q, conv_ptr, at_q, C, W, WP)
    k = _convolved(u_k, conv_ptr, H * K + at_q, C, W, WP)
    v = _convolved(u_v, conv_ptr, at_v, C, W, WP)
    tile = first + ks[:, None] * V + vs[None, :]
    state = tl.load(tile)
    k *= tl.rsqrt(tl.sum(k * k, 0) + UNIT_EPS)
    q *= scale * tl.rsqrt(tl.sum(q * q, 0) + UNIT_EPS)
    state *= tl.exp2(log_decay(a + dt, rate, bound, BOUNDED))[:, None]
    seen, read = tl.split(tl.sum(tl.join(k[:, None] * state, q[:, None] * state), 0))
    u = beta * (v - seen)
    tl.store(tile, state + k[:, None] * u[None, :])
    o = read + tl.sum(q * k, 0) * u
    o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps) * norm * sigmoid(gate)
    tl.store(out_ptr + (b * H + h) * V + vs, o.to(out_ptr.dtype.element_ty))
    tl.debug_barrier()  # all of the window is read
    _move(held_ptr, u_q, at_q, s_ht, W, WP)
    _move(held_ptr, u_k, H * K + at_q, s_ht, W, WP)
    _move(held_ptr, u_v, at_v, s_ht, W, WP)
