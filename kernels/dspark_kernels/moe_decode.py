"""A mixture of experts over a step's rows: every distinct expert that a row chose is read once.

    x = norm(x);  s = sigmoid(x W_r) in float32;  choose the top k of s + bias
    w = s / (sum s + 1e-20) * scaling of the chosen
    z = x W_down;  y = sum_j w_j W2_j act(W1_j z, W3_j z);  routed = norm(y) W_up
    out = routed + act(x W_sg, x W_su) W_sd + residual

W_down, the norm of y and W_up exist where the experts work in a latent space (Kimi K3); without one
(Kimi-Linear) z = x and routed = y. Experts are in the model's dtype or MXFP4.

What the rows' own choice costs nothing for is packed into one matrix, ``inputs`` = [W_r; W_down;
W_sg; W_su], and what follows the experts into ``outputs`` = [W_up, W_sd]: one pass each.

Letters: n rows, D hidden, E experts, k of them per row, I width inside an expert, L its width
outside (D without a latent space), S width of the shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.linear_rows import Situ, activate, normed, wider
from dspark_kernels.mxfp4 import GROUP, dequantise

GATHERED = 16
"""Rows whose experts are gathered at once: each row has a copy of its own."""


@dataclass(frozen=True)
class Experts:
    """Stacked routed experts: w1 gate and w3 up [E, I, L], w2 down [E, L, I].

    MXFP4: uint8 with the last dimension halved, and ``scales`` of w1, w3, w2 with it divided by 32.
    """

    w1: Tensor
    w3: Tensor
    w2: Tensor
    scales: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def width(self) -> int:
        """L."""
        return self.w2.shape[1]

    @property
    def inner(self) -> int:
        """I."""
        return self.w1.shape[1]

    @property
    def packed(self) -> bool:
        """Whether they are MXFP4."""
        return self.scales is not None

    @property
    def count(self) -> int:
        """E."""
        return self.w1.shape[0]


@dataclass(frozen=True)
class MoE:
    """Weights and settings of one layer; ``pack`` makes it.

    Attributes:
        inputs: [E + L + 2 S, D] with a latent space, [E + 2 S, D] without.
        bias: [E] float32, of the choice only.
        experts: The routed experts.
        outputs: [D, L + S] with a latent space, [D, S] without; None: neither.
        norm: [L] of the routed sum; None: no norm.
        norm_eps: Of that norm.
        top_k: k.
        renormalise: Whether the chosen scores are divided by their sum.
        scaling: Factor of the weights.
        latent: Whether there is a latent space.
        situ: Betas of SiTU; None: SiLU.
    """

    inputs: Tensor
    bias: Tensor
    experts: Experts
    outputs: Tensor | None
    norm: Tensor | None
    norm_eps: float
    top_k: int
    renormalise: bool
    scaling: float
    latent: bool
    situ: Situ

    @property
    def shared(self) -> int:
        """S; 0: no shared expert."""
        latent = self.experts.width if self.latent else 0
        return (self.inputs.shape[0] - self.experts.count - latent) // 2


def pack(
    router: Tensor,
    bias: Tensor,
    experts: Experts,
    *,
    down: Tensor | None,
    up: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    norm: Tensor | None,
    norm_eps: float,
    top_k: int,
    renormalise: bool,
    scaling: float,
    situ: Situ,
) -> MoE:
    """Copies the small matrices of a layer into the two packed ones; experts stay where they are.

    Args:
        router: [E, D].
        bias: [E].
        experts: The routed experts.
        down, up: [L, D] and [D, L] of the latent space, or None both.
        shared_gate_up, shared_down: [2 S, D] and [D, S] of the shared expert, or None both.
        norm, norm_eps, top_k, renormalise, scaling, situ: As in `MoE`.
    """
    inputs = torch.cat([w for w in (router, down, shared_gate_up) if w is not None])
    after = [w for w in (up, shared_down) if w is not None]
    outputs = torch.cat(after, dim=1) if after else None
    latent = down is not None
    return MoE(
        inputs, bias, experts, outputs, norm, norm_eps, top_k, renormalise, scaling, latent, situ
    )


def moe_decode(
    x: Tensor,
    moe: MoE,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer.

    Args:
        x: [n, D].
        moe: Weights in x's dtype; experts may be MXFP4.
        norm: [D] before everything; None: x comes normed.
        eps: Of that norm.
        residual: [n, D] added at the end; never written.

    Returns:
        [n, D] in x's dtype, and the chosen experts [n, k] int32, best first.
    """
    E, L, S = moe.experts.count, moe.experts.width, moe.shared
    h = normed(x, norm, eps)
    wide = wider(x.dtype)
    weights, chosen = _route(F.linear(h.to(wide), moe.inputs[:E].to(wide)), moe)
    z = F.linear(h, moe.inputs[E : E + L]) if moe.latent else h
    some = zip(z.split(GATHERED), chosen.split(GATHERED), strict=True)
    y = torch.cat([_experts(rows, by, moe) for rows, by in some])
    y = (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)
    parts = [normed(y, moe.norm, moe.norm_eps)]
    if S:
        gate, up = F.linear(h, moe.inputs[-2 * S :]).chunk(2, dim=-1)
        parts.append(activate(gate, up, moe.situ).to(x.dtype))
    if moe.latent and moe.outputs is not None:
        out = F.linear(torch.cat(parts, dim=-1), moe.outputs)
    else:
        out = parts[0] if moe.outputs is None else parts[0] + F.linear(parts[1], moe.outputs)
    return (out if residual is None else out + residual), chosen.to(torch.int32)


