"""Which recorded frame comes next, from letters of frames that have ended.

    sizes       0 (a plain step), 1, 2, 4 primaries, and the whole draft: a graph each; those that
                are shorter than the policy's `min_draft` are left out
    by wish     the smallest that holds the running mean of wishes (`frame_sizes`), over seats; a
                wish is what the policy would have verified of a draft, had it been sent whole
    by rate     argmax over L of  sum_b (1 + S_b1 + ... + S_bL) / T(L),  T the step-time curve, S_bk
                the running mean of how often x_1..x_k of seat b are all accepted: half what
                confidence says, c_1 c_2 .. c_k, half what became of them. 0 is a size of `auto`

`throughput` and what builds on it goes by rate, all else by wish. By rate the step-time curve says
whether a plain step is faster: of `auto` only its pauses are asked. A frame of any size drafts the
whole block, so that a small one tells whether a larger one would pay. The letters of frames up to
n - 2 are read when frame n is queued: the choice waits for nothing and sees nothing of what it
decides about, so every policy leaves the law as it is.

Letters: B seats, G drafted, L primaries sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

import torch

from dspark.errors import UserError
from dspark.runtime.cost_model import CostModel
from dspark.runtime.frame_sizes import Wish
from dspark.runtime.policies.auto import Auto, AutoSettings
from dspark.runtime.policies.frontier import Policy, plan_block
from dspark.runtime.policies.throughput import Delayed, Throughput
from dspark.runtime.policies.walk import Limits
from dspark.runtime.records import Proposal, RoundRecord
from dspark.runtime.requests import Outcome

SMALL = (1, 2, 4)
PAUSES = ("pause", "longest_pause")
"""Settings of `auto` that mean something where the step-time curve decides."""


def frame_sizes(policy: Policy, block: int, small: Sequence[int] = SMALL) -> tuple[int, ...]:
    """Ascending sizes that a policy's frames are recorded in; 0 for one that may not speculate.

    Those of `small` from its shortest to its longest draft, and the longest. Raises UserError for a
    policy that a frame cannot serve, and for sizes that are none.
    """
    if any(size < 1 for size in small):
        raise UserError(f"sizes {list(small)}: expected primaries of a frame, 1 or more")
    _check(policy)
    inner = _inner(policy)
    most = min(inner.draft_length(block), block)
    if policy.name == "fixed":
        return (most,)
    plain = (0,) if isinstance(policy, Auto) else ()
    return (*plain, *sorted({size for size in small if _least(inner) <= size < most}), most)


def _inner(policy: Policy) -> Policy:
    """What speculates."""
    return policy.inner if isinstance(policy, Auto) else policy


def _least(inner: Policy) -> int:
    """Primaries that are verified whatever the rule says."""
    bounds = inner.bounds if isinstance(inner, Delayed) else inner
    return bounds.min_draft if isinstance(bounds, Limits) else 1


def _check(policy: Policy) -> None:
    """Raises UserError for what a frame cannot serve."""
    if policy.siblings:
        raise UserError("policy: recorded frames have no rows for siblings; leave out the bands")
    inner = _inner(policy)
    if isinstance(inner, Throughput) and inner.packed:
        raise UserError(
            "throughput: recorded frames pay for all rows of all seats; leave out packed"
        )
    if isinstance(policy, Auto) and _by_rate(inner):
        usual, given = AutoSettings(), policy.rules
        names = [name for name in vars(usual) if name not in PAUSES]
        other = [name for name in names if getattr(given, name) != getattr(usual, name)]
        if other:
            raise UserError(
                f"auto: recorded frames of {inner.name} go by the step times of its cost model; "
                f"leave out {', '.join(other)}"
            )


def _by_rate(inner: Policy) -> bool:
    return isinstance(inner, (Throughput, Delayed))


class SizeRule(Protocol):
    """Chooses sizes for the frames of a decoder's seats, request after request."""

    def join(self, seat: int) -> None:
        """A new text takes the seat."""
        ...

    def next(self, seats: Sequence[int]) -> int:
        """The size of a frame for the texts in these seats."""
        ...

    def learn(self, said: Mapping[int, Outcome]) -> None:
        """What a frame said of its drafts, by seat."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """A round of one seat, once its text has taken it."""
        ...


def size_rule(policy: Policy, sizes: Sequence[int], seats: int, block: int) -> SizeRule:
    """The rule that a policy's frames go by."""
    inner = _inner(policy)
    if not isinstance(inner, (Throughput, Delayed)):
        return ByWish(policy, sizes, seats, block)
    rules = policy.rules if isinstance(policy, Auto) else AutoSettings()
    pauses = rules.pause, rules.longest_pause
    if isinstance(inner, Throughput):
        return ByRate(inner.cost, sizes, seats, pauses)
    start = None if inner.start is None else list(accumulate(inner.start, mul))
    return ByRate(inner.cost, sizes, seats, pauses, weight=inner.weight, start=start)


