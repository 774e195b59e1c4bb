"""MXFP4 weights as the kernels read them: 4-bit floats that share a power of two per 32 inputs.

    w[c] = E2M1[code[c]] * 2 ** (scale[c // 32] - 127)

Byte j of a row holds input 2j in its low nibble and input 2j + 1 in its high one; a scale byte of
255 is NaN. Layout: OCP Microscaling 1.0, compressed-tensors "mxfp4-pack-quantized".
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., C/2] and uint8 [..., C/32] -> weights [..., C]; capturable: no host table."""
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int32)
    exponent, half = (code >> 1) & 3, (code & 1).to(torch.float32)
    small = exponent == 0
    value = torch.where(
        small, half * 0.5, torch.ldexp(1 + half * 0.5, (exponent - 1).to(torch.float32))
    )
    value = torch.where(code >= 8, -value, value)
    power = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.to(torch.float32) - 127)
    power = torch.where(scale == 255, torch.nan, power)
    return (value.unflatten(-1, (-1, GROUP)) * power.unsqueeze(-1)).flatten(-2).to(dtype)
