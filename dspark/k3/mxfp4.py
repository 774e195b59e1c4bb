"""MXFP4, the number format of K3's routed experts: 4-bit floats that share a power of two.

    w[c] = E2M1[code[c]] * 2 ** (scale[c // 32] - 127)

The last (input) dimension C is cut into groups of 32. A group stores one scale byte (E8M0: an
exponent with bias 127, no sign, no mantissa, byte 255 = NaN) and 32 codes of 4 bits (E2M1: bit 3
is the sign). Byte j of a row holds input 2j in its low nibble and input 2j + 1 in its high one.
Format: OCP Microscaling specification 1.0; packing: compressed-tensors "mxfp4-pack-quantized".
Letters: C input channels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
_SCALE_NAN = 255
_FP32_MANTISSA_BITS = 23


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack ``packed`` U8 [..., C/2] and ``scale`` U8 [..., C/32] into weights [..., C].

    Values up to the range of ``dtype`` are exact in float32 and bfloat16. A scale byte of 255 is
    the format's NaN and makes its group NaN. Raises ValueError on other dtypes or shapes.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 wants two uint8 tensors, got {packed.dtype} and {scale.dtype}")
    expected = (*scale.shape[:-1], scale.shape[-1] * (GROUP // 2))
    if tuple(packed.shape) != expected:
        raise ValueError(
            f"packed shape {tuple(packed.shape)} does not go with scale shape "
            f"{tuple(scale.shape)}: expected {expected}"
        )
    values = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=packed.device)
    # One table look-up per byte: row b holds (low nibble, high nibble).
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    groups = pairs[packed.int()].view(*scale.shape, GROUP)
    groups *= _power_of_two(scale).unsqueeze(-1)
    return groups.flatten(-2).to(dtype)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack ``weight`` [..., C], any float dtype, into (packed U8 [..., C/2], scale U8 [..., C/32]).

    Scale: the smallest power of two 2**e, -127 <= e, with max|w| <= 6 * 2**e, so nothing is ever
    clipped and the largest code of a group is 4 or 6; an all-zero group gets the smallest scale.
    Codes: the nearest value, ties to the even code, the sign of a zero kept. What MXFP4 can hold
    comes back bit for bit: dequantise(quantise(w)) == w. Raises ValueError when C is not a
    multiple of 32 or a weight is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 packs groups of {GROUP} inputs, got {weight.shape[-1]} inputs")
    groups = weight.detach().float().contiguous().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1)
    if not torch.isfinite(largest).all():
        raise ValueError("MXFP4 cannot hold infinities or NaN")
    # largest = m * 2**n with 1/2 <= m < 1, and 6 * 2**e = 3/4 * 2**(e + 3): compare mantissas.
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 3 + (mantissa > 0.75).int()
    exponent = torch.where(largest > 0, exponent, -_SCALE_BIAS).clamp_min(-_SCALE_BIAS)
    code = _nearest_code(torch.ldexp(groups, -exponent.unsqueeze(-1))).flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, (exponent + _SCALE_BIAS).to(torch.uint8)


def _nearest_code(x: Tensor) -> Tensor:
    """E2M1 codes (uint8, 0..15) nearest to ``x`` in [-6, 6], ties to the even code."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(_E2M1)])
    # bucketize counts middles strictly below x. A tie must climb where the upper code is even,
    # that is at every second middle: move those down by one float32 step.
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(()))
    code = torch.bucketize(x.abs(), middles.to(x.device), out_int32=True)
    return (code + 8 * torch.signbit(x).int()).to(torch.uint8)


def _power_of_two(scale: Tensor) -> Tensor:
    """2 ** (scale - 127) in float32, built from its bits: exact, also for subnormal byte 0."""
    bits = scale.int() << _FP32_MANTISSA_BITS
    bits = torch.where(scale == 0, 1 << (_FP32_MANTISSA_BITS - 1), bits)
    power = bits.view(torch.float32)
    return torch.where(scale == _SCALE_NAN, torch.nan, power)


def quantization_block() -> dict[str, Any]:
    """The published ``quantization_config``: only the routed experts are packed."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": 32,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "scale_dtype": "torch.uint8",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }
