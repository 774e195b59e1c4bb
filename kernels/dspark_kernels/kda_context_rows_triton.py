"""`kda_context_rows` in Triton: one program per request and head of a layer, one launch for all.

The parts of `kda_linear_triton`, which draws up the block behind the same windows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda_context_rows import Rows
from dspark_kernels.kda_linear_triton import FLOATS, ROWS, log_decay, part_of, unit

exact_floats()


@triton.jit
def _next(
    rows, before, next_, part, at, kept, i, d, row_stride,
    ALL: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """q, k or v of one head: the last W-1 of the window and the rows that are kept."""
    here = part * ALL + at * WIDTH + d[None, :]
    row = kept + i[:, None] - (TAPS - 1)
    live = (i[:, None] < TAPS - 1) & (d[None, :] < WIDTH)
    old = tl.load(before + (kept + i[:, None]) * (3 * ALL) + here, mask=live & (row < 0), other=0.0)
    new = tl.load(rows + row * row_stride + here, mask=live & (row >= 0), other=0.0)
    tl.store(next_ + i[:, None] * (3 * ALL) + here, old + new, mask=live)


@triton.jit
def _context_rows(
    inputs, window, conv, decay, dt_bias, rate, keep, k_out, v_out, g_out, beta_out, next_, bound,
    COUNT: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, T: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    at, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    layer, head = at // HEADS, at % HEADS
    CHANNELS: tl.constexpr = HEADS * WIDTH
    ALL: tl.constexpr = LAYERS * CHANNELS
    ROW: tl.constexpr = 3 * ALL + LAYERS * RANK + LAYERS * HEADS
    t, d, i = tl.arange(0, T), tl.arange(0, BLOCK), tl.arange(0, PLACES)
    kept = COUNT
    if keep is not None:
        kept = tl.load(keep + request).to(tl.int32)
    rows = inputs + request * COUNT * ROW
    before = window + request * (TAPS - 1) * 3 * ALL
    k = part_of(rows, before, conv, 1, at, t, d, ROW, 3 * ALL, ALL, COUNT, ALL, WIDTH, TAPS)
    v = part_of(rows, before, conv, 2, at, t, d, ROW, 3 * ALL, ALL, COUNT, ALL, WIDTH, TAPS)
    g = log_decay(
        rows + 3 * ALL + layer * RANK, decay + layer * RANK * CHANNELS,
        dt_bias + layer * CHANNELS, rate + layer * HEADS, head, t, d, ROW, bound,
        COUNT, CHANNELS, WIDTH, RANK, CHUNK,
    )  # fmt: skip
    logit = tl.load(rows + t * ROW + 3 * ALL + LAYERS * RANK + at, mask=t < COUNT, other=0.0)
    beta = tl.where(t < kept, tl.sigmoid(logit.to(tl.float32)), 0.0)
    g = tl.where(t[:, None] < kept, g, 0.0)
    live = (t[:, None] < COUNT) & (d[None, :] < WIDTH)
    place = (request * COUNT + t) * (LAYERS * HEADS) + at
    there = place[:, None] * WIDTH + d[None, :]
    tl.store(k_out + there, unit(k), mask=live)
    tl.store(v_out + there, v, mask=live)
    tl.store(g_out + there, g, mask=live)
    tl.store(beta_out + place, beta, mask=t < COUNT)
    after = next_ + request * (TAPS - 1) * 3 * ALL
    for part in tl.static_range(3):
        _next(rows, before, after, part, at, kept, i, d, ROW, ALL, WIDTH, TAPS)


def kda_context_rows(
    inputs: Tensor,
    window: Tensor,
    conv: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    lower_bound: float,
    keep: Tensor | None = None,
) -> Rows:
    """See `kda_context_rows.kda_context_rows`."""
    batch, count, _ = inputs.shape
    heads, width = dt_bias.shape
    layers, rank, _ = decay.shape
    k, v, g = conv.new_empty(3, batch, count, heads, width).unbind(0)
    beta = conv.new_empty(batch, count, heads)
    after = torch.empty_like(window)
    _context_rows[(heads, batch)](
        inputs, window, conv, decay, dt_bias, rate, keep, k, v, g, beta, after, lower_bound,
        COUNT=count, LAYERS=layers, HEADS=heads // layers, WIDTH=width, RANK=rank,
        TAPS=conv.shape[0], PLACES=max(1, triton.next_power_of_2(conv.shape[0] - 1)), T=ROWS,
        BLOCK=max(16, triton.next_power_of_2(width)),
        CHUNK=min(128, max(16, triton.next_power_of_2(rank))), num_warps=4,
    )  # fmt: skip
    return k, v, g, beta, after


def refuses(
    inputs: Tensor,
    window: Tensor,
    conv: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    lower_bound: float,
    keep: Tensor | None = None,
) -> str | None:
    """Why the kernel cannot take these; None: it can."""
    del lower_bound
    given = (inputs, window, conv, decay, dt_bias, rate)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "gradients are wanted, and the kernel has no backward"
    if inputs.dtype not in FLOATS or {window.dtype, decay.dtype} != {inputs.dtype}:
        return f"rows of {inputs.dtype} with a window of {window.dtype}, decay of {decay.dtype}"
    if any(x.dtype != torch.float32 for x in (conv, dt_bias, rate)):
        return "convolution or decay parameters that are not float32"
    count, width = inputs.shape[1], dt_bias.shape[1]
    if not 1 <= count <= ROWS or width > 128:
        return f"{count} rows of {width} channels, at most {ROWS} of 128 are taken"
    if conv.shape[0] < 2:
        return "a convolution of one row"
    if not all(x.is_contiguous() for x in given) or not (keep is None or keep.is_contiguous()):
        return "a tensor is not contiguous"
    return None
