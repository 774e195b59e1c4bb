"""Causal attention over cached latents in tiles: memory that grows neither with rows nor slots.

For a tile of rows, over tiles of slots, with running maximum m, mass l and sum a (float32):

    s = q latents^T;  m' = max(m, max s);  p = exp(s - m');  l = l e^(m-m') + sum p
    a = a e^(m-m') + p c;  out = a / l

It is the same softmax as in one piece (Milakov and Gimelshein 2018). Row t of a block that follows
n committed tokens reads the slots 0..n+t, so a tile of slots behind the last row is never touched.

Letters: B batch, H heads, T rows, L slots, X width of a slot, R its first part, c.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS = 256
TILE_SLOTS = 512


def attend(q_BHTX: Tensor, latents_BLX: Tensor, rank: int, lengths: Tensor) -> Tensor:
    """softmax(q latents^T) c for rows that follow `lengths` [B] committed tokens.

    Args:
        q_BHTX: queries in latent space, scaled.
        latents_BLX: slots up to and including every row's own.
        rank: R; c is `latents_BLX[..., :R]`.

    Returns:
        [B, H, T, R] in the dtype of the queries.
    """
    B, H, T, _ = q_BHTX.shape
    out = torch.empty(B, H, T, rank, dtype=q_BHTX.dtype, device=q_BHTX.device)
    behind = latents_BLX.shape[1] - T  # the longest row's length: where its block begins
    for start in range(0, T, TILE_ROWS):
        stop = min(T, start + TILE_ROWS)
        own = lengths.unsqueeze(1) + torch.arange(start, stop, device=q_BHTX.device)
        seen = latents_BLX[:, : behind + stop]
        out[:, :, start:stop] = _rows(q_BHTX[:, :, start:stop], seen, rank, own)
    return out


def _rows(q: Tensor, latents_BLX: Tensor, rank: int, own_BT: Tensor) -> Tensor:
    """One tile of rows; row t reads the slots up to `own_BT`."""
    B, H, T, X = q.shape
    flat = q.reshape(B, H * T, X)
    best = torch.full((B, H, T, 1), -torch.inf, dtype=torch.float32, device=q.device)
    mass = torch.zeros_like(best)
    total = torch.zeros(B, H, T, rank, dtype=torch.float32, device=q.device)
    for start in range(0, latents_BLX.shape[1], TILE_SLOTS):
        tile = latents_BLX[:, start : start + TILE_SLOTS]
        slots = torch.arange(start, start + tile.shape[1], device=q.device)
        hidden = (slots > own_BT.unsqueeze(-1)).unsqueeze(1)
        scores = torch.matmul(flat, tile.transpose(1, 2)).view(B, H, T, -1).float()
        scores.masked_fill_(hidden, -torch.inf)
        higher = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
        shrink = (best - higher).exp()
        weights = scores.sub_(higher).exp_()
        mass = mass * shrink + weights.sum(dim=-1, keepdim=True)
        read = torch.matmul(weights.to(q.dtype).view(B, H * T, -1), tile[..., :rank])
        total = total.mul_(shrink).add_(read.view(B, H, T, rank))
        best = higher
    return (total / mass).to(q.dtype)
