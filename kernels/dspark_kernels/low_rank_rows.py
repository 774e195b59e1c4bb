"""The second factors of low-rank projections of the same rows, side by side in one launch.

    out_f = x_f W_f^T        f = 0 .. F-1

A KDA layer has two: its output gate and its decay, each D -> R -> O, whose first factors stand side
by side in the product before. They are small (1 MB each at R = 128, O = 4096 in 16 bits); what they
cost is a launch in the middle of a chain.

Letters: n rows, F factors, R rank, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def low_rank_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Every factor of every row.

    Args:
        x: [n, F, R]; any strides with the last 1.
        weight: [F, O, R] in the dtype of ``x``.

    Returns:
        [F, n, O] in that dtype; sums are float32 or wider.
    """
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2))


def moved_bytes(n: int, factors: int, rank: int, outputs: int, itemsize: int) -> int:
    """Bytes of one call if everything is read or written once."""
    return itemsize * factors * (outputs * rank + n * (rank + outputs))


def flops(n: int, factors: int, rank: int, outputs: int) -> int:
    """A multiply and an add count as two."""
    return 2 * n * factors * rank * outputs
