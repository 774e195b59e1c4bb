"""Rotary positions of a transformers model in four launches a layer instead of ten.

    x cos + rotate_half(x) sin,    rotate_half(x1, x2) = (-x2, x1)

of queries and keys side by side, the halves turned by a roll and the sign put into the sine, once
a step. A model's `apply_rotary_pos_emb` is replaced where it is that formula on random numbers, but
for last bits; one that turns neighbours, or a part of a head, says something else and stays.

Letters: B batch, H heads, T rows, K head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"
STEPS = 4
"""Roundings of the dtype by which the two may differ."""


class FusedRotary:
    """The functions of a model's own code that may run as one; the model stays as it is."""

    def __init__(self, model: nn.Module) -> None:
        weight = next(model.parameters())
        names = dict.fromkeys(type(module).__module__ for module in model.modules())
        files = [sys.modules[name] for name in names if hasattr(sys.modules[name], NAME)]
        self._files: list[tuple[ModuleType, Any]] = [
            (file, original)
            for file in files
            if _same(original := getattr(file, NAME), weight.device, weight.dtype)
        ]

    def __len__(self) -> int:
        return len(self._files)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, one step of the model runs so."""
        for file, original in self._files:
            setattr(file, NAME, _Step(original))
        try:
            yield
        finally:
            for file, original in self._files:
                setattr(file, NAME, original)


class _Step:
    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._original = original
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, H, T, K] by tables [B, T, K]."""
        plain = cos.dim() == 3 and q.dtype == k.dtype == cos.dtype
        if rest or more or not plain or not q.shape[-1] == k.shape[-1] == cos.shape[-1]:
            return self._original(q, k, cos, sin, *rest, **more)
        name = (id(cos), id(sin))
        if name not in self._tables:  # both are kept, so that their ids stay their own
            self._tables[name] = (cos, sin, _signed(sin).unsqueeze(1))
        signed = self._tables[name][2]
        x = torch.cat((q, k), dim=1)
        turned = torch.addcmul(x * cos.unsqueeze(1), x.roll(x.shape[-1] // 2, -1), signed)
        q, k = turned.split((q.shape[1], k.shape[1]), dim=1)
        return q, k


def _signed(sin: Tensor) -> Tensor:
    """The sine with the sign of `rotate_half`: minus in the first half."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def _same(original: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it is the formula; sine and cosine of independent numbers, so that no rule hides."""
    generator = torch.Generator().manual_seed(7)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k, cos, sin = some(2, 4, 3, 8), some(2, 2, 3, 8), some(2, 3, 8), some(2, 3, 8)
    try:
        theirs = original(q, k, cos, sin)
        ours = _Step(original)(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    limit = STEPS * torch.finfo(dtype).eps * 8  # numbers up to about 8
    return all(
        isinstance(a, Tensor) and a.shape == b.shape and bool((a - b).abs().max() <= limit)
        for a, b in zip(theirs, ours, strict=True)
    )