def _route(logits: Tensor, moe: MoE) -> tuple[Tensor, Tensor]:
    """Logits [n, E] in float32 or wider -> weights and ids [n, k]."""
    scores = logits.sigmoid()
    chosen = (scores + moe.bias).topk(moe.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if moe.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling, chosen


def _experts(z: Tensor, chosen: Tensor, moe: MoE) -> Tensor:
    """z [n, L] through each row's own k experts: [n, k, L] in float32 or wider."""
    w1, w3, w2 = (
        _chosen(weight, None if moe.experts.scales is None else moe.experts.scales[i], chosen, z)
        for i, weight in enumerate((moe.experts.w1, moe.experts.w3, moe.experts.w2))
    )
    hidden = activate(_product(w1, z[:, None]), _product(w3, z[:, None]), moe.situ).to(z.dtype)
    return _product(w2, hidden)


def _chosen(weight: Tensor, scale: Tensor | None, chosen: Tensor, like: Tensor) -> Tensor:
    """[n, k, out, in] of the chosen experts."""
    if scale is None:
        return weight[chosen]
    return dequantise(weight[chosen], scale[chosen], like.dtype)


def _product(weight: Tensor, x: Tensor) -> Tensor:
    """[n, k, out, in] by [n, k or 1, in]: a matrix by a vector each, in float32 or wider."""
    wide = wider(x.dtype)
    return torch.matmul(weight.to(wide), x.to(wide).unsqueeze(-1)).squeeze(-1)


def moved_bytes(n: int, distinct: int, moe: MoE) -> int:
    """Bytes of one call that reads so many distinct experts; intermediates are left out."""
    each = 3 * moe.experts.inner * moe.experts.width
    size = moe.inputs.element_size()
    expert = each // 2 + each // GROUP if moe.experts.packed else each * size
    dense = moe.inputs.numel() + (0 if moe.outputs is None else moe.outputs.numel())
    return distinct * expert + size * dense + 2 * n * size * moe.inputs.shape[1]


def flops(n: int, moe: MoE) -> int:
    """A multiply and an add count as two; only the experts that a row chose."""
    dense = moe.inputs.numel() + (0 if moe.outputs is None else moe.outputs.numel())
    return 2 * n * (dense + moe.top_k * 3 * moe.experts.inner * moe.experts.width)
