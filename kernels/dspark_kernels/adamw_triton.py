"""Triton kernel of `adamw`: every value of every parameter is read once and written once.

One launch for all: a table has the addresses of each parameter, and programs go over parts of all
of them, a tile of `ROWS` blocks of 256 values (which is what shares a scale) at a time. A program
is as large as a processor has room for, and there are no more than memory needs: the other
processors are free for products that run meanwhile. Noise for rounding is a hash of seed and place
(murmur3's finaliser), 16 bits for each moment: Philox would take longer than memory does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.adamw import BLOCK, Rates, Update, corrections
from dspark_kernels.interpreted import allow_loops

allow_loops()


ROWS, TILES, WARPS, PROGRAMS = 16, 16, 32, 132
"""Blocks of a tile, tiles that a program takes at a time, its warps, and how many there are."""
COLUMNS = 10
"""Of a parameter: seven addresses, its size, its seed, and whether its gradient is bfloat16."""
_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def refuses(updates: Sequence[Update], scale: Tensor, rates: Rates) -> str | None:
    """Why the kernel does not take these, or None."""
    del scale, rates
    kinds = {each.moments.first.dtype for each in updates}
    if len(kinds) > 1 or not kinds <= set(_KIND):
        return f"moments in {', '.join(sorted(str(kind) for kind in kinds))}"
    for each in updates:
        weight, gradient = each.weight, each.gradient
        if weight.dtype != torch.float32 or gradient.dtype not in (torch.float32, torch.bfloat16):
            return f"weight in {weight.dtype} with a gradient in {gradient.dtype}"
        if not weight.is_contiguous() or not gradient.is_contiguous():
            return "weight or gradient is not contiguous"
        if any(tensor.data_ptr() % 16 for tensor in _tensors(each) if tensor is not None):
            return "a tensor does not begin at a multiple of 16 bytes"
    return None


def adamw(updates: Sequence[Update], scale: Tensor, rates: Rates) -> None:
    """See `adamw.adamw`."""
    if not updates:
        return
    counts = tuple(each.weight.numel() for each in updates)
    rows = [
        [0 if tensor is None else tensor.data_ptr() for tensor in _tensors(each)]
        + [count, each.seed, each.gradient.dtype == torch.bfloat16]
        for each, count in zip(updates, counts, strict=True)
    ]
    table = torch.tensor(rows, dtype=torch.int64)
    if scale.is_cuda:  # sent without waiting for the device
        table = table.pin_memory().to(scale.device, non_blocking=True)
    parts = _parts(counts, scale.device)
    rate, spread = corrections(rates)
    _adamw[(min(PROGRAMS, len(parts)),)](
        table, parts, len(parts), scale, rate, spread, 1 - rates.lr * rates.weight_decay,
        rates.beta1, rates.beta2, rates.eps, KIND=_KIND[updates[0].moments.first.dtype],
        COLUMNS=COLUMNS, ROWS=ROWS, BLOCK=BLOCK, TILES=TILES, num_warps=WARPS,
    )  # fmt: skip


def _tensors(update: Update) -> tuple[Tensor | None, ...]:
    moments = update.moments
    return (
        update.weight, update.gradient, moments.first, moments.second, moments.first_scales,
        moments.second_scales, update.copy,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _parts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """[n, 2] int32: the parameter of every part of the work, and its first tile there."""
    tiles = [triton.cdiv(count, ROWS * BLOCK) for count in counts]
    parts = [(at, first) for at, most in enumerate(tiles) for first in range(0, most, TILES)]
    return torch.tensor(parts, dtype=torch.int32).view(-1, 2).to(device)


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
        scale = tl.load(scales + block, mask=blocks, other=0.0)[:, None]
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
        tl.store(scales + block, scale, mask=blocks)
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


@triton.jit
def _pointer(row, column: tl.constexpr, dtype: tl.constexpr):
    """An address of the table. Whole vectors are moved, since all begin at 16 bytes."""
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _moment(row, column: tl.constexpr, KIND: tl.constexpr):
    if KIND == 0:
        pointer = _pointer(row, column, tl.float32)
    elif KIND == 1:
        pointer = _pointer(row, column, tl.bfloat16)
    elif column == 2:
        pointer = _pointer(row, column, tl.int8)
    else:
        pointer = _pointer(row, column, tl.uint8)
    return pointer


@triton.jit
def _tile(
    row, tile, factor, rate, spread, decay, beta1, beta2, eps, KIND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Update one tile of the parameter that `row` describes; `WHOLE`: all of it is there.

    A mask keeps the compiler from moving whole vectors.
    """
    weight, copy = _pointer(row, 0, tl.float32), _pointer(row, 6, tl.bfloat16)
    first, second = _moment(row, 2, KIND), _moment(row, 3, KIND)
    first_scales, second_scales = _pointer(row, 4, tl.float32), _pointer(row, 5, tl.float32)
    count, seed = tl.load(row + 7), tl.load(row + 8)
    block = tl.full((), ROWS, tl.int64) * tile + tl.arange(0, ROWS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    within = tl.full((ROWS, BLOCK), True, tl.int1) if WHOLE else at < count
    blocks = (block < tl.cdiv(count, BLOCK)) | WHOLE
    if tl.load(row + 9) != 0:
        g = tl.load(_pointer(row, 1, tl.bfloat16) + at, mask=within, other=0.0).to(tl.float32)
    else:
        g = tl.load(_pointer(row, 1, tl.float32) + at, mask=within, other=0.0)
    g *= factor
    m = _read(first, first_scales, at, block, within, blocks, KIND, True)
    v = _read(second, second_scales, at, block, within, blocks, KIND, False)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    w = tl.load(weight + at, mask=within, other=0.0)
    w = w * decay - rate * m / (tl.sqrt(v * spread) + eps)
    tl.store(weight + at, w, mask=within)
    if tl.load(row + 6) != 0:
        tl.store(copy + at, w.to(tl.bfloat16), mask=within)
    noise = _noise(at, seed)
    low, high = (noise & 0xFFFF).to(tl.int32), (noise >> 16).to(tl.int32)
    _write(first, first_scales, m, low, at, block, within, blocks, KIND, True)
    _write(second, second_scales, v, high, at, block, within, blocks, KIND, False)


@triton.jit
def _part(
    row, start, factor, rate, spread, decay, beta1, beta2, eps, KIND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Update some tiles of a parameter."""
    count = tl.load(row + 7)
    last = tl.minimum(start + TILES, tl.cdiv(count, ROWS * BLOCK).to(tl.int32))
    for tile in tl.range(start, last):
        if tl.full((), ROWS * BLOCK, tl.int64) * (tile + 1) <= count:
            _tile(
                row, tile, factor, rate, spread, decay, beta1, beta2, eps, KIND, ROWS, BLOCK, True
            )
        else:
            _tile(
                row, tile, factor, rate, spread, decay, beta1, beta2, eps, KIND, ROWS, BLOCK, False
            )


@triton.jit(do_not_specialize=["parts"])
def _adamw(
    table, part_table, parts, scale, rate, spread, decay, beta1, beta2, eps, KIND: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    factor = tl.load(scale)
    # False for NaN too: nothing is changed then.
    if tl.abs(factor) < float("inf"):
        for part in tl.range(tl.program_id(0), parts, tl.num_programs(0)):
            row = table + tl.load(part_table + 2 * part) * COLUMNS
            start = tl.load(part_table + 2 * part + 1)
            _part(
                row, start, factor, rate, spread, decay, beta1, beta2, eps, KIND, ROWS, BLOCK, TILES
            )
