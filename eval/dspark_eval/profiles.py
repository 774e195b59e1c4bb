"""Acceptance as a function of what a round met: its context length, the drafter's entropy.

Letters as in `metrics`. H_k is the drafter's entropy at position k in nats, known before its token
is. A position is *reached* if it was verified and all before it were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.runtime.records import RoundRecord
from dspark_eval.intervals import MIN_PROMPTS, Interval, estimate, share_of
from dspark_eval.metrics import FIGURES, Rounds, acceptance_rate, pool

CONTEXT_EDGES = (128, 512, 2048, 8192, 32768)  # tokens; 2k, 8k and 32k are the usual buckets
ENTROPY_EDGES = (0.1, 0.3, 1.0, 2.0, 4.0)  # nats; a fair choice among e^H tokens


# ------------------------------------------------------------------ context length


@dataclass(frozen=True)
class ContextBucket:
    """Rounds whose context length at the anchor lies in [low, high) tokens; high None = no end."""

    low: int
    high: int | None
    rounds: int
    accepted_length: float | None
    acceptance_rate: float | None
    n_prompts: int
    accepted_length_ci95: Interval | None
    few: bool


def context_buckets(
    prompt_lengths: Sequence[int],
    rounds_by_prompt: Sequence[Rounds],
    edges: Sequence[int] = CONTEXT_EDGES,
    owners: Sequence[int] | None = None,
) -> list[ContextBucket]:
    """tau by context length: the tokens in front of a round's anchor. Empty buckets left out.

    owners: which conversation each entry belongs to, for the intervals; None: each its own.
    """
    names = range(len(prompt_lengths)) if owners is None else owners
    held: list[dict[int, list[RoundRecord]]] = [{} for _ in range(len(edges) + 1)]
    for name, length, rounds in zip(names, prompt_lengths, rounds_by_prompt, strict=True):
        context = length  # the first anchor is the first token of the answer
        for record in rounds:
            bucket = held[int(np.searchsorted(edges, context, side="right"))]
            bucket.setdefault(name, []).append(record)
            context += record.emitted
    return [
        _bucket(low, high, list(by_prompt.values()))
        for low, high, by_prompt in zip((0, *edges), (*edges, None), held, strict=True)
        if by_prompt
    ]


def _bucket(low: int, high: int | None, by_prompt: Sequence[Rounds]) -> ContextBucket:
    counts = [FIGURES["accepted_length"](rounds) for rounds in by_prompt]
    length = estimate([top for top, _ in counts], [bottom for _, bottom in counts])
    rounds = pool(by_prompt)
    return ContextBucket(
        low,
        high,
        len(rounds),
        length.value,
        acceptance_rate(rounds),
        length.n_prompts,
        length.ci95,
        length.n_prompts < MIN_PROMPTS,
    )


# ------------------------------------------------------------------ entropy


@dataclass(frozen=True)
class EntropyBin:
    """Positions whose entropy lies in [low, high) nats.

    drafted   how many, and their `share` of all drafted positions
    reached   of them reached; `acceptance`: the share of those accepted, 1 - E[TV] given H, with
              its interval over the `n_prompts` that have any
    """

    low: float
    high: float | None
    drafted: int
    share: float
    reached: int
    acceptance: float | None
    acceptance_ci95: Interval | None
    n_prompts: int
    few: bool


@dataclass(frozen=True)
class EntropyPosition:
    """Mean entropy in nats of the drafter at one position: drafted, accepted once reached, and
    rejected once reached; of how many positions each, and `few` prompts or not."""

    drafted: float | None
    accepted: float | None
    rejected: float | None
    n: int
    n_accepted: int
    n_rejected: int
    few: bool


@dataclass(frozen=True)
class EntropyProfile:
    """Where the drafter is unsure, and what becomes of it there."""

    positions: tuple[EntropyPosition, ...]
    bins: tuple[EntropyBin, ...]


def entropy_profile(
    by_prompt: Sequence[Rounds], edges: Sequence[float] = ENTROPY_EDGES
) -> EntropyProfile:
    """Entropy by position, and acceptance by entropy. Draft lengths by entropy of whole rounds:
    `lengths_by_entropy`."""
    rounds = pool(by_prompt)
    owner = np.repeat(
        np.arange(len(by_prompt)), [sum(len(r.entropy) for r in own) for own in by_prompt]
    )
    entropy, slot, reached, accepted = (
        np.array([v for r in rounds for v in column(r)])
        for column in (
            lambda r: r.entropy,
            lambda r: range(len(r.entropy)),
            lambda r: (k <= r.accepted and k < r.verified for k in range(len(r.entropy))),
            lambda r: (k < r.accepted for k in range(len(r.entropy))),
        )
    )
    reached, accepted = reached.astype(bool), accepted.astype(bool)
    positions = tuple(
        _entropy_position(entropy, slot == k, reached, accepted, owner)
        for k in range(max((len(r.entropy) for r in rounds), default=0))
    )
    which = np.searchsorted(edges, entropy, side="right")
    bins = tuple(
        _entropy_bin(low, high, which == index, reached, accepted, owner)
        for index, (low, high) in enumerate(zip((0.0, *edges), (*edges, None), strict=True))
    )
    return EntropyProfile(positions, bins)


def _entropy_position(
    entropy: np.ndarray,
    here: np.ndarray,
    reached: np.ndarray,
    accepted: np.ndarray,
    owner: np.ndarray,
) -> EntropyPosition:
    right, wrong = here & reached & accepted, here & reached & ~accepted
    return EntropyPosition(
        _mean(entropy[here]),
        _mean(entropy[right]),
        _mean(entropy[wrong]),
        int(here.sum()),
        int(right.sum()),
        int(wrong.sum()),
        few=len(np.unique(owner[here & reached])) < MIN_PROMPTS,
    )


def _entropy_bin(
    low: float,
    high: float | None,
    inside: np.ndarray,
    reached: np.ndarray,
    accepted: np.ndarray,
    owner: np.ndarray,
) -> EntropyBin:
    size = int(owner.max(initial=-1)) + 1
    judged = np.bincount(owner[inside & reached], minlength=size)
    found = share_of(np.bincount(owner[inside & accepted], minlength=size).tolist(),
                     judged.tolist())  # fmt: skip
    return EntropyBin(
        low=low,
        high=high,
        drafted=int(inside.sum()),
        share=float(inside.mean()) if len(inside) else 0.0,
        reached=int(judged.sum()),
        acceptance=found.value,
        acceptance_ci95=found.ci95,
        n_prompts=found.n_prompts,
        few=found.few,
    )


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
