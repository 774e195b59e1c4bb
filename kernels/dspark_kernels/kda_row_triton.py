"""A KDA layer of one row that counts at once, as in plain decoding (Triton); see `kda_decode`.

A program takes one head of one sequence, or some of its columns, from its raw row to its normed
one, without rows made ready in memory: convolution, second factors of decay and gate, both sums
over the state, norm. Factors and state, which no earlier launch of the step writes, are on their
way while the projections run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, var-annotated, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.kda_rows_triton import UNIT_EPS, log_decay, sigmoid
from dspark_kernels.overlap import ahead, begin, wait


@triton.jit
def _two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _window(row_ptr, held_ptr, at, s_ht, W: tl.constexpr):
    """Channels ``at`` of the window, oldest first, and of the row behind it."""
    window = ()
    for w in tl.static_range(W - 1):
        window = window + (tl.load(held_ptr + w * s_ht + at),)  # noqa: RUF005
    return window + (tl.load(row_ptr + at),)  # noqa: RUF005


@triton.jit
def _taps(conv_ptr, at, C: tl.constexpr, W: tl.constexpr):
    """What the convolution multiplies them by."""
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(conv_ptr + w * C + at),)  # noqa: RUF005
    return taps


@triton.jit
def _convolved(window, taps, W: tl.constexpr):
    """silu of their convolution."""
    x = window[0].to(tl.float32) * taps[0]
    for w in tl.static_range(1, W):
        x += window[w].to(tl.float32) * taps[w]
    return x * sigmoid(x)


@triton.jit
def _halves(x):
    """Both rows of [2, K]."""
    which = tl.arange(0, 2)[:, None]
    return tl.reduce((tl.where(which == 0, x, 0.0), tl.where(which == 1, x, 0.0)), 0, _two)


@triton.jit
def _move(held_ptr, window, at, s_ht, W: tl.constexpr):
    """The window goes past the row."""
    for w in tl.static_range(1, W):
        tl.store(held_ptr + (w - 1) * s_ht + at, window[w])


@triton.jit
def _window_ahead(
    start, to_v, s_ht,
    H: tl.constexpr, K: tl.constexpr, VB: tl.constexpr, W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Bring a head's channels of the window, from its first of q on, into the L2 cache."""
    for w in tl.static_range(W - 1):
        ahead(start + w * s_ht, K, EARLY)
        ahead(start + w * s_ht + H * K, K, EARLY)
        ahead(start + w * s_ht + to_v, VB, EARLY)


@triton.jit
def row_kernel(
    row_ptr, decay_ptr, beta_ptr, gate_ptr, held_ptr, state_ptr, second_ptr, conv_ptr, rate_ptr,
    dt_ptr, norm_ptr, out_ptr, squares_ptr, scale, eps, bound,
    s_rb, s_db, s_bb, s_gb, s_hb, s_ht, s_sb,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    PARTS: tl.constexpr, FACTORS: tl.constexpr, BOUNDED: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """FACTORS: of decay and gate (2), of the decay (1) or of none (0).

    PARTS above 1: so many programs share the columns of a head. They leave the norm, for which they
    give squares [B, H, PARTS], and the window, which they all read, to the launch behind.

    Weights are in registers, state and window in the L2 cache before the row is there; then all
    that remains is asked for at once, before the first sum makes threads wait for one another.
    """
    C: tl.constexpr = H * (2 * K + V)
    VB: tl.constexpr = V // PARTS
    part = tl.program_id(0) % PARTS
    b, h = (tl.program_id(0) // (PARTS * H)).to(tl.int64), tl.program_id(0) // PARTS % H
    ks, vs, r = tl.arange(0, K), part * VB + tl.arange(0, VB), tl.arange(0, R)
    at_qk = (tl.arange(0, 2) * (H * K) + h * K)[:, None] + ks[None, :]
    at_v = (2 * H * K + h * V + vs)[None, :]
    begin(EARLY)
    first = state_ptr + b * s_sb + h * K * V
    held_ptr += b * s_hb
    ahead(first + part * (K * VB), K * VB, EARLY)
    if AHEAD:
        to_v = 2 * H * K + h * (V - K) + part * VB
        _window_ahead(held_ptr + h * K, to_v, s_ht, H, K, VB, W, EARLY)
    if FACTORS > 0:
        at = ((FACTORS - 1) * H + h) * K * R
        decay_weight = tl.load(second_ptr + at + ks[:, None] * R + r[None, :])
    if FACTORS > 1:
        gate_weight = tl.load(second_ptr + h * V * R + vs[:, None] * R + r[None, :])
    taps_qk = _taps(conv_ptr, at_qk, C, W)
    taps_v = _taps(conv_ptr, at_v, C, W)
    rate, dt = tl.exp(tl.load(rate_ptr + h)), tl.load(dt_ptr + h * K + ks)
    norm = tl.load(norm_ptr + vs)
    wait(EARLY)
    row_ptr += b * s_rb
    at_a = r if FACTORS > 0 else h * K + ks
    a = tl.load(decay_ptr + b * s_db + at_a).to(tl.float32)
    at_gate = r if FACTORS > 1 else h * V + vs
    gate = tl.load(gate_ptr + b * s_gb + at_gate).to(tl.float32)
    beta = sigmoid(tl.load(beta_ptr + b * s_bb + h).to(tl.float32))
    u_qk = _window(row_ptr, held_ptr, at_qk, s_ht, W)
    u_v = _window(row_ptr, held_ptr, at_v, s_ht, W)
    tile = first + ks[:, None] * V + vs[None, :]
    state = tl.load(tile)
    if FACTORS > 0:
        a = tl.sum(decay_weight.to(tl.float32) * a[None, :], 1)
    if FACTORS > 1:
        gate = tl.sum(gate_weight.to(tl.float32) * gate[None, :], 1)
    q, k = _halves(_convolved(u_qk, taps_qk, W))
    v = tl.sum(_convolved(u_v, taps_v, W), 0)
    square_q, square_k, both = tl.reduce((q * q, k * k, q * k), 0, _three)
    unit_q, unit_k = scale * tl.rsqrt(square_q + UNIT_EPS), tl.rsqrt(square_k + UNIT_EPS)
    state *= tl.exp2(log_decay(a + dt, rate, bound, BOUNDED))[:, None]
    seen, read = tl.reduce((k[:, None] * state, q[:, None] * state), 0, _two)
    u = beta * (v - seen * unit_k)
    o = unit_q * (read + both * unit_k * u)
    square = tl.sum(o * o, 0)
    o *= norm * sigmoid(gate)
    if PARTS == 1:
        o *= tl.rsqrt(square / V + eps)
    else:
        tl.store(squares_ptr + tl.program_id(0), square)
    tl.store(out_ptr + (b * H + h) * V + vs, o.to(out_ptr.dtype.element_ty))
    tl.store(tile, state + k[:, None] * (unit_k * u)[None, :])
    if PARTS == 1:
        tl.debug_barrier()  # all of the window is read
        _move(held_ptr, u_qk, at_qk, s_ht, W)
        _move(held_ptr, u_v, at_v, s_ht, W)