class ByWish:
    """What the policy itself learns of a text ends with it where there is one seat."""

    def __init__(self, policy: Policy, sizes: Sequence[int], seats: int, block: int) -> None:
        self._policy, self._block = policy.fresh(), block
        self._drafting = tuple(size for size in sizes if size)
        self._wishes = [Wish() for _ in range(seats)]

    def join(self, seat: int) -> None:
        self._wishes[seat] = Wish()
        if len(self._wishes) == 1:
            self._policy = self._policy.fresh()

    def next(self, seats: Sequence[int]) -> int:
        if not self._drafting or not self._policy.draft_length(self._block):
            return 0
        return max(self._wishes[seat].size(self._drafting) for seat in seats)

    def learn(self, said: Mapping[int, Outcome]) -> None:
        drafts = {seat: x for seat, x in said.items() if len(x.entropy)}
        if len(self._drafting) < 2 or not drafts:
            return
        slots = max(len(x.entropy) for x in drafts.values())
        confident = all(len(x.confidence) for x in drafts.values())
        proposal = Proposal(
            torch.zeros(len(drafts), slots, dtype=torch.int64),
            None,
            _table([x.confidence for x in drafts.values()], slots) if confident else None,
            _table([x.entropy for x in drafts.values()], slots),
        )
        limits = torch.tensor([len(x.entropy) for x in drafts.values()])
        wished = plan_block(self._policy, proposal, limits)
        for seat, wanted in zip(drafts, wished.lengths.tolist(), strict=True):
            self._wishes[seat].learn(wanted)

    def observe(self, record: RoundRecord) -> None:
        self._policy.observe(record)


class ByRate:
    """The size of most expected tokens per second.

    Args:
        cost: Its plain step is the frame of size 0, its rounds are those that draft all slots.
        pauses: Plain frames before the next look at a draft, the first time and at most; twice as
            many after each look that changes nothing.
        weight, slow: Of a new draft in the running means of its seat and of all seats, with which
            a new text starts.
        start: S_1, S_2, .. of the first texts; None: their first frame is of the largest size.
    """

    def __init__(
        self,
        cost: CostModel,
        sizes: Sequence[int],
        seats: int,
        pauses: tuple[int, int],
        weight: float = 0.3,
        slow: float = 0.05,
        start: list[float] | None = None,
    ) -> None:
        most = sizes[-1]
        self._seconds = {
            size: cost.round_s(most, 1 + size, seats) if size else cost.plain_s(seats)
            for size in sizes
        }
        self._pauses, self._weight, self._slow = pauses, weight, slow
        self._pause, self._plain = pauses[0], 0
        self._all = start
        self._survival: list[list[float] | None] = [start] * seats

    def join(self, seat: int) -> None:
        self._survival[seat] = None if self._all is None else list(self._all)

    def next(self, seats: Sequence[int]) -> int:
        if any(self._survival[seat] is None for seat in seats):
            return max(self._seconds)
        best = max(self._seconds, key=lambda size: (self._rate(size, seats), -size))
        if best:
            self._pause, self._plain = self._pauses[0], 0
            return best
        self._plain += 1
        if self._plain <= self._pause:
            return 0
        self._pause, self._plain = min(2 * self._pause, self._pauses[1]), 0
        drafting = [size for size in self._seconds if size]
        return max(drafting, key=lambda size: (self._rate(size, seats), -size))

    def _rate(self, size: int, seats: Sequence[int]) -> float:
        tokens = sum(1 + sum((self._survival[seat] or [])[:size]) for seat in seats)
        return tokens / self._seconds[size]

    def learn(self, said: Mapping[int, Outcome]) -> None:
        for seat, outcome in said.items():
            seen = _survived(outcome)
            if not seen:
                continue
            self._survival[seat] = _mixed(self._survival[seat], seen, self._weight)
            self._all = _mixed(self._all, seen, self._slow)

    def observe(self, record: RoundRecord) -> None:
        """The letter has told enough."""


def _survived(outcome: Outcome) -> list[float]:
    """By slot, half its chance of being reached and accepted, half whether it was; behind what was
    sent whole and accepted, confidence alone goes on."""
    chances: list[float] = list(accumulate(outcome.confidence, mul))
    happened: list[float] = []
    for slot, confidence in enumerate(outcome.confidence):
        if slot < outcome.accepted:
            happened.append(1.0)
        elif slot < outcome.length or outcome.accepted < outcome.length:
            happened.append(0.0)
        else:
            happened.append(confidence * (happened[-1] if happened else 1.0))
    return [(a + b) / 2 for a, b in zip(chances, happened, strict=True)]


def _mixed(known: list[float] | None, seen: list[float], weight: float) -> list[float]:
    """A running mean; near the end of a text fewer slots are seen, the others stay as they were."""
    if known is None:
        return seen
    mixed = [old + weight * (new - old) for old, new in zip(known, seen, strict=False)]
    longer = known if len(known) > len(seen) else seen
    return [*mixed, *longer[len(mixed) :]]


def _table(rows: Sequence[Sequence[float]], slots: int) -> torch.Tensor:
    """[B, slots] float32, zero behind the end of a row."""
    return torch.tensor([[*row, *[0.0] * (slots - len(row))] for row in rows])
