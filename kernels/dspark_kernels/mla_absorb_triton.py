"""Absorbed queries and new latents in one launch: first programs place rows, others multiply.

A multiplying program keeps BLOCK_R columns of one head's W_k and takes all rows of all sequences
through them, 16 at a time, so that W_k is read once whatever their number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.latent_write_triton import norm_weight, per_sequence, write_row
from dspark_kernels.latent_write_triton import refuses as refuses_write
from dspark_kernels.mla_decode_triton import precision
from dspark_kernels.overlap import begin, early, wait

allow_loops()
exact_floats()

MOST_ROWS = 256
"""Rows of all sequences beyond which a matrix product per head is the better form."""


@triton.jit
def _product(
    q, w_k, out, h, block, scale, n_rows, q_b, q_t, q_h, w_h, w_n,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, P_PAD: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    n, p = tl.arange(0, N_PAD), tl.arange(0, P_PAD)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    weights = tl.load(
        w_k + h * w_h + n[:, None] * w_n + r[None, :],
        mask=(n < N)[:, None] & (r < R)[None, :],
        other=0.0,
    )
    wait(EARLY)  # W_k is on its way while the projections still run
    for start in range(0, n_rows, 16):
        i = start + tl.arange(0, 16)
        real = i < n_rows
        at = q + (i // T).to(tl.int64) * q_b + (i % T) * q_t + h * q_h
        to = out + (i.to(tl.int64) * H + h) * (R + P)
        x = tl.load(at[:, None] + n[None, :], mask=real[:, None] & (n < N)[None, :], other=0.0)
        y = tl.dot(x, weights, input_precision=PRECISION) * scale
        tl.store(
            to[:, None] + r[None, :],
            y.to(out.dtype.element_ty),
            mask=real[:, None] & (r < R)[None, :],
        )
        if block == 0:
            mask = real[:, None] & (p < P)[None, :]
            shared = tl.load(at[:, None] + N + p[None, :], mask=mask, other=0.0).to(tl.float32)
            shared = (shared * scale).to(out.dtype.element_ty)
            tl.store(to[:, None] + R + p[None, :], shared, mask=mask)


@triton.jit
def _absorb_kernel(
    q, rows, w_k, out, latents, scales, norm, lengths, counts, scale, eps, n_rows, L,
    q_b, q_t, q_h, rows_b, rows_t, w_h, w_n, latents_b, latents_l, scales_b,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr, BLOCK_R: tl.constexpr,
    SCALED: tl.constexpr, COUNTS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    pid = tl.program_id(0)
    if pid < n_rows:
        by = norm_weight(norm, R, R_PAD)
        wait(EARLY)
        b, t = (pid // T).to(tl.int64), pid % T
        write_row(
            rows + b * rows_b + t * rows_t, latents, scales, by, lengths, counts, b, t, L, eps,
            latents_b, latents_l, scales_b, R, P, R_PAD, P_PAD, SCALED, COUNTS,
        )  # fmt: skip
    else:
        BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
        h, block = (pid - n_rows) // BLOCKS, (pid - n_rows) % BLOCKS
        _product(
            q, w_k, out, h.to(tl.int64), block, scale, n_rows, q_b, q_t, q_h, w_h, w_n,
            T, H, N, N_PAD, R, P, P_PAD, BLOCK_R, PRECISION, EARLY,
        )  # fmt: skip


def refuses(
    q: Tensor,
    rows: Tensor,
    w_k: Tensor,
    scale: float,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    lengths: Tensor,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> str | None:
    """Why the kernel does not take these, or None."""
    if q.dtype != w_k.dtype or q.dtype != rows.dtype:
        return f"queries are {q.dtype}, W_k {w_k.dtype}, rows {rows.dtype}"
    if q.stride(-1) != 1 or w_k.stride(-1) != 1:
        return "the last dimension is not contiguous"
    if q.shape[0] * q.shape[1] > MOST_ROWS:
        return f"{q.shape[0] * q.shape[1]} rows; at most {MOST_ROWS}"
    if torch.is_grad_enabled() and (q.requires_grad or w_k.requires_grad):
        return "there is no backward"
    return refuses_write(latents, rows, norm, eps, lengths, scales, counts)


def mla_absorb(
    q: Tensor,
    rows: Tensor,
    w_k: Tensor,
    scale: float,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    lengths: Tensor,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """See ``dspark_kernels.latent_write.mla_absorb``."""
    return absorb(q, rows, w_k, scale, latents, norm, eps, lengths, scales, counts, 128, 4)


def absorb(
    q: Tensor,
    rows: Tensor,
    w_k: Tensor,
    scale: float,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    lengths: Tensor,
    scales: Tensor | None,
    counts: Tensor | None,
    block_r: int,
    warps: int,
) -> Tensor:
    """``mla_absorb`` with a given tile."""
    B, T, H, _ = q.shape
    _, nope, rank = w_k.shape
    shared = q.shape[-1] - nope
    out = torch.empty(B, T, H, rank + shared, dtype=q.dtype, device=q.device)
    block_r = min(block_r, max(16, triton.next_power_of_2(rank)))
    _absorb_kernel[(B * T + H * -(-rank // block_r),)](
        q, rows, w_k, out, latents, norm if scales is None else scales, norm,
        *per_sequence(lengths, counts), scale, eps, B * T, latents.shape[1],
        q.stride(0), q.stride(1), q.stride(2), rows.stride(0), rows.stride(1),
        w_k.stride(0), w_k.stride(1), latents.stride(0), latents.stride(1),
        0 if scales is None else scales.stride(0),
        T=T, H=H, N=nope, N_PAD=max(16, triton.next_power_of_2(nope)), R=rank,
        R_PAD=triton.next_power_of_2(rank), P=shared, P_PAD=triton.next_power_of_2(shared),
        BLOCK_R=block_r, SCALED=scales is not None, COUNTS=counts is not None,
        PRECISION=precision(q.dtype), num_warps=warps, **early(),
    )  # fmt: skip
    return out
