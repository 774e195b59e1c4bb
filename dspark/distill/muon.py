"""Muon: momentum whose matrix is replaced by its nearest orthogonal one before it is applied.

    B <- mu B + (1 - mu) G        U = (1 - mu) G + mu B  (Nesterov)        O = polar(U)
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(rows, columns)) O

All directions of a matrix then move by like amounts; the factor gives a step the size (root mean
square) of AdamW's, so that both take the same rate. O comes from five Newton-Schulz steps, which
bring every singular value to between about 0.7 and 1.2 and are matrix products alone: in bfloat16
on a GPU, in float32 on a CPU, where bfloat16 is no faster. (Jordan et al. 2024; scale as in
Moonlight, arXiv 2502.16982.)

For the matrices of hidden layers only: tables, heads and vectors stay with AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dspark.distill.moments import Layout
from dspark.distill.rules import Named
from dspark.distill.train_settings import TrainSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5

_LIKE_ADAMW = 0.2


def hidden_matrices(module: nn.Module) -> set[str]:
    """Names of the weights that Muon is for: linear maps of `fc` and of the layers."""
    return {
        f"{name}.weight"
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and name.split(".")[0] in ("fc", "layers")
    }


def orthogonalise(matrix: Tensor) -> Tensor:
    """About the orthogonal factor of the polar decomposition, float32 [..., rows, columns]."""
    a, b, c = COEFFICIENTS
    shape = matrix.shape
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32).reshape(-1, *shape[-2:])
    tall = shape[-2] > shape[-1]
    if tall:  # the product below is taken on the short side
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float().reshape(shape)


class Muon:
    """Muon over matrices with float32 momentum."""

    def __init__(self, named: Named, settings: TrainSettings) -> None:
        self._named, self._settings = named, settings
        self._momentum: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update; `lr` is AdamW's rate, scaled by `muon_lr` where that is given."""
        settings = self._settings
        mu = settings.muon_momentum
        if settings.muon_lr is not None:
            lr = lr * settings.muon_lr / settings.lr
        alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
        for name, parameter in self._named:
            gradient = parameter.grad
            assert gradient is not None, "every parameter that trains has a gradient"
            if name not in self._momentum:
                self._momentum[name] = torch.zeros_like(parameter)
            momentum = self._momentum[name].lerp_(gradient, 1 - mu)
            push = gradient.lerp(momentum, mu)
            alike.setdefault(parameter.shape, []).append((parameter, push))
        for shape, pairs in alike.items():
            # matrices of one shape at once: on a GPU their launches are what a small one costs
            directions = orthogonalise(torch.stack([push for _, push in pairs]))
            scale = _LIKE_ADAMW * math.sqrt(max(shape))
            for (parameter, _), direction in zip(pairs, directions.unbind(0), strict=True):
                parameter.mul_(1 - lr * settings.weight_decay).sub_(direction, alpha=lr * scale)

    def state(self) -> dict[str, Tensor]:
        return {f"{name}.momentum": tensor for name, tensor in self._momentum.items()}

    def layout(self) -> Layout:
        return {f"{name}.momentum": (tuple(p.shape), torch.float32) for name, p in self._named}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._momentum = {
            name: tensors[f"{name}.momentum"].to(p.device, copy=True) for name, p in self._named
        }
