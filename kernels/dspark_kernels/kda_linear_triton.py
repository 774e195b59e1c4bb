"""`kda_linear` in Triton: one program per request and head, one launch per layer.

A block of up to 16 slots is one matrix instruction high. The head's state is read once and serves
queries and keys; decays are factored, exp(G_t) exp(-G_j), which the bound on them allows. An order
that makes the series exact is done by substitution, row after row.

Letters as in `kda_linear`; T = 16 rows, of which G are real.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda import MAX_EXPONENT
from dspark_kernels.kda_linear import L2_EPS
from dspark_kernels.linear_kda import Order, check_order

exact_floats()

ROWS = 16
GLA = tl.constexpr(-1)
UNIT_EPS = tl.constexpr(L2_EPS)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def part_of(
    rows, before, conv, part, head, t, d, row_stride, step, part_step,
    SLOTS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """q, k or v of one head: silu of the convolution, [T, K] float32."""
    live = (t[:, None] < SLOTS) & (d[None, :] < WIDTH)
    at = head * WIDTH + d[None, :]
    total = tl.zeros([t.shape[0], d.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        row = t[:, None] + (tap - TAPS + 1)
        here = rows + row * row_stride + part * CHANNELS + at
        x = tl.load(here, mask=live & (row >= 0), other=0.0).to(tl.float32)
        there = before + (t[:, None] + tap) * step + part * part_step + at
        x += tl.load(there, mask=live & (row < 0), other=0.0).to(tl.float32)
        w = tl.load(conv + (tap * 3 + part) * CHANNELS + at, mask=d[None, :] < WIDTH, other=0.0)
        total += x * w
    return total * tl.sigmoid(total)


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + UNIT_EPS)[:, None]


@triton.jit
def log_decay(
    low, decay, dt_bias, rate, head, t, d, row_stride, bound,
    SLOTS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """g [T, K] float32, 0 in rows that are not real."""
    f = tl.zeros([t.shape[0], d.shape[0]], tl.float32)
    for start in tl.static_range(0, RANK, CHUNK):
        r = start + tl.arange(0, CHUNK)
        mask = (t[:, None] < SLOTS) & (r[None, :] < RANK)
        x = tl.load(low + t[:, None] * row_stride + r[None, :], mask=mask, other=0.0)
        mask = (r[:, None] < RANK) & (d[None, :] < WIDTH)
        at = decay + r[:, None] * CHANNELS + head * WIDTH + d[None, :]
        w = tl.load(at, mask=mask, other=0.0)
        f = tl.dot(x, w, f, input_precision="ieee")
    f += tl.load(dt_bias + head * WIDTH + d, mask=d < WIDTH, other=0.0)[None, :]
    g = bound * tl.sigmoid(tl.load(rate + head) * f)
    return tl.where(t[:, None] < SLOTS, g, 0.0)


@triton.jit
def _solved(A, entry, t, T: tl.constexpr):
    """(I + A)^-1 entry for a strictly lower triangular A, row after row."""
    found = entry
    for row in tl.static_range(1, T):
        # A is zero from the row on: what it multiplies there does not count.
        factor = tl.sum(tl.where(t[:, None] == row, A, 0.0), 0)
        taken = tl.sum(factor[:, None] * found, 0)
        found = tl.where(t[:, None] == row, found - taken[None, :], found)
    return found


@triton.jit
def _series(A, entry, ORDER: tl.constexpr, PRECISION: tl.constexpr):
    """sum (-A)^n entry, n up to ORDER."""
    found = entry
    for _ in tl.static_range(ORDER):
        found = entry - tl.dot(A, found, input_precision=PRECISION)
    return found


@triton.jit
def _block(
    q, k, v, g, beta, S, t,
    ORDER: tl.constexpr, EXACT: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Linearised KDA of one head, [T, K]; `linear_kda.block`, decays factored."""
    G = tl.cumsum(g, 0)
    up = tl.exp(G)
    grown = tl.trans(k * tl.exp(-G))
    decayed = q * up
    pairs = tl.dot(decayed, grown, input_precision=PRECISION)
    pairs = tl.where(t[None, :] <= t[:, None], pairs, 0.0)
    out = tl.dot(decayed, S, input_precision=PRECISION)
    if ORDER == GLA:
        updates = beta[:, None] * v
    else:
        decayed = k * up
        updates = beta[:, None] * (v - tl.dot(decayed, S, input_precision=PRECISION))
        if EXACT or ORDER > 0:
            A = beta[:, None] * tl.dot(decayed, grown, input_precision=PRECISION)
            A = tl.where(t[None, :] < t[:, None], A, 0.0)
            updates = _solved(A, updates, t, T) if EXACT else _series(A, updates, ORDER, PRECISION)
    return tl.dot(pairs, updates, out, input_precision=PRECISION)


