"""When is a text a loop? One answer for everything that reports it.

    repeated share of n-grams = 1 - distinct / all          loop: share of 8-grams > 0.3

A model that repeats itself is easy to draft for and says nothing, so a target's own quality and a
drafter's accepted length both need to know.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOP_NGRAM = 8
LOOP_SHARE = 0.3


def repeated_share(tokens: Sequence[int], n: int = LOOP_NGRAM) -> float:
    """Share of the n-grams of `tokens` that occurred before in it; 0 for fewer than n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether more than 30 % of the 8-grams of `tokens` are repeats."""
    return repeated_share(tokens) > LOOP_SHARE
