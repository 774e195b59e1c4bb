"""What heads and channels of a layer contribute on given text, and refitting what is left of it.

Letters: n tokens, D hidden, H heads, K head dim, F MLP width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.distill.observe import LayerView
from dspark.draft.kda import DraftKDA, block_heads

RIDGE = 1e-3
"""Of refits, as a share of the mean square of what is regressed on."""


def key_energy(mixer: DraftKDA, seen: LayerView) -> Tensor:
    """Mean square of a channel's share of q.k, for independent q and k: [H, K]."""
    before = mixer.shape.conv_size - 1
    total: Tensor | None = None
    for read in seen.reads:
        x = F.rms_norm(read, read.shape[-1:], None, mixer.o_norm.eps)
        rows = torch.cat((mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)), -1)
        rows = F.pad(rows, (0, 0, before, 0))
        q, k, _ = block_heads(rows, mixer.conv_taps(), mixer.heads)
        energy = q.square().sum(0) * k.square().mean(0)
        total = energy if total is None else total + energy
    assert total is not None
    return total


def head_energy(mixer: DraftKDA, mix: Tensor) -> Tensor:
    """Mean square of what each head adds to the residual stream, [H]."""
    by_head = mix.unflatten(-1, (mixer.heads, -1)).transpose(0, 1)  # [H, n, K]
    weight = mixer.o_proj.weight.unflatten(1, (mixer.heads, -1)).permute(1, 2, 0)  # [H, K, D]
    return torch.stack([(m @ w).square().mean() for m, w in zip(by_head, weight, strict=True)])


def channel_energy(hidden: Tensor, down: Tensor) -> Tensor:
    """Mean square of what each MLP channel adds: hidden [n, F], down [D, F] -> [F]."""
    return hidden.square().mean(0) * down.square().sum(0)


def refit(weight: Tensor, rows: Tensor, wanted: Tensor) -> None:
    """weight [D, F] such that rows [n, F] weight^T is near wanted [n, D]."""
    weight.copy_(ridge(rows, wanted, RIDGE).t())


def ridge(rows: Tensor, wanted: Tensor, strength: float) -> Tensor:
    """Least squares with a penalty: rows [n, F], wanted [n, D] -> [F, D]."""
    rows, wanted = rows.double(), wanted.double()
    gram = rows.t() @ rows
    penalty = strength * gram.diagonal().mean().clamp_min(1e-12)
    gram.diagonal().add_(penalty)
    return torch.linalg.solve(gram, rows.t() @ wanted).to(torch.float32)