@triton.jit
def _kda_linear(
    inputs, window, conv, decay, dt_bias, rate, norm, state, sharpness, gain, out,
    bound, scale, eps, input_stride, window_stride, step, part_step, state_stride,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    TAPS: tl.constexpr, ORDER: tl.constexpr, EXACT: tl.constexpr, SOFTMAX: tl.constexpr,
    T: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    CHANNELS: tl.constexpr = HEADS * WIDTH
    ROW: tl.constexpr = 4 * CHANNELS + RANK + HEADS
    t, d = tl.arange(0, T), tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK)
    S = tl.load(
        state + request * state_stride + (head * WIDTH + e[:, None]) * WIDTH + d[None, :],
        mask=(e[:, None] < WIDTH) & (d[None, :] < WIDTH), other=0.0,
    )  # fmt: skip
    rows = inputs + request * input_stride
    before = window + request * window_stride
    q = part_of(
        rows, before, conv, 0, head, t, d, ROW, step, part_step, SLOTS, CHANNELS, WIDTH, TAPS
    )
    k = part_of(
        rows, before, conv, 1, head, t, d, ROW, step, part_step, SLOTS, CHANNELS, WIDTH, TAPS
    )
    v = part_of(
        rows, before, conv, 2, head, t, d, ROW, step, part_step, SLOTS, CHANNELS, WIDTH, TAPS
    )
    q, k = unit(q), unit(k)
    g = log_decay(rows + 4 * CHANNELS, decay, dt_bias, rate, head, t, d, ROW, bound,
                  SLOTS, CHANNELS, WIDTH, RANK, CHUNK)  # fmt: skip
    at = rows + t * ROW + 4 * CHANNELS + RANK + head
    beta = tl.sigmoid(tl.load(at, mask=t < SLOTS, other=0.0).to(tl.float32))
    o = _block(q * scale, k, v, g, beta, S, t, ORDER, EXACT, T, PRECISION)
    if SOFTMAX:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores *= tl.exp(tl.load(sharpness + head).to(tl.float32))
        scores = tl.where(t[None, :] < SLOTS, scores, float("-inf"))
        share = tl.exp(scores - tl.max(scores, 1)[:, None])
        share = share / tl.sum(share, 1)[:, None]
        mixed = tl.dot(share, v, input_precision=PRECISION)
        o += tl.load(gain + head).to(tl.float32) * mixed
    live = (t[:, None] < SLOTS) & (d[None, :] < WIDTH)
    at = head * WIDTH + d[None, :]
    gate = tl.load(rows + t[:, None] * ROW + 3 * CHANNELS + at, mask=live, other=0.0)
    weight = tl.load(norm + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 1) / WIDTH + eps)[:, None] * weight[None, :]
    o *= tl.sigmoid(gate.to(tl.float32))
    tl.store(out + (request * SLOTS + t[:, None]) * CHANNELS + at, o, mask=live)


def kda_linear(
    inputs: Tensor,
    window: Tensor,
    conv: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    norm: Tensor,
    state: Tensor,
    order: Order,
    lower_bound: float,
    eps: float,
    sharpness: Tensor | None = None,
    gain: Tensor | None = None,
    *,
    warps: int = 8,
) -> Tensor:
    """See `kda_linear.kda_linear`. Keywords: what a sweep varies."""
    batch, slots, _ = inputs.shape
    heads, width = dt_bias.shape
    rank = decay.shape[0]
    check_order(order, slots)
    out = torch.empty(batch, slots, heads * width, dtype=inputs.dtype, device=inputs.device)
    term = -1 if order == "gla" else int(order)
    _kda_linear[(heads, batch)](
        inputs, window, conv, decay, dt_bias, rate, norm, state, sharpness, gain, out,
        lower_bound, width**-0.5, eps,
        inputs.stride(0), window.stride(0), window.stride(1), window.stride(2), state.stride(0),
        SLOTS=slots, HEADS=heads, WIDTH=width, RANK=rank, TAPS=conv.shape[0],
        ORDER=term, EXACT=0 < term == slots - 1, SOFTMAX=sharpness is not None,
        T=ROWS, BLOCK=max(16, triton.next_power_of_2(width)),
        CHUNK=min(128, max(16, triton.next_power_of_2(rank))),
        PRECISION=_precision(inputs.dtype), num_warps=warps,
    )  # fmt: skip
    return out


def _precision(dtype: torch.dtype) -> str:
    """Of products of float32 numbers: what a narrower result has no room for is not computed."""
    if torch.version.hip:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def refuses(
    inputs: Tensor,
    window: Tensor,
    conv: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    norm: Tensor,
    state: Tensor,
    order: Order,
    lower_bound: float,
    eps: float,
    sharpness: Tensor | None = None,
    gain: Tensor | None = None,
) -> str | None:
    """Why the kernel cannot take these; None: it can."""
    del order, eps
    given = [inputs, window, conv, decay, dt_bias, rate, norm, state]
    given += [x for x in (sharpness, gain) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "gradients are wanted, and the kernel has no backward"
    if inputs.dtype not in FLOATS or {window.dtype, decay.dtype} != {inputs.dtype}:
        return f"rows of {inputs.dtype} with a window of {window.dtype}, decay of {decay.dtype}"
    if any(x.dtype != torch.float32 for x in (conv, dt_bias, rate, state)):
        return "convolution, decay parameters or state that are not float32"
    slots, width = inputs.shape[1], dt_bias.shape[1]
    if not 1 <= slots <= ROWS or width > 128:
        return f"{slots} slots of {width} channels, at most {ROWS} of 128 are taken"
    if -lower_bound * slots > MAX_EXPONENT:
        return f"decays down to {lower_bound} over {slots} slots overflow when factored"
    dense = [x for x in given if x is not window and x is not state]
    if not all(x.is_contiguous() for x in dense):
        return "a tensor is not contiguous"
    if window.stride(-1) != 1 or not state[0].is_contiguous():
        return "a window or a state that is not contiguous"
    return None
