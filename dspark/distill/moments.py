"""Optimiser moments in two bytes or one, as tensors that a state can be saved with.

How they are rounded, and why at random, stands in `dspark_kernels/moments.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dspark import ops

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by name."""


class Codec(Protocol):
    """Packs a moment into tensors named by suffix."""

    parts: tuple[str, ...]

    def pack(self, value: Tensor, signed: bool, generator: torch.Generator) -> dict[str, Tensor]:
        """float32 of any shape -> packed parts."""

    def unpack(self, parts: Mapping[str, Tensor], shape: torch.Size, signed: bool) -> Tensor:
        """Packed parts -> float32 of `shape`."""

    def layout(self, shape: torch.Size, signed: bool) -> Layout:
        """Shape and dtype of every part of a moment of `shape`."""


class BFloat16:
    """Two bytes a value, relative distance of neighbours at most 2^-7."""

    parts: tuple[str, ...] = ("",)

    def pack(self, value: Tensor, signed: bool, generator: torch.Generator) -> dict[str, Tensor]:
        del signed
        return {"": ops.round_moment(value, generator)}

    def unpack(self, parts: Mapping[str, Tensor], shape: torch.Size, signed: bool) -> Tensor:
        del shape, signed
        return parts[""].float()

    def layout(self, shape: torch.Size, signed: bool) -> Layout:
        del signed
        return {"": (tuple(shape), torch.bfloat16)}


class Int8:
    """One byte a value and four per block."""

    parts: tuple[str, ...] = (".codes", ".scales")

    def pack(self, value: Tensor, signed: bool, generator: torch.Generator) -> dict[str, Tensor]:
        return dict(zip(self.parts, ops.pack_moment(value, signed, generator), strict=True))

    def unpack(self, parts: Mapping[str, Tensor], shape: torch.Size, signed: bool) -> Tensor:
        del signed  # the dtype of codes says so
        return ops.unpack_moment(*(parts[name] for name in self.parts)).view(shape)

    def layout(self, shape: torch.Size, signed: bool) -> Layout:
        size = shape.numel()
        return {
            ".codes": ((size,), torch.int8 if signed else torch.uint8),
            ".scales": ((math.ceil(size / ops.MOMENT_BLOCK),), torch.float32),
        }


CODECS: dict[str, Codec] = {"bf16": BFloat16(), "int8": Int8()}
