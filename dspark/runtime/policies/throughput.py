"""Verify while one more position raises the tokens per second that a measured cost curve promises.

    E(L) = sum_b (1 + sum_{j<=L_b} s_bj)     expected tokens of a round, s_bj = c_b1 ... c_bj
    T(n)                                     seconds of a round with n target rows in all
    next position of row b:  E + s_b,k+1     against one row more (and its siblings')

Extended while E / T grows, stopped at the first step that does not raise it. Stopping early is what
keeps it lossless: choosing the best of all lengths afterwards would look at confidences that have
seen the tokens decided about. Of a batch there are two forms, by what a target pass costs:

    padded   [B, longest] rows: all rows take the next position together or none does
    packed   as many rows as there are tokens: the row with the best next position goes first, again
             and again (the greedy allocation by survival of the DSpark paper)

`Delayed` decides before it drafts, from the survival curves of earlier rounds (rejected and
unverified tokens included), and so may take the best of all lengths. It is what a verify slot of
fixed size needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.cost_model import CostModel
from dspark.runtime.policies.frontier import Frontier
from dspark.runtime.policies.walk import Limits
from dspark.runtime.records import Band, RoundRecord


@dataclass(frozen=True)
class Throughput(Limits):
    """cost  the curve T; packed  whether a target pass pays for its tokens alone, not for padding
    rescue  chance that siblings save a rejected position, in the estimate of E alone
    """

    name: ClassVar[str] = "throughput"
    needs_confidence: ClassVar[bool] = True

    cost: CostModel = field(kw_only=True)
    packed: bool = False
    rescue: float = 0.3

    def plan(self, frontier: Frontier) -> None:
        batch = frontier.position.shape[0]
        drafted = frontier.slots
        seconds = _round_seconds(self.cost, batch, drafted, frontier.position.device)
        walk = _Walk(frontier, seconds, self.rescue)
        longest = min(drafted, self.draft_length(drafted))
        least = min(self.min_draft, longest)
        for _ in range(least):
            walk.take(frontier.open)
        if self.packed:
            _allocate(walk, longest, batch * (longest - least))
        else:
            _together(walk, longest - least)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "cost": self.cost.summary()}


class _Walk:
    """Expected tokens and rows of what has been extended so far."""

    def __init__(self, frontier: Frontier, seconds: Tensor, rescue: float) -> None:
        self.frontier = frontier
        self.seconds = seconds
        self.rescue = rescue
        self.survival = torch.ones_like(frontier.confidence)
        self.expected = frontier.open.sum().float()

    def gain(self) -> Tensor:
        """[B] expected tokens of the next position: its primary, or a sibling in its place."""
        confidence = self.frontier.confidence
        saved = torch.where(self.frontier.width > 1, (1 - confidence) * self.rescue, 0.0)
        return self.survival * torch.where(self.frontier.open, confidence + saved, 0.0)

    def time(self, rows: Tensor) -> Tensor:
        """Seconds of a round with that many target rows in all."""
        return self.seconds[rows.clamp(max=self.seconds.shape[0] - 1)]

    def take(self, rows: Tensor) -> None:
        """Extend these rows [B]."""
        rows = rows & self.frontier.open
        self.expected = self.expected + torch.where(rows, self.gain(), 0.0).sum()
        self.survival = torch.where(rows, self.survival * self.frontier.confidence, self.survival)
        self.frontier.extend(rows)


def _together(walk: _Walk, steps: int) -> None:
    """All open rows, one position each, while the whole batch gains by it."""
    frontier, batch = walk.frontier, walk.survival.shape[0]
    go = torch.ones((), dtype=torch.bool, device=walk.survival.device)
    for _ in range(steps):
        wider = torch.where(frontier.open, frontier.rows + frontier.width, frontier.rows)
        now, then = batch * frontier.rows.max(), batch * wider.max()
        more = walk.expected + walk.gain().sum()
        go = go & (more * walk.time(now) > walk.expected * walk.time(then))
        if go.device.type == "cpu" and not bool(go):
            return
        walk.take(frontier.open & go)


def _allocate(walk: _Walk, longest: int, steps: int) -> None:
    """The row with the most expected tokens for its rows goes first, until nobody gains."""
    frontier = walk.frontier
    index = torch.arange(walk.survival.shape[0], device=walk.survival.device)
    go = torch.ones((), dtype=torch.bool, device=walk.survival.device)
    for _ in range(steps):
        candidates = frontier.open & (frontier.position < longest)
        gain = torch.where(candidates, walk.gain(), 0.0)
        best = (gain / frontier.width).argmax()
        rows = frontier.rows.sum()
        more = walk.expected + gain[best]
        time = walk.time(rows + frontier.width[best])
        go = go & candidates[best] & (more * walk.time(rows) > walk.expected * time)
        if go.device.type == "cpu" and not bool(go):
            return
        walk.take((index == best) & go)


@lru_cache(maxsize=64)
def _round_seconds(cost: CostModel, batch: int, drafted: int, device: torch.device) -> Tensor:
    """[n] float32: seconds of a round by its target rows in all, up to twice a block's siblings."""
    most = batch * (1 + 3 * drafted)
    values = [cost.round_s(drafted, max(rows / batch, 1.0), batch) for rows in range(most + 1)]
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


