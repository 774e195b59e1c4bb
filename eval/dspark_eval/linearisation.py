"""How well order r stands in for exact KDA, on blocks whose keys are as alike as one likes.

    error(r) = |O_r - O| / |O|, where order G - 1 is exact

Blocks are drawn: keys that correlate with each other, log-decays uniform in [low, 0], write
strengths beta the same everywhere. With the spectral norm |A| < 1 every order is better than the
one before; with keys alike, beta near one and weak decay |A| is larger and an order can be worse
than the one below it (`dspark_kernels.linear_kda`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark import ops


@dataclass(frozen=True)
class OrderError:
    """Relative error of one order, mean over blocks, and the mean spectral norm of A."""

    order: int | str
    error: float
    norm: float


def order_errors(
    *,
    slots: int = 8,
    width: int = 32,
    correlation: float = 0.3,
    low: float = -1.0,
    beta: float = 0.5,
    blocks: int = 64,
    seed: int = 0,
) -> list[OrderError]:
    """`gla` and every order of drawn blocks, in float64. Raises ValueError out of range."""
    if not (0 <= correlation < 1 and -5 <= low <= 0 and 0 <= beta <= 1):
        raise ValueError(
            f"correlation {correlation}, low {low}, beta {beta}: expected 0 <= correlation < 1, "
            "-5 <= low <= 0, 0 <= beta <= 1"
        )
    q, k, v, g, state = _blocks(slots, width, correlation, low, blocks, seed)
    strength = torch.full((blocks, slots, 1), beta, dtype=torch.float64)
    norm = float(ops.linear_kda_norm(k, g, strength).mean())
    exact = ops.linear_kda_block(q, k, v, g, strength, state, slots - 1)
    found = []
    for order in ("gla", *range(slots)):
        out = ops.linear_kda_block(q, k, v, g, strength, state, order)
        error = (out - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        found.append(OrderError(order, float(error.mean()), norm))
    return found


def _blocks(
    slots: int, width: int, correlation: float, low: float, blocks: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shared = draw(blocks, 1, 1, width)
    keys = correlation**0.5 * shared + (1 - correlation) ** 0.5 * draw(blocks, slots, 1, width)
    q = F.normalize(draw(blocks, slots, 1, width), dim=-1) * width**-0.5
    decay = torch.rand(blocks, slots, 1, width, generator=generator, dtype=torch.float64)
    state = draw(blocks, 1, width, width)
    return q, F.normalize(keys, dim=-1), draw(blocks, slots, 1, width), low * decay, state
