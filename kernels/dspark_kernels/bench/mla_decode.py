"""Latent attention at K3's widths; the peer is two matrix products and a softmax in torch.

Other peers of the same case are in ``kernels/docs/mla_decode.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dspark_kernels import mla_decode
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.mla_decode_triton import mla_decode as kernel
from dspark_kernels.mla_output_triton import mla_output as output_kernel

RANK, SHARED, VALUE = 512, 64, 128
SIZES = [  # sequences, rows, heads, slots, bits
    (1, 1, 32, 512, 16),
    (1, 1, 32, 8192, 16),
    (1, 8, 32, 8192, 16),
    (1, 1, 96, 8192, 16),
    (1, 8, 96, 8192, 16),
    (64, 1, 32, 8192, 16),
    (16, 8, 32, 8192, 16),
    (1, 1, 32, 8192, 8),
    (1, 1, 32, 2**20, 16),
    (1, 1, 32, 2**20, 8),
    (1, 1, 96, 2**20, 16),
    (1, 8, 32, 2**20, 16),
    (1, 8, 96, 2**20, 16),
]


def inputs(
    batch: int, rows: int, heads: int, slots: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Queries, latents, lengths and scales on the GPU."""
    width = RANK + SHARED
    q = torch.randn(batch, rows, heads, width, dtype=torch.bfloat16, device="cuda") * width**-0.5
    latents = torch.empty(batch, slots, width, dtype=torch.bfloat16, device="cuda").normal_()
    lengths = torch.full((batch,), slots - rows, device="cuda")
    if bits == 16:
        return q, latents, lengths, None
    scales = torch.full((batch, slots), 2.0**-6, device="cuda")
    return q, (latents * 2**6).to(torch.float8_e4m3fn), lengths, scales


def _ours(batch: int, rows: int, heads: int, slots: int, bits: int) -> Thunk:
    q, latents, lengths, scales = inputs(batch, rows, heads, slots, bits)
    return partial(kernel, q, latents, lengths, RANK, None, scales)


def _torch(batch: int, rows: int, heads: int, slots: int, bits: int) -> Thunk:
    q, latents, lengths, _ = inputs(batch, rows, heads, slots, 16)
    place = torch.arange(slots, device="cuda") - lengths.unsqueeze(1)
    own = torch.arange(rows, device="cuda").unsqueeze(-1)
    hidden = (place.unsqueeze(1) > own).repeat_interleave(heads, dim=1)

    def attend() -> torch.Tensor:
        scores = torch.matmul(q.flatten(1, 2), latents.transpose(1, 2))
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, latents[..., :RANK])

    return attend


def _ours_output(rows: int, heads: int, slots: int) -> Thunk:
    q, latents, lengths, _ = inputs(1, rows, heads, slots, 16)
    w_v = torch.randn(heads, VALUE, RANK, dtype=torch.bfloat16, device="cuda") * RANK**-0.5
    gate = torch.randn(1, rows, heads * VALUE, dtype=torch.bfloat16, device="cuda")
    return partial(output_kernel, q, latents, lengths, RANK, w_v, gate)


def _unfused_output(rows: int, heads: int, slots: int) -> Thunk:
    """Our attention, then torch's batched product and gate."""
    q, latents, lengths, _ = inputs(1, rows, heads, slots, 16)
    w_v = torch.randn(heads, VALUE, RANK, dtype=torch.bfloat16, device="cuda") * RANK**-0.5
    gate = torch.randn(1, rows, heads * VALUE, dtype=torch.bfloat16, device="cuda")

    def attend() -> torch.Tensor:
        mixed = kernel(q, latents, lengths, RANK)[0].transpose(0, 1)
        out = torch.matmul(mixed, w_v.transpose(1, 2)).transpose(0, 1).reshape(1, rows, -1)
        return out * gate.sigmoid()

    return attend


def cases() -> Iterator[Case]:
    for size in SIZES:
        batch, rows, heads, slots, bits = size
        nbytes, flops = mla_decode.cost(rows, heads, slots, RANK, SHARED, bits)
        name = f"{batch} x {rows} rows, {heads} heads, {slots} slots, {bits} bit"
        fits = batch * rows * heads * slots <= 2**29
        peer = partial(_torch, *size) if fits else None
        yield Case(
            name,
            batch * nbytes,
            batch * flops,
            partial(_ours, *size),
            peer,
            "torch, absorbed",
        )
    for rows, heads in ((1, 32), (8, 32), (1, 96), (8, 96)):
        nbytes, flops = mla_decode.cost(rows, heads, 8192, RANK, SHARED, 16)
        nbytes += 2 * heads * VALUE * RANK
        yield Case(
            f"with W_v and gate, {rows} rows, {heads} heads, 8192",
            nbytes,
            flops + 2 * rows * heads * VALUE * RANK,
            partial(_ours_output, rows, heads, 8192),
            partial(_unfused_output, rows, heads, 8192),
            "mla_decode, then torch",
        )
