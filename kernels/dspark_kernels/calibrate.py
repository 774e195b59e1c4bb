"""The calibrated confidence of a block's slots: `dspark.draft.calibration` says what it means.

    P_j = prod_{k<=j} sigmoid(l_k / T_k)
    s_j = min_{i<=j} sigmoid(a_i ln P_i - b_i ln(1 - P_i) + d_i)
    confidence of slot j = s_j / s_{j-1}            s_0 = 1

A few numbers a block; what it costs a frame is launches, some twenty in torch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1e-7
"""Products are kept this far from 0 and 1, as in the fit."""
LOG_SMALLEST = math.log(SMALLEST)


def calibrate(logits: Tensor, columns: Tensor) -> Tensor:
    """Confidence of every slot.

    Args:
        logits: [..., g], of the confidence head, of the first g slots.
        columns: [4, G] float32, g <= G: T, a, b, d of every slot.

    Returns:
        [..., g] float32, or float64 of such columns.
    """
    temperatures, a, b, d = columns[:, : logits.shape[-1]].unbind(0)
    log_product = F.logsigmoid(logits.to(columns.dtype) / temperatures).cumsum(-1)
    log_product = log_product.clamp(LOG_SMALLEST, -SMALLEST)
    bent = a * log_product - b * torch.log(-torch.expm1(log_product)) + d
    log_survival = F.logsigmoid(bent).cummin(-1).values
    before = F.pad(log_survival[..., :-1], (1, 0))
    return (log_survival - before).exp()
