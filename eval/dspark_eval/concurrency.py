"""Throughput against concurrency, measured: B requests in one batch, plain and speculative.

    goodput    tokens that users receive / seconds from the first prompt read to the last token
    speed-up   speculative goodput over plain, groups of B prompts resampled in pairs

A group is B prompts of the set that start together; who of the two ways goes first changes from
group to group, and a group is decoded both ways before the clock counts. Prefill is part of it, and
so is the tail in which only long answers are left: that is what a batch costs. `sweeps.goodput`
models the same from step times, for batches that nobody ran (DSpark paper, Fig. 7).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.plain import generate_batch
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval.drafting import Drafted
from dspark_eval.intervals import Interval, paired
from dspark_eval.pair import Pair

MOST_GROUPS = 12
"""Groups measured at each concurrency; a set may have fewer."""
FEWEST_GROUPS = 10
"""Below it a bootstrap over groups covers less than it says (two groups: half): none is given."""

Group = Sequence[Sequence[int]]
Way = Callable[[Group, int], list[list[int]]]
"""Prompts of a group and the place of its first one in the set, to their answers."""


@dataclass(frozen=True)
class Served:
    """What one concurrency gave. `plain` and `speculative` in tokens per second of all users
    together; `same_text` answers that both ways gave alike: all of them at temperature 0."""

    concurrency: int
    groups: int
    plain: float | None
    speculative: float | None
    speedup: float | None
    speedup_ci95: Interval | None
    answers: int
    same_text: int


def check_concurrency(sizes: Sequence[int], prompts: int, name: str) -> None:
    """Raises UserError for a concurrency that a set has not enough prompts for."""
    if sizes and max(sizes) > prompts:
        raise UserError(
            f"--concurrency {max(sizes)}: {name} has {prompts} prompts in this run; ask for less, "
            "or for more prompts"
        )


def serve(
    pair: Pair,
    prompts: Group,
    drafted: Drafted,
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    seed: int,
    sizes: Sequence[int],
) -> list[Served]:
    """Measure every concurrency of `sizes` on groups of these prompts."""
    decoder = SpeculativeDecoder(pair.target, pair.drafter)

    def plain(group: Group, first: int) -> list[list[int]]:
        return generate_batch(
            pair.target,
            group,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            indices=range(first, first + len(group)),
        )

    def speculative(group: Group, first: int) -> list[list[int]]:
        requests = [
            Request(prompt, max_new_tokens, seed=seed, index=first + place)
            for place, prompt in enumerate(group)
        ]
        found = decoder.generate_many(
            requests,
            sampling=sampling,
            batch=len(group),
            policy=drafted.policy,
            method=drafted.method,
            relaxed=drafted.relaxed,
        )
        return [answer.tokens for answer in found]

    return [_at(pair.target, prompts, plain, speculative, size) for size in sizes]


def _at(target: Target, prompts: Group, plain: Way, speculative: Way, size: int) -> Served:
    starts = range(0, len(prompts) - size + 1, size)[:MOST_GROUPS]
    ways = (speculative, plain)
    counts: tuple[list[tuple[float, float]], ...] = ([], [])
    same = answers = 0
    for way in ways:
        way(prompts[:size], 0)
    for number, first in enumerate(starts):
        group, texts = prompts[first : first + size], {}
        order = (0, 1) if number % 2 == 0 else (1, 0)
        for which in order:
            texts[which], seconds = _timed(target, ways[which], group, first)
            counts[which].append((sum(map(len, texts[which])), seconds))
        same += sum(a == b for a, b in zip(texts[0], texts[1], strict=True))
        answers += size
    found = paired(*counts)
    return Served(
        concurrency=size,
        groups=len(starts),
        plain=found.theirs,
        speculative=found.ours,
        speedup=found.ratio,
        speedup_ci95=found.ratio_ci95 if len(starts) >= FEWEST_GROUPS else None,
        answers=answers,
        same_text=same,
    )


def _timed(target: Target, way: Way, group: Group, first: int) -> tuple[list[list[int]], float]:
    start = _now(target)
    texts = way(group, first)
    return texts, _now(target) - start


def _now(target: Target) -> float:
    """The clock once the device is done with what it was asked."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
