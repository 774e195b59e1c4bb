"""AdamW in one pass over a parameter, with moments kept in four bytes, two or one.

    g <- scale g      m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
    w <- (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

`scale` is a number on the device: what divides a sum of losses and what clips a norm need not
reach the host before the update is on its way. Where it is not finite nothing is changed.

Moments come as float32, as bfloat16, or as one-byte codes with a float32 scale for every `BLOCK`
values; `moments` says what a code stands for and how both of the small kinds are rounded.

Letters: N values of a parameter, t updates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_kernels.moments import pack_moment, round_moment, unpack_moment


@dataclass(frozen=True, eq=False)
class Moments:
    """m and v of a parameter, in any of the three forms; `adamw` writes them in place.

    first, second: [N] float32 or bfloat16, or int8 and uint8 codes.
    first_scales, second_scales: [ceil(N / BLOCK)] float32 beside codes, else None.
    """

    first: Tensor
    second: Tensor
    first_scales: Tensor | None = None
    second_scales: Tensor | None = None


@dataclass(frozen=True)
class Rates:
    """Numbers of one update. `updates`: t, from 1. `seed`: of the rounding, below 2^31."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    updates: int
    seed: int


def adamw(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    scale: Tensor,
    rates: Rates,
    copy: Tensor | None = None,
) -> None:
    """One update of `weight` [N] float32, in place, from a gradient [N] in float32 or bfloat16.

    Args:
        weight: Contiguous.
        gradient: Only read.
        moments: Updated in place.
        scale: [] float32, what the gradient is multiplied by.
        rates: Of this update.
        copy: [N] bfloat16, receives the updated weight.
    """
    if not bool(torch.isfinite(scale)):
        return
    g = gradient.float() * scale
    first, second = (
        unpacked(moments.first, moments.first_scales),
        unpacked(moments.second, moments.second_scales),
    )
    first = first + (1 - rates.beta1) * (g - first)
    second = rates.beta2 * second + (1 - rates.beta2) * g * g
    rate, spread = corrections(rates)
    weight.mul_(1 - rates.lr * rates.weight_decay)
    weight.sub_(rate * first / ((second * spread).sqrt() + rates.eps))
    if copy is not None:
        copy.copy_(weight)
    generator = torch.Generator(weight.device).manual_seed(rates.seed)
    for value, codes, scales in (
        (first, moments.first, moments.first_scales),
        (second, moments.second, moments.second_scales),
    ):
        _pack(value, codes, scales, generator)


def corrections(rates: Rates) -> tuple[float, float]:
    """lr / (1 - b1^t) and 1 / (1 - b2^t)."""
    rate = rates.lr / (1 - rates.beta1**rates.updates)
    return rate, 1 / (1 - rates.beta2**rates.updates)


def unpacked(values: Tensor, scales: Tensor | None) -> Tensor:
    """A moment in float32."""
    return values.float() if scales is None else unpack_moment(values, scales)


def _pack(value: Tensor, out: Tensor, scales: Tensor | None, generator: torch.Generator) -> None:
    if scales is not None:
        codes, found = pack_moment(value, out.dtype == torch.int8, generator)
        out.copy_(codes)
        scales.copy_(found)
    else:
        out.copy_(value if out.dtype == torch.float32 else round_moment(value, generator))


def cost(count: int, gradient: int, moments: Moments, copy: bool = False) -> int:
    """Bytes of one update: weight and moments read and written, a gradient of so many bytes a value
    read, the copy written."""
    kept = (moments.first, moments.second, moments.first_scales, moments.second_scales)
    state = sum(x.numel() * x.element_size() for x in kept if x is not None)
    return count * (8 + gradient + 2 * copy) + 2 * state
