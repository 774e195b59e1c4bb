"""Rotary positions: plain or YaRN frequencies, halves or interleaved pairs.

    turn(x)_a = x_a cos(s f_a) - x_b sin(s f_a),   turn(x)_b = x_b cos(s f_a) + x_a sin(s f_a)

for every pair (a, b) of channels at position s. Halves (Qwen3, `attention`) pair a with a + K/2;
interleaved (DeepSeek, `mla`) pairs 2a with 2a + 1. The second channel of a pair is stored with
frequency +f, the first with -f: cosine does not mind, and sine arrives with the sign it needs.

YaRN (Peng et al. 2023) divides the slow frequencies by `factor`, keeps the fast ones and blends
in between. Two temperatures come with it, under the names of Hugging Face configs, where
m(c) = 0.1 c ln(factor) + 1:

    cosine and sine  x attention_factor, else m(mscale) / m(mscale_all_dim), else m(1)
    softmax scale    x m(mscale_all_dim)^2, `mla` only (DeepSeek's rule)

so the MLA-native K3 drafter (factor 32, both terms 1) leaves cosine and sine alone and scales its
softmax by 192^-1/2 x 1.3466^2 = 0.13086.

Angles are formed in float32 for the positions that are asked for, a page ahead where a text grows
by a few tokens at a time, so nothing is sized by a maximum; float32 because that is what the
engines multiply, and at position 10^6 its rounding shows.

Letters: K rotated channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.shapes import Yarn


@dataclass(frozen=True)
class Rotation:
    """Cosine and signed sine of some positions, [..., 1, K] to broadcast over heads."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def turn(self, x: Tensor) -> Tensor:
        """Rotates x [..., heads, K]."""
        if self.interleaved:
            partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * self.cos, partner, self.sin)


PAGE = 256
"""Positions computed at once for short spans: at batch 1, four small operations of every round."""


class Rotary:
    """Cosine and sine of any positions.

    Args:
        signed: Signed frequencies [K] in float32, on the device where positions live.
        scale: What cosine and sine are multiplied by.
        interleaved: How channels are paired.
        dtype: Of the tables.
    """

    def __init__(self, signed: Tensor, scale: float, interleaved: bool, dtype: torch.dtype) -> None:
        self.signed, self.scale = signed, scale
        self.interleaved, self.dtype = interleaved, dtype
        self._first = 0
        self._page: Rotation | None = None

    @classmethod
    def of(cls, config: DraftConfig, device: torch.device, dtype: torch.dtype) -> Rotary | None:
        """The rotary positions of a configuration; None where it has none (NoPE).

        Args:
            config: Gives backbone, width, base and YaRN.
            device: Where positions live.
            dtype: Of the tables that `at` returns.
        """
        if config.mla is not None and not config.mla.rope:
            return None
        width = config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
        interleaved = config.mla is not None
        signed = _signed(width, config.rope_theta, config.yarn, interleaved, device)
        return cls(signed, table_scale(config.yarn), interleaved, dtype)

    def at(self, positions: Tensor) -> Rotation:
        """Positions [...], any integers, -> tables [..., 1, K]."""
        return self._rotation(positions[..., None, None].float())

    def span(self, start: int, stop: int) -> Rotation:
        """Positions start..stop-1 -> tables [stop - start, 1, K]."""
        if stop - start > PAGE // 2:
            return self._consecutive(start, stop)
        if self._page is None or not self._first <= start <= stop <= self._first + PAGE:
            self._first, self._page = start, self._consecutive(start, start + PAGE)
        rows = slice(start - self._first, stop - self._first)
        return Rotation(self._page.cos[rows], self._page.sin[rows], self.interleaved)

    def _consecutive(self, start: int, stop: int) -> Rotation:
        device = self.signed.device
        positions = torch.arange(start, stop, device=device, dtype=torch.float32)
        return self._rotation(positions[:, None, None])

    def _rotation(self, positions: Tensor) -> Rotation:
        """Float positions [..., 1, 1] -> tables [..., 1, K]."""
        angle = positions * self.signed
        cos, sin = angle.cos(), angle.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return Rotation(cos.to(self.dtype), sin.to(self.dtype), self.interleaved)


def frequencies(width: int, theta: float, yarn: Yarn | None) -> Tensor:
    """Radians per position of each pair of channels: [width / 2] float32 on the CPU."""
    wavelength = theta ** (torch.arange(0, width, 2, device="cpu").float() / width)
    if yarn is None:
        return 1.0 / wavelength
    low, high = (_channel(turns, width, theta, yarn) for turns in (yarn.beta_fast, yarn.beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    width_of_blend = high - low if high != low else 0.001
    ramp = (torch.arange(width // 2, device="cpu").float() - low) / width_of_blend
    kept = 1 - ramp.clamp(0, 1)
    return (1.0 / (yarn.factor * wavelength)) * (1 - kept) + (1.0 / wavelength) * kept


def table_scale(yarn: Yarn | None) -> float:
    """What cosine and sine are multiplied by."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale is None or yarn.mscale_all_dim is None:
        return _temperature(yarn.factor, 1.0)
    return _temperature(yarn.factor, yarn.mscale) / _temperature(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(config: DraftConfig) -> float:
    """What the products of queries and keys are multiplied by."""
    if config.mla is None:
        return config.head_dim**-0.5
    scale = (config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim) ** -0.5
    yarn = config.yarn
    if yarn is None or yarn.mscale_all_dim is None or not config.mla.rope:
        return float(scale)
    return float(scale * _temperature(yarn.factor, yarn.mscale_all_dim) ** 2)


def _temperature(factor: float, coefficient: float) -> float:
    """m(c) = 0.1 c ln(factor) + 1."""
    return 0.1 * coefficient * math.log(factor) + 1.0


def _channel(turns: float, width: int, theta: float, yarn: Yarn) -> float:
    """The (fractional) pair that makes `turns` full turns over the length trained for."""
    length = yarn.original_max_position_embeddings
    return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


@lru_cache(maxsize=32)
def _signed(
    width: int, theta: float, yarn: Yarn | None, interleaved: bool, device: torch.device
) -> Tensor:
    """Frequencies of all channels, those of first channels negative.

    Computed on the CPU, so that every device turns by the same angles.
    """
    with torch.inference_mode(False):
        one = frequencies(width, theta, yarn)
        pairs = torch.stack((-one, one), -1) if interleaved else torch.stack((-one, one))
        return pairs.flatten().to(device)
