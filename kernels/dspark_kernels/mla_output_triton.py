"""From parts of latent attention to the heads' gated values: merge, W_v and sigmoid in one launch.

A program takes one head of one sequence and BLOCK_V of its values, merges the parts of the head's
rows and multiplies them by its rows of W_v. Every program of a head merges the same parts again;
where that costs more than a launch, ``merge`` comes first and this sees a single part.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.latent_write_triton import per_sequence
from dspark_kernels.mla_decode_triton import (
    Plan,
    attend,
    chunk_of,
    merge,
    plan,
    precision,
    slots_of,
)
from dspark_kernels.mla_decode_triton import refuses as refuses_decode
from dspark_kernels.overlap import begin, early, wait

allow_loops()
exact_floats()


@triton.jit
def _merged_row(
    part, lse, active, r, R: tl.constexpr, TH: tl.constexpr, SPLITS_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """[R_PAD] float32 of one row; ``part`` and ``lse`` point to its first part."""
    s = tl.arange(0, SPLITS_PAD)
    logs = tl.load(lse + s * TH, mask=s < active, other=float("-inf"))
    most = tl.max(logs, axis=0)
    most = tl.where(most == float("-inf"), 0.0, most)
    mass = tl.sum(tl.exp2(logs - most), axis=0)
    acc = tl.zeros((BLOCK_S, R_PAD), tl.float32)
    for start in range(0, active, BLOCK_S):
        i = start + tl.arange(0, BLOCK_S)
        weights = tl.exp2(tl.load(lse + i * TH, mask=i < active, other=float("-inf")) - most)
        where = part + (i * TH)[:, None].to(tl.int64) * R + r[None, :]
        values = tl.load(where, mask=(i < active)[:, None] & (r < R)[None, :], other=0.0)
        acc += values.to(tl.float32) * weights[:, None]
    return tl.sum(acc, axis=0) / tl.where(mass > 0.0, mass, 1.0)


@triton.jit
def _merged_rows(
    part, lse, active, rows, real, r, R: tl.constexpr, TH: tl.constexpr, SPLITS_PAD: tl.constexpr,
    ROWS: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """[ROWS, R_PAD] float32 of some rows; ``part`` and ``lse`` point to the first of the first."""
    s = tl.arange(0, SPLITS_PAD)
    mask = real[:, None] & (s < active)[None, :]
    logs = tl.load(lse + s[None, :] * TH + rows[:, None], mask=mask, other=float("-inf"))
    most = tl.max(logs, axis=1)
    most = tl.where(most == float("-inf"), 0.0, most)
    mass = tl.sum(tl.exp2(logs - most[:, None]), axis=1)
    acc = tl.zeros((ROWS, R_PAD), tl.float32)
    inside = real[:, None] & (r < R)[None, :]
    for i in range(active):
        weights = tl.exp2(tl.load(lse + i * TH + rows, mask=real, other=float("-inf")) - most)
        where = part + (i * TH + rows)[:, None].to(tl.int64) * R + r[None, :]
        acc += tl.load(where, mask=inside, other=0.0).to(tl.float32) * weights[:, None]
    return acc * (1.0 / tl.where(mass > 0.0, mass, 1.0))[:, None]


@triton.jit
def _values_kernel(
    part, lse, lengths, counts, w_v, gate, out, L, w_h, w_row, gate_b, gate_t,
    T: tl.constexpr, H: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr, MERGED: tl.constexpr, GATED: tl.constexpr, COUNTS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    VB: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0).to(tl.int64)
    block, h, b = pid % VB, pid // VB % H, pid // (VB * H)
    r = tl.arange(0, R_PAD)
    v = block.to(tl.int32) * BLOCK_V + tl.arange(0, BLOCK_V)
    weights = tl.load(
        w_v + h * w_h + v[:, None].to(tl.int64) * w_row + r[None, :],
        mask=(v < V)[:, None] & (r < R)[None, :],
        other=0.0,
    )
    wait(EARLY)  # W_v is on its way while the attention still runs
    active = 1
    if not MERGED:
        _, total = slots_of(lengths, counts, b, T, L, COUNTS)
        active = tl.cdiv(total, chunk_of(total, SPLITS, BLOCK_N))
    first = b * SPLITS * T * H + h
    part += first * R
    lse += first
    if T == 1:
        if MERGED:
            mixed = tl.load(part + r, mask=r < R, other=0.0).to(tl.float32)
        else:
            mixed = _merged_row(part, lse, active, r, R, H, SPLITS_PAD, BLOCK_S, R_PAD)
        y = tl.sum(weights.to(tl.float32) * mixed[None, :], axis=1)
        _store_gated(y, gate + b * gate_b, out + b * (H * V), h * V + v, v < V, GATED)
    else:
        t = tl.arange(0, 16)
        real = t < T
        if MERGED:
            where = part + (t * H)[:, None] * R + r[None, :]
            mixed = tl.load(where, mask=real[:, None] & (r < R)[None, :], other=0.0)
        else:
            mixed = _merged_rows(part, lse, active, t * H, real, r, R, T * H, SPLITS_PAD, 16, R_PAD)
        y = tl.dot(mixed.to(weights.dtype), tl.trans(weights), input_precision=PRECISION)
        at, mask = (h * V + v)[None, :], real[:, None] & (v < V)[None, :]
        gate_at = b * gate_b + t[:, None] * gate_t
        _store_gated(y, gate + gate_at, out + (b * T + t)[:, None] * (H * V), at, mask, GATED)


@triton.jit
def _store_gated(y, gate, out, at, mask, GATED: tl.constexpr):
    if GATED:
        y *= tl.sigmoid(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


def refuses(
    q: Tensor,
    latents: Tensor,
    lengths: Tensor,
    rank: int,
    w_v: Tensor,
    gate: Tensor | None = None,
    upto: Tensor | None = None,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> str | None:
    """Why the kernel does not take these, or None."""
    reason = refuses_decode(q, latents, lengths, rank, upto, scales, counts)
    if reason is not None:
        return reason
    if w_v.dtype != q.dtype:
        return f"W_v is {w_v.dtype}, queries {q.dtype}"
    if w_v.stride(-1) != 1 or (gate is not None and gate.stride(-1) != 1):
        return "the last dimension of W_v or of the gate is not contiguous"
    if torch.is_grad_enabled() and (w_v.requires_grad or (gate is not None and gate.requires_grad)):
        return "there is no backward"
    return None


def values(
    part: Tensor,
    lse: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
    w_v: Tensor,
    gate: Tensor | None,
    shape: torch.Size,
    slots: int,
    cut: Plan,
    merged: bool,
) -> Tensor:
    """The last launch: [B, T, H v] from parts, or from their merge."""
    B, T, H, _ = shape
    rank, V = part.shape[-1], w_v.shape[1]
    out = torch.empty(B, T, H * V, dtype=part.dtype, device=part.device)
    block_v = max(16, min(cut.block_v, triton.next_power_of_2(V)))
    splits = 1 if merged else cut.splits
    splits_pad = triton.next_power_of_2(splits)
    _values_kernel[(-(-V // block_v) * H * B,)](
        part, lse, *per_sequence(lengths, counts),
        w_v, part if gate is None else gate, out, slots, w_v.stride(0), w_v.stride(1),
        0 if gate is None else gate.stride(0), 0 if gate is None else gate.stride(1),
        T=T, H=H, R=rank, R_PAD=max(16, triton.next_power_of_2(rank)), V=V, BLOCK_V=block_v,
        BLOCK_N=cut.block_n, SPLITS=splits, SPLITS_PAD=splits_pad, BLOCK_S=min(8, splits_pad),
        MERGED=merged, GATED=gate is not None, COUNTS=counts is not None,
        PRECISION=precision(part.dtype), num_warps=cut.value_warps, **early(),
    )  # fmt: skip
    return out


def mla_output(
    q: Tensor,
    latents: Tensor,
    lengths: Tensor,
    rank: int,
    w_v: Tensor,
    gate: Tensor | None = None,
    upto: Tensor | None = None,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """See ``dspark_kernels.mla_decode.mla_output``."""
    B, T, H, _ = q.shape
    slots = latents.shape[1]
    cut = plan(B, T * H, slots, q.dtype, q.device, scales is not None)
    part, lse = attend(q, latents, lengths, rank, upto, scales, counts, cut)
    merged = cut.splits == 1 or cut.merge_beyond < T
    if merged:
        part = merge(part, lse, lengths, counts, q.shape, slots, cut)
    return values(part, lse, lengths, counts, w_v, gate, q.shape, slots, cut, merged)
