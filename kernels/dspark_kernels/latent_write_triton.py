"""One program per new row: norm, scale where the latents are float8, store at the row's slot."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.overlap import begin, early, wait

exact_floats()


@triton.jit
def norm_weight(norm, R: tl.constexpr, R_PAD: tl.constexpr):
    """[R_PAD]; no launch makes it, so it is read before any is waited for."""
    r = tl.arange(0, R_PAD)
    return tl.load(norm + r, mask=r < R, other=0.0)


@triton.jit
def write_row(
    row, latents, scales, by, lengths, counts, b, t, L, eps, latents_b, latents_l, scales_b,
    R: tl.constexpr, P: tl.constexpr, R_PAD: tl.constexpr, P_PAD: tl.constexpr,
    SCALED: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Place row t of sequence b, to which ``row`` points; ``by``: the norm's weight [R_PAD]."""
    slot = tl.load(lengths + b) + t
    fits = slot < L
    if COUNTS:
        fits = fits & (t < tl.load(counts + b))
    r, p = tl.arange(0, R_PAD), tl.arange(0, P_PAD)
    raw = tl.load(row + r, mask=r < R, other=0.0)
    c = raw.to(tl.float32)
    c = c * tl.rsqrt(tl.sum(c * c, axis=0) / R + eps)
    c = c.to(raw.dtype).to(tl.float32) * by.to(tl.float32)
    c = c.to(raw.dtype).to(tl.float32)
    k = tl.load(row + R + p, mask=p < P, other=0.0).to(tl.float32)
    if SCALED:
        most = tl.maximum(tl.max(tl.abs(c), axis=0), tl.max(tl.abs(k), axis=0))
        scale = tl.where(most > 0.0, most / 448.0, 1.0)
        tl.store(scales + b * scales_b + slot, scale, mask=fits)
        c = c / scale
        k = k / scale
    at = latents + b * latents_b + slot * latents_l
    tl.store(at + r, c.to(latents.dtype.element_ty), mask=fits & (r < R))
    tl.store(at + R + p, k.to(latents.dtype.element_ty), mask=fits & (p < P))


@triton.jit
def _write_kernel(
    rows, latents, scales, norm, lengths, counts, T, L, eps, rows_b, rows_t, latents_b, latents_l,
    scales_b, R: tl.constexpr, P: tl.constexpr, R_PAD: tl.constexpr, P_PAD: tl.constexpr,
    SCALED: tl.constexpr, COUNTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    by = norm_weight(norm, R, R_PAD)
    wait(EARLY)
    pid = tl.program_id(0).to(tl.int64)
    b, t = pid // T, pid % T
    write_row(
        rows + b * rows_b + t * rows_t, latents, scales, by, lengths, counts, b, t, L, eps,
        latents_b, latents_l, scales_b, R, P, R_PAD, P_PAD, SCALED, COUNTS,
    )  # fmt: skip


def per_sequence(lengths: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both as kernels read them, one number after the other; absent counts are not read."""
    lengths = lengths.contiguous()
    return lengths, lengths if counts is None else counts.contiguous()


def has_float8(device: torch.device) -> bool:
    """Whether kernels read and write float8_e4m3fn there."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


def refuses(
    latents: Tensor,
    rows: Tensor,
    norm: Tensor,
    eps: float,
    lengths: Tensor,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> str | None:
    """Why the kernel does not take these, or None."""
    fp8 = latents.dtype == torch.float8_e4m3fn
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"rows are {rows.dtype}"
    if fp8 != (scales is not None):
        return "float8 latents come with scales, and others without"
    if not fp8 and latents.dtype != rows.dtype:
        return f"latents are {latents.dtype}, rows {rows.dtype}"
    if fp8 and not has_float8(rows.device):
        return "this device has no float8 e4m3"
    if any(x.stride(-1) != 1 for x in (rows, latents, norm, scales) if x is not None):
        return "the last dimension is not contiguous"
    if rows.shape[2] <= len(norm):
        return "there is no shared key"
    if torch.is_grad_enabled() and (rows.requires_grad or latents.requires_grad):
        return "there is no backward"
    return None


def latent_write(
    latents: Tensor,
    rows: Tensor,
    norm: Tensor,
    eps: float,
    lengths: Tensor,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """See ``dspark_kernels.latent_write.latent_write``."""
    B, T, width = rows.shape
    rank = len(norm)
    _write_kernel[(B * T,)](
        rows, latents, norm if scales is None else scales, norm, *per_sequence(lengths, counts),
        T, latents.shape[1], eps,
        rows.stride(0), rows.stride(1), latents.stride(0), latents.stride(1),
        0 if scales is None else scales.stride(0),
        R=rank, P=width - rank, R_PAD=triton.next_power_of_2(rank),
        P_PAD=triton.next_power_of_2(width - rank), SCALED=scales is not None,
        COUNTS=counts is not None, num_warps=2, **early(),
    )  # fmt: skip
