"""What an MLA layer does with its new rows before it attends: norm and place latents, absorb W_k.

    latents[n + t] = [RMSNorm(c_t) | k_p,t]                          latent_write
    q_t,h = [q_n,t,h W_k,h | q_p,t,h] * scale                        mla_absorb does both

n is a device tensor: nothing in a captured graph freezes where rows go. The two halves of
``mla_absorb`` do not depend on each other, so one launch does both.

float8 latents hold x / s with s = max |x| / 448 over the whole slot, stored beside them (see
``dspark_kernels.mla_decode``).

Letters: B batch, T new rows, H heads, L slots, R rank, p width of the shared key, n nope width.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


def latent_write(
    latents: Tensor,
    rows: Tensor,
    norm: Tensor,
    eps: float,
    lengths: Tensor,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Norms the new rows' c and puts [c | k_p] behind the committed slots, in place.

    Args:
        latents: [B, L, R + p], written at slots n .. n+T-1; what would lie behind L is dropped.
        rows: [B, T, R + p], as projected; any strides with the last 1.
        norm: [R] weight of the norm, eps inside its root.
        lengths: [B] int64, n.
        scales: [B, L] float32, written too where the latents are float8_e4m3fn.
        counts: [B] int64, real rows; the others are not written. None: all.
    """
    values = _normed(rows, norm, eps)
    own = torch.arange(rows.shape[1], device=rows.device)
    real = lengths.unsqueeze(1) + own < latents.shape[1]
    if counts is not None:
        real &= own < counts.unsqueeze(1)
    if scales is None:
        _put(latents, values, lengths, real)
        return
    numbers, scale = quantised(values)
    _put(latents.view(torch.uint8), numbers.view(torch.uint8), lengths, real)
    _put(scales.unsqueeze(-1), scale.unsqueeze(-1), lengths, real)


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [..., X] and float32 scale [...] with values = scale * float8 up to rounding.

    A slot of zeros has scale 1.
    """
    most = values.abs().amax(-1).float()
    scale = torch.where(most > 0, most / FP8_MAX, 1.0)
    return (values.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


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
    """Queries in the latent space [B, T, H, R + p]; writes the latents as ``latent_write`` does.

    Args:
        q: [B, T, H, n + p] as projected; any strides with the last 1.
        w_k: [H, n, R], such as rows ..n of ``kv_b_proj`` by head; any strides with the last 1.
        scale: (n + p)^-1/2.
        The others: see ``latent_write``.
    """
    latent_write(latents, rows, norm, eps, lengths, scales, counts)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_n, q_p = q.to(wide).split((w_k.shape[1], q.shape[-1] - w_k.shape[1]), dim=-1)
    absorbed = torch.einsum("bthn,hnr->bthr", q_n, w_k.to(wide))
    return (torch.cat((absorbed, q_p), dim=-1) * scale).to(q.dtype)


def _normed(rows: Tensor, norm: Tensor, eps: float) -> Tensor:
    c, k_p = rows.split((len(norm), rows.shape[-1] - len(norm)), dim=-1)
    wide = torch.promote_types(c.dtype, torch.float32)
    c = c.to(wide)
    c = (c * (c.square().mean(-1, keepdim=True) + eps).rsqrt()).to(rows.dtype) * norm
    return torch.cat((c.to(rows.dtype), k_p), dim=-1)


def _put(buffer: Tensor, values: Tensor, lengths: Tensor, real: Tensor) -> None:
    """buffer[b, n_b + t] = values[b, t] where real.

    A row behind the buffer's end goes to its last slot, with what that slot gets anyway.
    """
    own = torch.arange(values.shape[1], device=values.device)
    slots = (lengths.unsqueeze(1) + own).clamp(max=buffer.shape[1] - 1)
    source = (slots - lengths.unsqueeze(1)).clamp(min=0)
    slots, rows = (x.unsqueeze(-1).expand_as(values) for x in (slots, source))
    new = values.gather(1, rows).to(buffer.dtype)
    kept = real.gather(1, source).unsqueeze(-1)
    buffer.scatter_(1, slots, torch.where(kept, new, buffer.gather(1, slots)))


def cost(rows: int, heads: int, rank: int, shared: int, nope: int) -> tuple[int, int]:
    """Bytes and operations of ``mla_absorb`` on one sequence, 16 bits a number: W_k once."""
    width = rank + shared
    moved = heads * nope * rank + rows * (2 * width + heads * (nope + shared + width)) + rank
    return 2 * moved, 2 * rows * heads * nope * rank
