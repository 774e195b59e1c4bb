"""The end of a frame on the device against the host's own reading of the same verdict."""

from __future__ import annotations

import random

import torch

from dspark.runtime.ending import Ending
from dspark.runtime.frame_step import keep, marks
from dspark.runtime.records import CORRECTED, SIBLING, Verdict
from dspark.runtime.requests import Outcome

SENT, VOCAB = 4, 6


def test_the_device_keeps_what_the_host_emits() -> None:
    """Ends in primaries, siblings and bonus, and texts whose last token comes with a round."""
    rng = random.Random(0)
    cases = [_case(rng) for _ in range(600)]
    outcomes, ends, lefts = zip(*cases, strict=True)
    kept = keep(
        torch.tensor([outcome.tokens for outcome in outcomes]),
        _verdict(outcomes),
        torch.tensor(lefts),
        torch.stack([marks(some, torch.empty(VOCAB)) for some in ends]),
    )
    for row, (outcome, some, left) in enumerate(cases):
        if left == 0:  # an idle row
            assert kept.count[row] == kept.left[row] == 0
            continue
        ending = Ending(frozenset(some), left)
        emitted = ending.cut(outcome.emission())
        assert kept.count[row] == len(emitted)
        assert kept.left[row] == (0 if ending.finish else left - len(emitted))


def _case(rng: random.Random) -> tuple[Outcome, list[int], int]:
    accepted = rng.randint(0, SENT)
    sibling = rng.randrange(VOCAB) if accepted < SENT and rng.random() < 0.5 else -1
    outcome = Outcome(
        accepted=accepted,
        next_token=rng.randrange(VOCAB),
        level=CORRECTED if sibling < 0 else SIBLING,
        sibling=sibling,
        sibling_row=SENT + 1 if sibling >= 0 else -1,
        length=SENT,
        tokens=[rng.randrange(VOCAB) for _ in range(SENT)],
        confidence=(),
        entropy=(),
        distance=(),
    )
    ends = rng.sample(range(VOCAB), rng.randint(0, VOCAB))
    return outcome, ends, rng.choice([0, SENT + 1, SENT + 2, 50])


def _verdict(outcomes: tuple[Outcome, ...]) -> Verdict:
    names = ("accepted", "next_token", "level", "sibling", "sibling_row")
    columns = [torch.tensor([getattr(outcome, name) for outcome in outcomes]) for name in names]
    return Verdict(*columns, fault=torch.zeros(len(outcomes), dtype=torch.int64))
