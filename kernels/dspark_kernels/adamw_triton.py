"""Triton kernel of `adamw`: every value of a parameter is read once and written once.

A program takes `ROWS` blocks of 256 values, which is what shares a scale. Noise for rounding is a
hash of seed and place (murmur3's finaliser), 16 bits for each moment: Philox would take longer than
memory does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.adamw import Moments, Rates, corrections
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.moments import BLOCK

exact_floats()

ROWS, WARPS = 8, 4
_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def refuses(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    scale: Tensor,
    rates: Rates,
    copy: Tensor | None = None,
) -> str | None:
    """Why the kernel does not take these, or None."""
    del scale, rates, copy
    if weight.dtype != torch.float32 or gradient.dtype not in (torch.float32, torch.bfloat16):
        return f"weight in {weight.dtype} with a gradient in {gradient.dtype}"
    if moments.first.dtype not in _KIND:
        return f"moments in {moments.first.dtype}"
    if not weight.is_contiguous() or not gradient.is_contiguous():
        return "weight or gradient is not contiguous"
    return None


def adamw(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    scale: Tensor,
    rates: Rates,
    copy: Tensor | None = None,
) -> None:
    """See `adamw.adamw`."""
    count = weight.numel()
    kind = _KIND[moments.first.dtype]
    rate, spread = corrections(rates)
    first_scales, second_scales = moments.first_scales, moments.second_scales
    if first_scales is None or second_scales is None:
        first_scales = second_scales = scale  # never read
    _adamw[(triton.cdiv(count, ROWS * BLOCK),)](
        weight, gradient, moments.first, moments.second, first_scales, second_scales, scale,
        weight if copy is None else copy, count, rates.seed, rate, spread,
        1 - rates.lr * rates.weight_decay, rates.beta1, rates.beta2, rates.eps,
        KIND=kind, COPY=copy is not None, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _noise(at, seed):
    """32 bits for every place."""
    x = at.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _power(x, SIGNED: tl.constexpr):
    """x^2 for the first moment, x^4 for the second."""
    square = x * x
    return square if SIGNED else square * square


@triton.jit
def _read(values, scales, at, block, within, blocks, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """A moment in float32."""
    moment = tl.load(values + at, mask=within, other=0).to(tl.float32)
    if KIND == 2:
        scale = tl.load(scales + block, mask=block < blocks, other=0.0)[:, None]
        if SIGNED:
            moment = tl.where(moment < 0, -scale, scale) * _power(moment / 127, SIGNED)
        else:
            moment = scale * _power(moment / 255, SIGNED)
    return moment


@triton.jit
def _write(
    values, scales, moment, noise, at, block, within, blocks, KIND: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """Store a moment, rounded at random where it does not fit."""
    if KIND == 0:
        tl.store(values + at, moment, mask=within)
    elif KIND == 1:
        bits = (moment.to(tl.int32, bitcast=True) + noise) & -65536
        tl.store(values + at, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=within)
    else:
        size = tl.abs(tl.where(within, moment, 0.0))
        scale = tl.max(size, 1)
        tl.store(scales + block, scale, mask=block < blocks)
        share = size / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
        root = tl.sqrt(share)
        codes: tl.constexpr = 127 if SIGNED else 255
        below = root if SIGNED else tl.sqrt(root)
        below = tl.minimum(tl.floor(below * codes), codes - 1.0)
        low, high = _power(below / codes, SIGNED), _power((below + 1) / codes, SIGNED)
        chance = noise.to(tl.float32) * 1.52587890625e-05  # 2^-16
        code = below + tl.where(chance * (high - low) < share - low, 1.0, 0.0)
        if SIGNED:
            code = tl.where(moment < 0, -code, code)
        else:
            code = tl.where(moment > 0, tl.maximum(code, 1.0), code)
        tl.store(values + at, code.to(values.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["seed"])
def _adamw(
    weight, gradient, first, second, first_scales, second_scales, scale, copy, count, seed, rate,
    spread, decay, beta1, beta2, eps, KIND: tl.constexpr, COPY: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(scale)
    # False for NaN too: nothing is changed then.
    if tl.abs(factor) < float("inf"):
        block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        within, blocks = at < count, tl.cdiv(count, BLOCK)
        g = tl.load(gradient + at, mask=within, other=0.0).to(tl.float32) * factor
        m = _read(first, first_scales, at, block, within, blocks, KIND, True)
        v = _read(second, second_scales, at, block, within, blocks, KIND, False)
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        w = tl.load(weight + at, mask=within, other=0.0)
        w = w * decay - rate * m / (tl.sqrt(v * spread) + eps)
        tl.store(weight + at, w, mask=within)
        if COPY:
            tl.store(copy + at, w.to(tl.bfloat16), mask=within)
        noise = _noise(at, seed)
        low, high = (noise & 0xFFFF).to(tl.int32), (noise >> 16).to(tl.int32)
        _write(first, first_scales, m, low, at, block, within, blocks, KIND, True)
        _write(second, second_scales, v, high, at, block, within, blocks, KIND, False)
