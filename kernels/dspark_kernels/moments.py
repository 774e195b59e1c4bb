"""Moments of an optimiser in two bytes or one: how they are rounded, and what that can cost.

bf16    the upper half of a float32: 8 bits of mantissa.
int8    blocks of 256 values share one float32 scale, the block's largest magnitude s. A code c of
        n stands for s (c/n)^k: k = 2, n = 127 with a sign for the first moment, k = 4, n = 255 for
        the second, so that codes lie dense near zero, where most values are. (Block-wise
        quantisation: Dettmers et al. 2022.)

Both round at random to one of the two neighbours, up with the chance that makes the mean right. A
moment moves by a few percent of itself a step, often less than half the distance of neighbours:
rounded to the nearest it would never move. A second moment above zero never becomes zero, since
the first one is divided by its root.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Values that share a scale."""


def round_moment(value: Tensor, generator: torch.Generator) -> Tensor:
    """float32 of any shape -> bfloat16."""
    noise = torch.randint(
        1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32
    )
    bits = value.contiguous().view(torch.int32) + noise
    return (bits & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def pack_moment(value: Tensor, signed: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """float32 of N numbers -> codes [N], int8 if `signed`, else uint8; scales [ceil(N / BLOCK)]."""
    codes, power = _scheme(signed)
    flat = value.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    magnitude = blocks.abs()
    scales = magnitude.amax(-1, keepdim=True)
    share = magnitude / scales.clamp_min(torch.finfo(torch.float32).tiny)
    below = (share.pow(1 / power) * codes).floor_().clamp_(max=codes - 1)
    low, high = below.div(codes).pow_(power), (below + 1).div_(codes).pow_(power)
    chance = (share - low) / (high - low)
    noise = torch.rand(share.shape, generator=generator, device=share.device)
    code = below + (noise < chance)
    if signed:
        packed = (code * blocks.sign()).to(torch.int8)
    else:
        packed = torch.where(magnitude > 0, code.clamp_min(1), code).to(torch.uint8)
    return packed.view(-1)[: len(flat)].clone(), scales[:, 0]


def unpack_moment(codes: Tensor, scales: Tensor) -> Tensor:
    """What `pack_moment` gave -> [N] float32."""
    most, power = _scheme(codes.dtype == torch.int8)
    values = codes.float().div_(most)
    values = values.sign() * values.abs().pow_(power)
    return values * scales.repeat_interleave(BLOCK)[: len(values)]


def _scheme(signed: bool) -> tuple[int, int]:
    """Largest code n and power k."""
    return (127, 2) if signed else (255, 4)
