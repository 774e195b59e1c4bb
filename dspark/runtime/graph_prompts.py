"""Prompts on their way into the seats of frames, read by the ordinary target and drafter.

Targets whose static pass takes many rows read them otherwise: `dspark.runtime.graph_reading`.

A `PromptReader` reads; one that `remembers` gives what it has read before without another pass, for
measurements that ask the same prompts in several ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.draft.context import DraftContext
from dspark.draft.model import DSparkDrafter
from dspark.runtime.prefill import read_prompt
from dspark.runtime.static_pass import StaticSeats
from dspark.runtime.target import Cache, Target


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """cache, context: of one row; last: [1, D], what the prompt's logits come from."""

    cache: Cache | StaticSeats
    context: DraftContext | None
    last: Tensor


class Reader(Protocol):
    """Whoever reads prompts for frames."""

    def read(self, prompt_ids: Sequence[int]) -> ReadPrompt:
        """A prompt, not to be changed by whoever asked for it, nor kept beyond the next one."""
        ...


class PromptReader:
    """Reads prompts for the frames of a target and, if there is one, a drafter."""

    def __init__(
        self, target: Target, drafter: DSparkDrafter | None, *, remembers: bool = False
    ) -> None:
        self._target, self._drafter = target, drafter
        self._known: dict[tuple[int, ...], ReadPrompt] | None = {} if remembers else None

    @torch.inference_mode()
    def read(self, prompt_ids: Sequence[int]) -> ReadPrompt:
        """A prompt, not to be changed by whoever asked for it."""
        if self._known is None:
            return self._read(prompt_ids)
        key = tuple(prompt_ids)
        if key not in self._known:
            self._known[key] = self._read(prompt_ids)
        return self._known[key]

    def _read(self, prompt_ids: Sequence[int]) -> ReadPrompt:
        target, drafter = self._target, self._drafter
        cache = target.new_cache(1, len(prompt_ids))
        context = None if drafter is None else drafter.new_context(1, len(prompt_ids))

        def feed(features: Tensor) -> None:
            assert drafter is not None
            assert context is not None
            drafter.extend(context, features)

        last = read_prompt(
            target,
            cache,
            prompt_ids,
            taps=None if drafter is None else drafter.taps,
            on_taps=None if drafter is None else feed,
        )
        return ReadPrompt(cache, context, last)