class Delayed:
    """The length of the next round, from earlier rounds only.

        S_j <- (1 - weight) S_j + weight c_1 ... c_j      after every round, all drafted positions
        L    = argmax_L (1 + S_1 + ... + S_L) / T(1 + L)

    S starts at `start` (acceptance by slot, multiplied up), or at 1: the first round is then as
    long as a round may be. `fresh` forgets S.
    """

    name = "throughput-delayed"
    siblings = 0
    needs_confidence = True

    def __init__(
        self,
        cost: CostModel,
        *,
        start: tuple[float, ...] | None = None,
        weight: float = 0.3,
        batch: int = 1,
        limits: tuple[int, int | None] = (2, None),
    ) -> None:
        if not 0 < weight <= 1:
            raise UserError(f"weight: expected 0 < weight <= 1, got {weight}")
        self.cost, self.start, self.weight, self.batch = cost, start, weight, batch
        self.bounds = Throughput(*limits, cost=cost)
        self.survival: list[float] | None = None if start is None else _products(start)

    def draft_length(self, block_size: int) -> int:
        """The whole width: what is drafted and not verified still teaches."""
        return self.bounds.draft_length(block_size)

    def length(self, slots: int) -> int:
        """What the next round verifies of a draft of that many slots."""
        low = min(self.bounds.min_draft, slots)
        if self.survival is None:
            return slots
        rates = {}
        for length in range(low, slots + 1):
            tokens = 1 + sum(self.survival[:length])
            rates[length] = tokens / self.cost.round_s(slots, 1 + length, self.batch)
        return max(rates, key=lambda length: (rates[length], -length))

    def plan(self, frontier: Frontier) -> None:
        frontier.extend_unseen(self.length(frontier.slots))

    def observe(self, record: RoundRecord) -> None:
        if record.drafted == 0:
            return  # nothing was seen, in a first round too
        seen = _products(record.confidence)
        known = self.survival or []
        mixed = [old + self.weight * (new - old) for old, new in zip(known, seen, strict=False)]
        # a round near the end of an answer is short: what it did not draft stays as it was
        longer = known if len(known) > len(seen) else seen
        self.survival = [*mixed, *longer[len(mixed) :]]

    def bands(self, confidence: Sequence[float]) -> tuple[Band, ...]:
        """Nothing here depends on a band."""
        return ()

    def fresh(self) -> Delayed:
        bounds = (self.bounds.min_draft, self.bounds.max_draft)
        return Delayed(
            self.cost, start=self.start, weight=self.weight, batch=self.batch, limits=bounds
        )

    def settings(self) -> dict[str, Any]:
        return {
            **self.bounds.settings(),
            "name": self.name,
            "weight": self.weight,
            "start": None if self.start is None else list(self.start),
        }


def _products(chances: tuple[float, ...]) -> list[float]:
    products, total = [], 1.0
    for chance in chances:
        total *= chance
        products.append(total)
    return products
