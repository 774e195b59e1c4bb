"""Where greedy speculative text leaves greedy plain text, and how close the call was.

In float32 the two must be equal. In low precision a verify pass of several rows rounds otherwise
than a single-row step, so a near-tie between the two best tokens may fall the other way: then the
gap between their logits is within a few rounding steps. A larger gap is a defect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.runtime.target import Target
from dspark_eval.speed import PromptTimings

NEAR_TIE_STEPS = 16
"""Rounding steps of the largest logit: a few layers of accumulated rounding stay within."""


@dataclass(frozen=True)
class Mismatch:
    """First difference in one prompt's answers.

    position: index in the answer. top2_gap: logit of the best token minus that of the second best
    there, from one pass over everything before it. near_tie: that gap is within what rounding in
    the target's dtype explains. A token is None where its answer had ended.
    """

    prompt: int
    position: int
    plain_token: int | None
    speculative_token: int | None
    top2_gap: float
    near_tie: bool


def first_divergence(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None if the two are equal."""
    for position, (ours, theirs) in enumerate(zip(plain, speculative, strict=False)):
        if ours != theirs:
            return position
    shorter = min(len(plain), len(speculative))
    return None if len(plain) == len(speculative) else shorter


def find_mismatches(
    target: Target, prompts: Sequence[list[int]], timings: Sequence[PromptTimings]
) -> list[Mismatch]:
    """One entry for every prompt whose greedy answers differ in any repeat."""
    found = []
    for index, (prompt, entry) in enumerate(zip(prompts, timings, strict=True)):
        for plain, fast in zip(entry.plain, entry.speculative, strict=True):
            position = first_divergence(plain.tokens, fast.tokens)
            if position is None:
                continue
            gap, largest = top2_gap(target, [*prompt, *plain.tokens[:position]])
            found.append(
                Mismatch(
                    prompt=index,
                    position=position,
                    plain_token=_at(plain.tokens, position),
                    speculative_token=_at(fast.tokens, position),
                    top2_gap=gap,
                    near_tie=gap <= NEAR_TIE_STEPS * torch.finfo(target.dtype).eps * largest,
                )
            )
            break
    return found


@torch.inference_mode()
def top2_gap(target: Target, tokens: Sequence[int]) -> tuple[float, float]:
    """Largest minus second largest next-token logit after `tokens`, and the largest in size."""
    row = torch.tensor([list(tokens)], device=target.device)
    cache = target.new_cache(1, row.shape[1])
    output = target.forward(row, cache, commit=True)
    logits = target.logits(output.hidden[:, -1]).float()[0]
    best = logits.topk(2).values
    return float(best[0] - best[1]), float(logits.abs().max())


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
