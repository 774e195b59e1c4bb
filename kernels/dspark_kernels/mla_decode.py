"""Absorbed latent attention of a few new rows over a long cache: every latent is read once.

With the latents [c | k_p] of a text, queries already taken into the latent space and scaled, and
new row t of a block whose own latents stand at slots n .. n+T-1 behind n committed ones:

    s = q [c | k_p]^T over the slots before n, and those after it that row t may see
    out = softmax(s) c                                      mla_decode
    y = (W_v,h out) * sigmoid(gate)                         mla_output

All heads share one latent, so T rows of H heads are T H queries of one key head. Row t of a chain
sees the new slots up to its own; in a tree, its ancestors and itself. What stands behind the last
new row is never used, whatever it holds.

Latents may be float8 e4m3 with one float32 scale per slot: value = scale * number. One per slot,
because the shared key has no norm that would bound it, and no calibration is needed; one for c and
k_p together, because e4m3 is a float: it keeps its three bits over 15 binades below the largest.

Letters: B batch, T new rows, H heads, L slots, R rank, p width of the shared key, X = R + p, v
width of a head's value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mla_decode(
    q: Tensor,
    latents: Tensor,
    lengths: Tensor,
    rank: int,
    upto: Tensor | None = None,
    scales: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """softmax(q latents^T) c for the new rows of every sequence.

    Args:
        q: [B, T, H, X] absorbed queries, scaled by (n + p)^-1/2.
        latents: [B, L, X]; the new rows' own are in place. float8_e4m3fn needs ``scales``.
        lengths: [B] int64, committed slots: where the new rows begin. n + T <= L.
        rank: R; c is ``latents[..., :R]``.
        upto: [B or 1, T, T] bool: of a tree, ancestors or self. None: a chain.
        scales: [B, L] float32.
        counts: [B] int64, how many of the T new rows are real; slots of the others are not used and
            what they return means nothing (but is finite, 0 where there is nothing to see).
            None: all.

    Returns:
        [B, T, H, R] in the dtype of ``q``, computed in float32 (float64 for float64).
    """
    seen = readable(lengths, latents.shape[1], q.shape[1], upto, counts)
    wide = torch.promote_types(q.dtype, torch.float32)
    used = seen.any(1).unsqueeze(-1)
    values = latents.to(wide) if scales is None else latents.to(wide) * scales.to(wide)[..., None]
    values = values.where(used, 0.0)
    scores = torch.einsum("bthx,blx->bthl", q.to(wide), values)
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    weights = scores.softmax(dim=-1).where(seen.any(-1)[:, :, None, None], 0.0)
    return torch.einsum("bthl,blr->bthr", weights, values[..., :rank]).to(q.dtype)


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
    """``mla_decode``, every head's values and the output gate: what enters the output projection.

    Args:
        w_v: [H, v, R], such as rows n.. of ``kv_b_proj`` by head; any strides with the last 1.
        gate: [B, T, H v] before its sigmoid, or None.
        The others: see ``mla_decode``.

    Returns:
        [B, T, H v] in the dtype of ``q``.
    """
    mixed = mla_decode(q, latents, lengths, rank, upto, scales, counts)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.einsum("bthr,hvr->bthv", mixed.to(wide), w_v.to(wide)).flatten(2)
    if gate is not None:
        out = out * gate.to(wide).sigmoid()
    return out.to(q.dtype)


def readable(
    lengths: Tensor, slots: int, rows: int, upto: Tensor | None, counts: Tensor | None
) -> Tensor:
    """[B, T, L] bool: the slots that each new row may see."""
    place = torch.arange(slots, device=lengths.device) - lengths.unsqueeze(1)
    if upto is None:
        own = torch.arange(rows, device=lengths.device)
        seen = place.unsqueeze(1) <= own.unsqueeze(-1)
    else:
        inside = ((place >= 0) & (place < rows)).unsqueeze(1)
        index = place.clamp(0, rows - 1).unsqueeze(1).expand(-1, rows, -1)
        seen = (place < 0).unsqueeze(1) | (
            inside & upto.expand(len(lengths), -1, -1).gather(2, index)
        )
    if counts is not None:
        seen = seen & (place < counts.unsqueeze(1)).unsqueeze(1)
    return seen


def cost(rows: int, heads: int, slots: int, rank: int, shared: int, bits: int) -> tuple[int, int]:
    """Bytes and operations of one sequence: latents once, queries and outputs in 16 bits.

    Args:
        rows: T. slots: latents that are seen. bits: 16, or 8 with a scale per slot.
    """
    width = rank + shared
    latents = slots * (width * bits // 8 + (4 if bits == 8 else 0))
    return latents + 2 * rows * heads * (width + rank), 2 * rows * heads * slots * (width + rank)
