"""Heads that share keys and values read them where they lie.

transformers' `sdpa` attention under a mask copies keys and values for every query head, in each
layer all places of all seats. Here the G query heads of a key head are G T rows of it instead:

    queries  [B, H, T, K] -> [B, H/G, G T, K]        masks  [B, 1, T, S] -> [B, 1, G T, S]

which makes the same scores of the same numbers. A mask is repeated once a step, not once a layer.

Letters: B seats, H query heads, T rows of a step, S places, K head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "sdpa"
_THEIRS = ("position_bias", "softcap", "output_attentions", "dropout")
"""What only the original knows to do, or to refuse."""


class GroupedAttention:
    """In place of transformers' `sdpa`, for steps whose masks are whole."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, one step of a model that attends by `sdpa` does so in groups."""
        original = ALL_ATTENTION_FUNCTIONS[_NAME]
        ALL_ATTENTION_FUNCTIONS[_NAME] = _Step(original)
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS[_NAME]
            if ALL_ATTENTION_FUNCTIONS[_NAME] is not original:  # somebody's own, put there before
                ALL_ATTENTION_FUNCTIONS[_NAME] = original


class _Step:
    def __init__(self, original: Any) -> None:
        self._original = original
        self._masks: dict[tuple[int, torch.Size, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **given: Any,  # transformers hands on whatever a model says
    ) -> tuple[Tensor, Tensor | None]:
        """See `sdpa_attention_forward` of transformers: [B, T, H, K] of queries [B, H, T, K]."""
        batch, heads, rows, width = query.shape
        shared = key.shape[1]
        whole = attention_mask is not None and attention_mask.shape[1:3] == (1, rows)
        theirs = any(_asked(given.get(name)) for name in _THEIRS)
        if heads == shared or not whole or theirs:
            return self._original(module, query, key, value, attention_mask, **given)
        assert attention_mask is not None
        groups = heads // shared
        found = F.scaled_dot_product_attention(
            query.reshape(batch, shared, groups * rows, width),
            key,
            value,
            attn_mask=self._mask(attention_mask, groups),
            scale=given.get("scaling"),
        )
        apart = found.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4)
        return apart.reshape(batch, rows, heads, -1), None

    def _mask(self, mask: Tensor, groups: int) -> Tensor:
        """Repeated; the one it was made of is kept, so that no other can lie at its address."""
        name = (mask.data_ptr(), mask.shape, groups)
        if name not in self._masks:
            self._masks[name] = (mask, mask.repeat(1, 1, groups, 1))
        return self._masks[name][1]


def _asked(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)
