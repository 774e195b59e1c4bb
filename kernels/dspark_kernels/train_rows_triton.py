"""Triton kernels of `train_rows`: a tile of rows a program, whole rows in registers.

Where a weight has a gradient, programs go over many tiles and keep their part of its sum, which is
added up afterwards: no atomics, the same numbers every time. A head is read as two halves, which
are each other's partners in the rotation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats

allow_loops()
exact_floats()

HALF = (torch.bfloat16, torch.float16)
PARTS, HEAD_PARTS = 264, 396
"""Programs that share the sum of a weight's gradient: two and three for each of 132 processors."""
SUM_COLUMNS = 16
NORM_WARPS, HEAD_TILE, HEAD_WARPS, GATE_TILE, GATE_WARPS = 8, 32, 4, 4096, 8


def refuses(first: Tensor, *rest: Any) -> str | None:
    """Why the kernels do not take these, or None."""
    tensors = [first, *(x for x in rest if isinstance(x, Tensor))]
    if any(x.dtype not in (torch.float32, *HALF) for x in tensors):
        return f"{', '.join(str(x.dtype) for x in tensors)}: float32 and half precision are needed"
    if any(not x.is_contiguous() for x in tensors):
        return "a tensor is not contiguous"
    if first.ndim == 4 and first.shape[-1] & (first.shape[-1] - 1):
        return f"heads of {first.shape[-1]} channels, not a power of two"
    return None


