"""Latent attention split over the sequence: partial softmaxes of chunks, then their merge.

A program takes BLOCK_M of the T H query rows of a sequence and one of S chunks of its slots:

    best = max s;  mass = sum exp(s - best);  part = (sum exp(s - best) c) / mass
    lse = best + log mass
    out = sum_i exp(lse_i - max lse) part_i / sum_i exp(lse_i - max lse)         the merge

S follows from shapes, the chunk from the length on the device: a captured graph serves any length,
and short texts leave the last programs without work. Programs of the same chunk stand next to each
other, so that the rows after the first BLOCK_M find its latents in the L2. Logarithms are base 2.
Parts are averages of latents and are kept in the dtype of the queries.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.latent_write_triton import has_float8, per_sequence
from dspark_kernels.overlap import begin, early, wait

allow_loops()
exact_floats()

MOST_ROWS = 16
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Plan:
    """How a call is cut: rows and slots of a tile, chunks of a sequence, the compiler's knobs."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int
    block_r: int = 128
    merge_warps: int = 4
    block_v: int = 32
    value_warps: int = 4
    merge_beyond: int = 1
    """Rows per sequence above which the merge is a launch of its own before ``values``."""


def plan(
    batch: int,
    rows: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    float8: bool = False,
) -> Plan:
    """The plan for ``rows`` = T H query rows of each of ``batch`` sequences."""
    if dtype == torch.float32:
        block_m, block_n, warps, stages = 16, 16, 4, 2
    elif float8:
        block_m, block_n, warps, stages = (32, 64, 8, 2) if rows <= 32 else (64, 32, 8, 2)
    elif rows <= 32:
        block_m, block_n, warps, stages = 16, 64, 4, 2
    else:
        block_m, block_n, warps, stages = 64, 64, 8, 2
    blocks = batch * -(-rows // block_m)
    splits = max(1, _processors(device) // blocks)  # one wave, one program to a processor
    return Plan(block_m, block_n, min(splits, -(-slots // block_n)), warps, stages)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def chunk_of(total, splits, BLOCK_N: tl.constexpr):
    """Slots per chunk; the chunks that hold any are cdiv(total, chunk)."""
    tiles = tl.cdiv(tl.cdiv(total, splits), BLOCK_N)
    return tl.maximum(tiles, 1) * BLOCK_N


@triton.jit
def slots_of(lengths, counts, b, T: tl.constexpr, L, COUNTS: tl.constexpr):
    """Committed slots of a sequence, and those that its new rows may see in all."""
    length = tl.load(lengths + b).to(tl.int32)
    new = T
    if COUNTS:
        new = tl.minimum(tl.load(counts + b), T).to(tl.int32)
    return length, tl.minimum(length + new, L)


@triton.jit
def _sight(upto, b, t, real, T: tl.constexpr, TREE: tl.constexpr, step_b):
    """Bit j of a row's word: it may see the new slot j."""
    if not TREE:
        return (2 << t) - 1
    j = tl.arange(0, 16)
    seen = tl.load(
        upto + b * step_b + t[:, None] * T + j[None, :],
        mask=real[:, None] & (j[None, :] < T),
        other=0,
    )
    return tl.sum((seen != 0).to(tl.int32) << j[None, :], axis=1)


@triton.jit
def _tile(latents, slots, columns, step_l, left, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Latents [BLOCK_N, columns] of the slots from a pointer on, zero where none is left."""
    mask = (slots < left)[:, None]
    if not WHOLE:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(latents + slots[:, None] * step_l + columns[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["splits", "L"])
def _attend_kernel(
    q, latents, scales, lengths, upto, counts, part, lse, splits, L,
    q_b, q_t, q_h, latents_b, latents_l, scales_b, upto_b,
    T: tl.constexpr, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    R_PAD: tl.constexpr, P_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TREE: tl.constexpr, SCALED: tl.constexpr, COUNTS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    wait(EARLY)
    BLOCKS: tl.constexpr = (T * H + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    block, split = pid % BLOCKS, pid // BLOCKS % splits
    b = (pid // BLOCKS // splits).to(tl.int64)
    length, total = slots_of(lengths, counts, b, T, L, COUNTS)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < T * H
    t = tl.minimum(rows // H, T - 1)
    r, p = tl.arange(0, R_PAD), tl.arange(0, P_PAD)
    at = q + b * q_b + t * q_t + (rows % H) * q_h
    q_c = tl.load(at[:, None] + r[None, :], mask=real[:, None] & (r < R)[None, :], other=0.0)
    q_p = tl.load(at[:, None] + R + p[None, :], mask=real[:, None] & (p < P)[None, :], other=0.0)
    chunk = chunk_of(total, splits, BLOCK_N)
    start = split * chunk
    if (start >= total) & (splits > 1):
        return  # the merge knows how many chunks there are
    stop = tl.minimum(start + chunk, total)
    sight = _sight(upto, b, t, real, T, TREE, upto_b)
    step = latents_l.to(tl.int64)
    latents += b * latents_b
    scales += b * scales_b

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, R_PAD), tl.float32)
    slots = tl.arange(0, BLOCK_N)
    for j in range(start, stop, BLOCK_N):
        left, here = total - j, latents + j * step
        c = _tile(here, slots, r, latents_l, left, R, R == R_PAD).to(q_c.dtype)
        k = _tile(here + R, slots, p, latents_l, left, P, P == P_PAD).to(q_c.dtype)
        s = tl.dot(q_c, tl.trans(c), input_precision=PRECISION)
        s = tl.dot(q_p, tl.trans(k), s, input_precision=PRECISION) * LOG2_E
        if SCALED:
            scale = tl.load(scales + j + slots, mask=slots < left, other=0.0)
            s *= scale[None, :]
        place = j - length + slots
        new = (sight[:, None] >> tl.minimum(tl.maximum(place, 0), 31)[None, :]) & 1
        seen = ((place < 0)[None, :] | (new != 0)) & (slots < left)[None, :]
        s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(best, tl.max(s, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(s - level[:, None])
        shrink = tl.exp2(best - level)
        mass = mass * shrink + tl.sum(weights, axis=1)
        if SCALED:
            weights *= scale[None, :]
        acc = tl.dot(weights.to(c.dtype), c, acc * shrink[:, None], input_precision=PRECISION)
        best = higher
    _keep(part, lse, acc, best, mass, (b * splits + split) * (T * H) + rows, real, r, R)


@triton.jit
def _keep(part, lse, acc, best, mass, row, real, r, R: tl.constexpr):
    """Store a part and its log of mass; what saw nothing is zero, with a mass of zero."""
    some = mass > 0.0
    part_rows = acc * (1.0 / tl.where(some, mass, 1.0))[:, None]
    where = part + row[:, None] * R + r[None, :]
    tl.store(where, part_rows.to(part.dtype.element_ty), mask=real[:, None] & (r < R)[None, :])
    logs = tl.where(some, best + tl.log2(tl.where(some, mass, 1.0)), float("-inf"))
    tl.store(lse + row, logs, mask=real)


@triton.jit
def split_weights(lse, active, SPLITS_PAD: tl.constexpr, step):
    """max and sum of the parts' masses; ``lse`` points to the row's first."""
    s = tl.arange(0, SPLITS_PAD)
    logs = tl.load(lse + s * step, mask=s < active, other=float("-inf"))
    most = tl.max(logs, axis=0)
    most = tl.where(most == float("-inf"), 0.0, most)
    return most, tl.sum(tl.exp2(logs - most), axis=0)


@triton.jit
def _merge_kernel(
    part, lse, lengths, counts, out, L,
    T: tl.constexpr, TH: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, BLOCK_S: tl.constexpr,
    COUNTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    wait(EARLY)
    pid = tl.program_id(0).to(tl.int64)
    row, r = pid % TH, tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    b = pid // TH
    _, total = slots_of(lengths, counts, b, T, L, COUNTS)
    active = tl.cdiv(total, chunk_of(total, SPLITS, BLOCK_N))
    first = b * SPLITS * TH + row
    most, mass = split_weights(lse + first, active, SPLITS_PAD, TH)
    acc = tl.zeros((BLOCK_S, BLOCK_R), tl.float32)
    for start in range(0, active, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        logs = tl.load(lse + first + s * TH, mask=s < active, other=float("-inf"))
        mask = (s < active)[:, None] & (r < R)[None, :]
        values = tl.load(part + (first + s * TH)[:, None] * R + r[None, :], mask=mask, other=0.0)
        acc += values.to(tl.float32) * tl.exp2(logs - most)[:, None]
    merged = tl.sum(acc, axis=0) / tl.where(mass > 0.0, mass, 1.0)
    tl.store(out + pid * R + r, merged.to(out.dtype.element_ty), mask=r < R)


def refuses(
    q: Tensor,
    latents: Tensor,
    lengths: Tensor,
    rank: int,
    upto: Tensor | None = None,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> str | None:
    """Why the kernel does not take these, or None."""
    fp8 = latents.dtype == torch.float8_e4m3fn
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"queries are {q.dtype}"
    if not fp8 and latents.dtype != q.dtype:
        return f"latents are {latents.dtype}, queries {q.dtype}"
    if fp8 and scales is None:
        return "float8 latents without scales"
    if fp8 and not has_float8(q.device):
        return "this device has no float8 e4m3"
    if q.shape[1] > MOST_ROWS:
        return f"{q.shape[1]} rows; at most {MOST_ROWS}"
    if rank > 512 or latents.shape[2] - rank > 128 or latents.shape[2] <= rank:
        return f"rank {rank} and shared width {latents.shape[2] - rank}; at most 512 and 128"
    if any(x.stride(-1) != 1 for x in (q, latents, scales) if x is not None):
        return "the last dimension is not contiguous"
    if torch.is_grad_enabled() and (q.requires_grad or latents.requires_grad):
        return "there is no backward"
    return None


def attend(
    q: Tensor,
    latents: Tensor,
    lengths: Tensor,
    rank: int,
    upto: Tensor | None,
    scales: Tensor | None,
    counts: Tensor | None,
    cut: Plan,
) -> tuple[Tensor, Tensor]:
    """The first launch: parts [B, S, T H, R] and base-2 logs of their masses [B, S, T H]."""
    B, T, H, width = q.shape
    part = torch.empty(B, cut.splits, T * H, rank, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, cut.splits, T * H, dtype=torch.float32, device=q.device)
    counted, tree = counts is not None, upto is not None
    lengths, counts = per_sequence(lengths, counts)
    if upto is not None:
        upto = upto.contiguous().view(torch.uint8)
    grid = (-(-T * H // cut.block_m) * cut.splits * B,)
    _attend_kernel[grid](
        q, latents, lse if scales is None else scales, lengths, lengths if upto is None else upto,
        counts, part, lse, cut.splits, latents.shape[1],
        q.stride(0), q.stride(1), q.stride(2), latents.stride(0), latents.stride(1),
        0 if scales is None else scales.stride(0),
        0 if upto is None or len(upto) == 1 else upto.stride(0),
        T=T, H=H, R=rank, P=width - rank,
        R_PAD=max(16, triton.next_power_of_2(rank)),
        P_PAD=max(16, triton.next_power_of_2(width - rank)),
        BLOCK_M=cut.block_m, BLOCK_N=cut.block_n,
        TREE=tree, SCALED=scales is not None, COUNTS=counted,
        PRECISION=precision(q.dtype), num_warps=cut.warps, num_stages=cut.stages, **early(),
    )  # fmt: skip
    return part, lse


def precision(dtype: torch.dtype) -> str:
    """float32 products as three of tf32, which is within 1e-6; elsewhere than on NVIDIA in full."""
    return "tf32x3" if dtype == torch.float32 and not torch.version.hip else "ieee"


def merge(
    part: Tensor,
    lse: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
    shape: torch.Size,
    slots: int,
    cut: Plan,
) -> Tensor:
    """The second launch: [B, T, H, R]."""
    B, T, H, _ = shape
    rank = part.shape[-1]
    out = torch.empty(B, T, H, rank, dtype=part.dtype, device=part.device)
    if cut.splits == 1:
        return part.view(B, T, H, rank)
    splits_pad = triton.next_power_of_2(cut.splits)
    block_r = min(triton.next_power_of_2(rank), cut.block_r)
    _merge_kernel[(B * T * H, -(-rank // block_r))](
        part, lse, *per_sequence(lengths, counts), out, slots,
        T=T, TH=T * H, R=rank, BLOCK_R=block_r, BLOCK_N=cut.block_n, SPLITS=cut.splits,
        SPLITS_PAD=splits_pad, BLOCK_S=min(16, splits_pad), COUNTS=counts is not None,
        num_warps=cut.merge_warps, **early(),
    )  # fmt: skip
    return out


def mla_decode(
    q: Tensor,
    latents: Tensor,
    lengths: Tensor,
    rank: int,
    upto: Tensor | None = None,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """See ``dspark_kernels.mla_decode.mla_decode``."""
    B, T, H, _ = q.shape
    cut = plan(B, T * H, latents.shape[1], q.dtype, q.device, scales is not None)
    part, lse = attend(q, latents, lengths, rank, upto, scales, counts, cut)
    return merge(part, lse, lengths, counts, q.shape, latents.shape[1], cut)
