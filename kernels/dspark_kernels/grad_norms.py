"""Norms of many gradients, each read once: two launches for all of them.

    norm(g) = sqrt(sum g^2)

A part of a gradient is summed in float32, the parts of one in float64: no atomics, the same numbers
every time.

Letters: n gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grad_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norms, [n] float32, of gradients of any shape in float32 or bfloat16.

    Raises ValueError where none is given.
    """
    if not gradients:
        raise ValueError("no gradients: at least one is needed")
    return torch.stack(
        [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    ).float()


def cost(gradients: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes that must be read, and operations."""
    count = sum(g.numel() for g in gradients)
    return sum(g.numel() * g.element_size() for g in gradients), 2 * count