def norm_rows(
    hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, half: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `train_rows.norm_rows`."""
    rows, width = hidden.shape
    total = hidden if added is None else torch.empty_like(hidden)
    normed = torch.empty(rows, width, dtype=half, device=hidden.device)
    root = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    _norm[(rows,)](
        hidden, hidden if added is None else added, weight, total, normed, root, eps, D=width,
        ADD=added is not None, TILE=triton.next_power_of_2(width), num_warps=NORM_WARPS,
    )  # fmt: skip
    return total, normed, root


def norm_rows_back(
    hidden: Tensor, weight: Tensor, root: Tensor, gradient: Tensor, through: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `train_rows.norm_rows_back`."""
    rows, width = hidden.shape
    total, half = torch.empty_like(hidden), torch.empty_like(gradient)
    parts = torch.empty(min(rows, PARTS), width, dtype=torch.float32, device=hidden.device)
    _norm_back[(len(parts),)](
        hidden, weight, root, gradient, through, total, half, parts, rows, D=width, ADD=True,
        TILE=triton.next_power_of_2(width), num_warps=NORM_WARPS,
    )  # fmt: skip
    return total, half, _summed(parts)


def norm_half_back(
    x: Tensor, weight: Tensor, root: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """See `train_rows.norm_half_back`."""
    rows, width = x.shape
    out = torch.empty_like(x)
    parts = torch.empty(min(rows, PARTS), width, dtype=torch.float32, device=x.device)
    _norm_back[(len(parts),)](
        x, weight, root, gradient, gradient, gradient, out, parts, rows, D=width, ADD=False,
        TILE=triton.next_power_of_2(width), num_warps=NORM_WARPS,
    )  # fmt: skip
    return out, _summed(parts)


def turn_heads(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, start: int, eps: float
) -> Tensor:
    """See `train_rows.turn_heads`."""
    out = torch.empty_like(x)
    count = x.numel() // x.shape[-1]
    _turn[(triton.cdiv(count, HEAD_TILE),)](
        x, weight, cos, sin, out, count, x.shape[1], cos.shape[1], start, eps, H=x.shape[2],
        PAIRS=x.shape[-1] // 2, TILE=HEAD_TILE, num_warps=HEAD_WARPS,
    )  # fmt: skip
    return out


def turn_heads_back(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, start: int, eps: float, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """See `train_rows.turn_heads_back`."""
    out = torch.empty_like(x)
    count = x.numel() // x.shape[-1]
    tiles = triton.cdiv(count, HEAD_TILE)
    parts = torch.empty(min(tiles, HEAD_PARTS), len(weight), dtype=torch.float32, device=x.device)
    _turn_back[(len(parts),)](
        x, weight, cos, sin, gradient, out, parts, count, tiles, x.shape[1], cos.shape[1], start,
        eps, H=x.shape[2], PAIRS=x.shape[-1] // 2, TILE=HEAD_TILE, num_warps=HEAD_WARPS,
    )  # fmt: skip
    return out, _summed(parts)


def gate_silu(gate: Tensor, up: Tensor) -> Tensor:
    """See `train_rows.gate_silu`."""
    out = torch.empty_like(gate)
    count = gate.numel()
    _gate[(triton.cdiv(count, GATE_TILE),)](
        gate, up, out, count, TILE=GATE_TILE, num_warps=GATE_WARPS
    )
    return out


def gate_silu_back(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `train_rows.gate_silu_back`."""
    of_gate, of_up, out = (torch.empty_like(gate) for _ in range(3))
    count = gate.numel()
    _gate_back[(triton.cdiv(count, GATE_TILE),)](
        gate, up, gradient, of_gate, of_up, out, count, TILE=GATE_TILE, num_warps=GATE_WARPS
    )
    return of_gate, of_up, out


def _summed(parts: Tensor) -> Tensor:
    """[n, D] float32 -> [D], n a few hundred: torch's sum takes three times as long."""
    count, width = parts.shape
    out = parts.new_empty(width)
    _sum_parts[(triton.cdiv(width, SUM_COLUMNS),)](
        parts, out, count, D=width, COUNT=triton.next_power_of_2(count), COLUMNS=SUM_COLUMNS
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _sum_parts(parts, out, count, D: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    part, at = tl.arange(0, COUNT)[:, None], tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (part < count) & (at < D)[None, :]
    values = tl.load(parts + part * D + at[None, :], mask=inside, other=0.0)
    tl.store(out + at, tl.sum(values, 0), mask=at < D)


@triton.jit
def _norm(
    hidden, added, weight, total, normed, root, eps, D: tl.constexpr, ADD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    inside = at < D
    x = tl.load(hidden + row * D + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added + row * D + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * D + at, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(root + row, scale)
    tl.store(normed + row * D + at, (x * scale * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_back(
    hidden, weight, root, gradient, through, total, half, parts, rows, D: tl.constexpr,
    ADD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, stride = tl.arange(0, TILE), tl.full((), D, tl.int64)
    inside = at < D
    w = tl.load(weight + at, mask=inside, other=0.0)
    of_weight = tl.zeros((TILE,), tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        place = row * stride + at
        scale = tl.load(root + row)
        unit = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        of_weight += g * unit
        scaled = g * w
        inner = tl.sum(scaled * unit, 0) / D
        result = scale * (scaled - unit * inner)
        if ADD:
            result += tl.load(through + place, mask=inside, other=0.0)
            tl.store(total + place, result, mask=inside)
        tl.store(half + place, result.to(half.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0) * D + at, of_weight, mask=inside)


@triton.jit
def _head_places(
    tile, count, rows, table_rows, start, H: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr
):
    """Where first halves of a tile of heads lie, and those of their tables; which are there."""
    head = tile * TILE + tl.arange(0, TILE)
    inside = (head < count)[:, None]
    row = head // H
    table = row // rows * table_rows + start + row % rows
    pair = tl.arange(0, PAIRS)[None, :]
    wide: tl.constexpr = 2 * PAIRS
    return (
        head.to(tl.int64)[:, None] * wide + pair,
        table.to(tl.int64)[:, None] * wide + pair,
        inside,
    )


@triton.jit
def _halves(pointer, at, inside, PAIRS: tl.constexpr):
    """Both halves of heads, in float32."""
    first = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(pointer + at + PAIRS, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _units(first, second, eps, PAIRS: tl.constexpr):
    """Heads over their rms, and 1 / rms."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / (2 * PAIRS) + eps)[:, None]
    return first * scale, second * scale, scale


@triton.jit(do_not_specialize=["count", "rows", "table_rows", "start"])
def _turn(
    x, weight, cos, sin, out, count, rows, table_rows, start, eps, H: tl.constexpr,
    PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, table, inside = _head_places(
        tl.program_id(0), count, rows, table_rows, start, H, PAIRS, TILE
    )
    half = out.dtype.element_ty
    first, second = _halves(x, at, inside, PAIRS)
    first, second, _scale = _units(first, second, eps, PAIRS)
    pair = tl.arange(0, PAIRS)[None, :]
    first = first.to(half).to(tl.float32) * tl.load(weight + pair)
    second = second.to(half).to(tl.float32) * tl.load(weight + PAIRS + pair)
    cos_1, cos_2 = _halves(cos, table, inside, PAIRS)
    sin_1, sin_2 = _halves(sin, table, inside, PAIRS)
    tl.store(out + at, (first * cos_1 + second * sin_1).to(half), mask=inside)
    tl.store(out + at + PAIRS, (second * cos_2 + first * sin_2).to(half), mask=inside)


@triton.jit(do_not_specialize=["count", "tiles", "rows", "table_rows", "start"])
def _turn_back(
    x, weight, cos, sin, gradient, out, parts, count, tiles, rows, table_rows, start, eps,
    H: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, PAIRS)
    half = out.dtype.element_ty
    w_1, w_2 = tl.load(weight + pair)[None, :], tl.load(weight + PAIRS + pair)[None, :]
    sum_1, sum_2 = tl.zeros((PAIRS,), tl.float32), tl.zeros((PAIRS,), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        at, table, inside = _head_places(tile, count, rows, table_rows, start, H, PAIRS, TILE)
        first, second = _halves(x, at, inside, PAIRS)
        unit_1, unit_2, scale = _units(first, second, eps, PAIRS)
        cos_1, cos_2 = _halves(cos, table, inside, PAIRS)
        sin_1, sin_2 = _halves(sin, table, inside, PAIRS)
        g_1, g_2 = _halves(gradient, at, inside, PAIRS)
        normed_1, normed_2 = g_1 * cos_1 + g_2 * sin_2, g_2 * cos_2 + g_1 * sin_1
        sum_1 += tl.sum(normed_1 * unit_1, 0)
        sum_2 += tl.sum(normed_2 * unit_2, 0)
        normed_1, normed_2 = normed_1 * w_1, normed_2 * w_2
        inner = tl.sum(normed_1 * unit_1, 1) + tl.sum(normed_2 * unit_2, 1)
        inner = inner[:, None] / (2 * PAIRS)
        tl.store(out + at, (scale * (normed_1 - unit_1 * inner)).to(half), mask=inside)
        tl.store(out + at + PAIRS, (scale * (normed_2 - unit_2 * inner)).to(half), mask=inside)
    place = parts + tl.program_id(0) * 2 * PAIRS + pair
    tl.store(place, sum_1)
    tl.store(place + PAIRS, sum_2)


@triton.jit
def _gate(gate, up, out, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_back(gate, up, gradient, of_gate, of_up, out, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    half = out.dtype.element_ty
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    pulled = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(g)
    silu = g * chance
    tl.store(of_gate + at, (pulled * u * (chance + silu * (1 - chance))).to(half), mask=inside)
    tl.store(of_up + at, (pulled * silu).to(half), mask=inside)
    tl.store(out + at, (silu * u).to(half), mask=inside)
