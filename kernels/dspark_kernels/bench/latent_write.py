"""New latents at K3's widths, alone and with the absorbed queries; the peer is torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dspark_kernels import latent_write
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.latent_write_triton import latent_write as write
from dspark_kernels.mla_absorb_triton import mla_absorb as kernel

RANK, SHARED, NOPE, VALUE, EPS = 512, 64, 128, 128, 1e-6


def _make(rows: int, heads: int, ours: bool) -> Thunk:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    q, new = random(1, rows, heads, NOPE + SHARED), random(1, rows, RANK + SHARED)
    both, latents, norm = (
        random(heads, NOPE + VALUE, RANK),
        random(1, 64, RANK + SHARED),
        random(RANK),
    )
    lengths = torch.full((1,), 20, device="cuda")
    w_k, scale = both[:, :NOPE], (NOPE + SHARED) ** -0.5
    if ours:
        return partial(kernel, q, new, w_k, scale, latents, norm, EPS, lengths)
    index = (lengths.unsqueeze(1) + torch.arange(rows, device="cuda")).unsqueeze(-1)

    def absorb() -> torch.Tensor:
        c = torch.nn.functional.rms_norm(new[..., :RANK], (RANK,), norm, EPS)
        latents.scatter_(1, index.expand_as(new), torch.cat((c, new[..., RANK:]), dim=-1))
        q_n, q_p = q[0].split((NOPE, SHARED), dim=-1)
        absorbed = torch.matmul(q_n.transpose(0, 1), w_k).transpose(0, 1)
        return torch.cat((absorbed, q_p), dim=-1) * scale

    return absorb


def _write(batch: int, rows: int, ours: bool) -> Thunk:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    lengths = torch.full((batch,), 20, device="cuda")
    new, norm = random(batch, rows, RANK + SHARED), random(RANK)
    call = write if ours else latent_write.latent_write
    return partial(call, random(batch, 64, RANK + SHARED), new, norm, EPS, lengths)


def cases() -> Iterator[Case]:
    for batch, rows in ((1, 8), (64, 8)):
        yield Case(
            f"write, {batch} x {rows} rows",
            2 * (2 * batch * rows * (RANK + SHARED) + RANK),
            0,
            partial(_write, batch, rows, True),
            partial(_write, batch, rows, False),
            "torch",
        )
    for rows, heads in ((1, 32), (8, 32), (1, 96), (8, 96)):
        nbytes, flops = latent_write.cost(rows, heads, RANK, SHARED, NOPE)
        yield Case(
            f"absorb and write, {rows} rows, {heads} heads",
            nbytes,
            flops,
            partial(_make, rows, heads, True),
            partial(_make, rows, heads, False),
            "torch",
        )
