"""Triton kernels of `distill_loss`: a program per slot sweeps its row of logits.

`terms` sweeps twice, for the softmaxes' sums and for the terms, `pull` once. A row of both models
is 0.6 MB at V = 152k, so that the second sweep finds part of it in the cache. Each lane takes eight
neighbours at a time and has a running maximum and sum of its own: threads meet once a row, and an
exponential more for eight logits is what that costs. No atomics: the same numbers every time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.distill_loss import NORMS, TERMS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE, WARPS = 4096, 8
PULL_TILE, PULL_WARPS = 2048, 4


def refuses(z: Tensor, target: Tensor, rows: Tensor, labels: Tensor, *rest: Any) -> str | None:
    """Why the kernels do not take these, or None."""
    del rows, labels, rest
    if z.dtype not in FLOATS or target.dtype not in FLOATS:
        return f"logits are {z.dtype} and {target.dtype}, not float32, bfloat16 or float16"
    if z.stride(-1) != 1 or target.stride(-1) != 1:
        return "a row of logits is not contiguous"
    return None


def terms(
    z: Tensor, target: Tensor, rows: Tensor, labels: Tensor, divergences: bool
) -> tuple[Tensor, Tensor]:
    """See `distill_loss.terms`."""
    count, vocabulary = z.shape
    values = torch.empty(TERMS, count, dtype=torch.float32, device=z.device)
    norms = torch.empty(NORMS, count, dtype=torch.float32, device=z.device)
    tile = _tile(vocabulary, TILE)
    if count:
        _terms[(count,)](
            z, target, rows, labels, values, norms, z.stride(0), target.stride(0), count,
            V=vocabulary, DIVERGENCES=divergences, TILE=tile, num_warps=_warps(tile),
        )  # fmt: skip
    return values, norms


def pull(
    z: Tensor,
    target: Tensor,
    rows: Tensor,
    labels: Tensor,
    divergences: bool,
    found: tuple[Tensor, Tensor],
    coefficients: Tensor,
) -> Tensor:
    """See `distill_loss.pull`."""
    values, norms = found
    count, vocabulary = z.shape
    tile = _tile(vocabulary, PULL_TILE)
    if count:
        # One axis: the second of a grid ends at 65,535, and small vocabularies have more slots.
        _pull[(triton.cdiv(vocabulary, tile) * count,)](
            z, target, rows, labels, values, norms, coefficients.float().contiguous(),
            z.stride(0), target.stride(0), count,
            V=vocabulary, DIVERGENCES=divergences, TILE=tile, num_warps=PULL_WARPS,
        )  # fmt: skip
    return z


def _tile(vocabulary: int, most: int) -> int:
    return max(32, min(most, triton.next_power_of_2(vocabulary)))


def _warps(tile: int) -> int:
    """No more threads than columns of a tile: two with the same sums would both write them."""
    return max(1, min(WARPS, tile // (8 * 32)))


@triton.jit
def _row(base, stride, index, columns, V: tl.constexpr):
    """A tile of a row of logits; past its end as good as -inf, and finite."""
    at = base + index.to(tl.int64) * stride + columns
    return tl.load(at, mask=columns < V, other=-1e38).to(tl.float32)


@triton.jit
def _widen(largest, total, logits):
    """Take a tile [lanes, 8] into sums of exponentials of every lane, below its own maximum."""
    higher = tl.maximum(largest, tl.max(logits, 1))
    added = tl.sum(tl.exp(logits - higher[:, None]), 1)
    return higher, total * tl.exp(largest - higher) + added


@triton.jit
def _joined(largest, total):
    """log sum exp of all lanes."""
    highest = tl.max(largest, 0)
    return highest + tl.log(tl.sum(total * tl.exp(largest - highest), 0))


@triton.jit
def _sums(z, target, z_stride, t_stride, slot, row, V: tl.constexpr, TILE: tl.constexpr):
    """log sum exp of both rows; the same operations for both, so that equal rows come out equal."""
    top_z, top_t = (
        tl.full((TILE // 8,), -1e38, tl.float32),
        tl.full((TILE // 8,), -1e38, tl.float32),
    )
    sum_z, sum_t = tl.zeros((TILE // 8,), tl.float32), tl.zeros((TILE // 8,), tl.float32)
    for start in range(0, V, TILE):
        columns = start + _places(TILE)
        top_z, sum_z = _widen(top_z, sum_z, _row(z, z_stride, slot, columns, V))
        top_t, sum_t = _widen(top_t, sum_t, _row(target, t_stride, row, columns, V))
    return _joined(top_z, sum_z), _joined(top_t, sum_t)


@triton.jit
def _places(TILE: tl.constexpr):
    """Columns of a tile, eight neighbours a lane: [TILE / 8, 8]."""
    return tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _compared(log_q, log_p):
    """q, p and H of a tile."""
    q, p = tl.exp(log_q), tl.exp(log_p)
    return q, p, tl.where(p > q, 1.0, tl.where(p == q, 0.5, 0.0))


@triton.jit
def _terms(
    z, target, rows, labels, values, norms, z_stride, t_stride, count,
    V: tl.constexpr, DIVERGENCES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row, label = tl.load(rows + slot), tl.load(labels + slot)
    norm_q, norm_p = _sums(z, target, z_stride, t_stride, slot, row, V, TILE)
    nothing = tl.zeros((TILE // 8,), tl.float32)
    gap, overlap, pulled = nothing, nothing, nothing
    forward, backward = nothing, nothing
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    for step in range(tiles):
        # From the end, where the first sweep's last tiles are still in the cache.
        columns = (tiles - 1 - step) * TILE + _places(TILE)
        log_q = _row(z, z_stride, slot, columns, V) - norm_q
        log_p = _row(target, t_stride, row, columns, V) - norm_p
        q, p, higher = _compared(log_q, log_p)
        gap += tl.sum(tl.abs(p - q), 1)
        overlap += tl.sum(tl.minimum(p, q), 1)
        pulled += tl.sum(q * higher, 1)
        if DIVERGENCES:
            ratio = log_p - log_q
            forward += tl.sum(p * ratio, 1)
            backward -= tl.sum(q * ratio, 1)
    shared = tl.maximum(tl.sum(overlap, 0), 1.1754943508222875e-38)
    at_label = tl.load(z + slot.to(tl.int64) * z_stride + label).to(tl.float32)
    tl.store(values + slot, norm_q - at_label)
    tl.store(values + count + slot, tl.sum(gap, 0))
    tl.store(values + 2 * count + slot, -tl.log(shared))
    tl.store(values + 3 * count + slot, tl.sum(forward, 0))
    tl.store(values + 4 * count + slot, tl.sum(backward, 0))
    tl.store(norms + slot, norm_q)
    tl.store(norms + count + slot, norm_p)
    tl.store(norms + 2 * count + slot, tl.sum(pulled, 0))
    tl.store(norms + 3 * count + slot, shared)


@triton.jit
def _pull(
    z, target, rows, labels, values, norms, coefficients, z_stride, t_stride, count,
    V: tl.constexpr, DIVERGENCES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    slot = tl.program_id(0) // tiles
    columns = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    row, label = tl.load(rows + slot), tl.load(labels + slot)
    log_q = _row(z, z_stride, slot, columns, V) - tl.load(norms + slot)
    log_p = _row(target, t_stride, row, columns, V) - tl.load(norms + count + slot)
    q, p, higher = _compared(log_q, log_p)
    ce = tl.load(coefficients + slot)
    toward = 2 * tl.load(coefficients + count + slot)
    toward += tl.load(coefficients + 2 * count + slot) / tl.load(norms + 3 * count + slot)
    gradient = ce - toward * (higher - tl.load(norms + 2 * count + slot))
    if DIVERGENCES:
        kl = tl.load(coefficients + 3 * count + slot)
        expected = tl.load(values + 4 * count + slot)
        ratio = log_p - log_q + expected
        gradient += kl - tl.load(coefficients + 4 * count + slot) * ratio
        gradient = gradient * q - kl * p
    else:
        gradient = gradient * q
    gradient -= tl.where(columns == label, ce, 0.0)
    at = z + slot.to(tl.int64) * z_stride + columns
    tl.store(at, gradient.to(z.dtype.element_ty), mask=columns < V)
