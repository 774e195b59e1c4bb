"""Triton kernels of `grad_norms`: a program a part of any gradient, then a program a gradient.

A table has the address of each gradient, its size, and where its parts begin among all of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted import allow_loops

allow_loops()

TILE, TILES, WARPS = 4096, 16, 8
JOINED = 256
"""Parts that are added up at a time."""
COLUMNS = 3
"""Of a gradient: its address, its size, and whether it is bfloat16."""


def refuses(gradients: Sequence[Tensor]) -> str | None:
    """Why the kernels do not take these, or None."""
    for g in gradients:
        if g.dtype not in (torch.float32, torch.bfloat16):
            return f"a gradient in {g.dtype}"
        if not g.is_contiguous() or g.data_ptr() % 16:
            return "a gradient is not contiguous, or does not begin at a multiple of 16 bytes"
    return None


def grad_norms(gradients: Sequence[Tensor]) -> Tensor:
    """See `grad_norms.grad_norms`."""
    if not gradients:
        raise ValueError("no gradients: at least one is needed")
    device = gradients[0].device
    rows = [[g.data_ptr(), g.numel(), g.dtype == torch.bfloat16] for g in gradients]
    table = torch.tensor(rows, dtype=torch.int64)
    if gradients[0].is_cuda:  # sent without waiting for the device
        table = table.pin_memory().to(device, non_blocking=True)
    parts, ends = _parts(tuple(g.numel() for g in gradients), device)
    sums = torch.empty(max(1, len(parts)), dtype=torch.float32, device=device)
    norms = torch.empty(len(gradients), dtype=torch.float32, device=device)
    if len(parts):
        _squares[(len(parts),)](
            table, parts, sums, COLUMNS=COLUMNS, TILE=TILE, TILES=TILES, num_warps=WARPS
        )
    _joined[(len(gradients),)](sums, ends, norms, JOINED=JOINED, num_warps=4)
    return norms


@lru_cache(maxsize=8)
def _parts(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """[p, 2] int32: gradient of every part and its first tile there; [n + 1] int32: borders."""
    parts, ends = [], [0]
    for at, count in enumerate(counts):
        parts += [(at, first) for first in range(0, triton.cdiv(count, TILE), TILES)]
        ends.append(len(parts))
    found = torch.tensor(parts, dtype=torch.int32).view(-1, 2)
    return found.to(device), torch.tensor(ends, dtype=torch.int32).to(device)


@triton.jit
def _tile_squares(row, tile, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Squares of one tile [TILE]; `WHOLE`: all of it is there, so that whole vectors are read."""
    at = tl.full((), TILE, tl.int64) * tile + tl.arange(0, TILE)
    within = tl.full((TILE,), True, tl.int1) if WHOLE else at < tl.load(row + 1)
    address = tl.load(row)
    if tl.load(row + 2) != 0:
        half = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
        g = tl.load(half + at, mask=within, other=0.0).to(tl.float32)
    else:
        wide = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        g = tl.load(wide + at, mask=within, other=0.0)
    return g * g


@triton.jit
def _squares(
    table, part_table, sums, COLUMNS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    part = tl.program_id(0)
    row = table + tl.load(part_table + 2 * part) * COLUMNS
    start, count = tl.load(part_table + 2 * part + 1), tl.load(row + 1)
    total = tl.zeros((TILE,), tl.float32)
    for tile in tl.range(start, tl.minimum(start + TILES, tl.cdiv(count, TILE).to(tl.int32))):
        if tl.full((), TILE, tl.int64) * (tile + 1) <= count:
            total += _tile_squares(row, tile, True, TILE)
        else:
            total += _tile_squares(row, tile, False, TILE)
    tl.store(sums + part, tl.sum(total, 0))


@triton.jit
def _joined(sums, ends, norms, JOINED: tl.constexpr):
    gradient = tl.program_id(0)
    first, last = tl.load(ends + gradient), tl.load(ends + gradient + 1)
    total = tl.zeros((JOINED,), tl.float64)
    for start in tl.range(first, last, JOINED):
        at = start + tl.arange(0, JOINED)
        total += tl.load(sums + at, mask=at < last, other=0.0).to(tl.float64)
    tl.store(norms + gradient, tl.sqrt(tl.sum(total, 0)).to(tl.float32))
