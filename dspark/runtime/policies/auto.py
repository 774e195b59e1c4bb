"""Speculate where it pays, decode plainly where it does not, and look again now and then.

    speculating   after each `window` rounds:  pays  <=>  tokens / seconds > 1 / plain
    plain         for `pause` steps, then `probe` rounds are speculated; if those do not pay, the
                  next pause is twice as long, up to `longest_pause`; if they do, speculation is on
                  again and the pause is back at its first length
    plain         seconds of a plain step: a running mean of those taken, from the cost model until
                  there is one; where neither is known, `gauge` plain steps are taken at first need

Seconds are those of the rounds themselves, so that whatever else the machine does is in them. A
request starts by speculating, and what was learnt of its text ends with it; how long a plain step
takes is a fact of the machine and goes on to the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.errors import UserError
from dspark.runtime.cost_model import CostModel
from dspark.runtime.policies.frontier import Frontier, Policy
from dspark.runtime.records import Band, RoundRecord

Mode = Literal["speculating", "gauging", "plain", "probing"]


@dataclass(frozen=True)
class AutoSettings:
    """window, probe, gauge, pause, longest_pause  counts of rounds or plain steps, 1 or more
    weight  of a new plain step in the running mean
    """

    window: int = 16
    probe: int = 8
    gauge: int = 2
    pause: int = 64
    longest_pause: int = 1024
    weight: float = 0.1

    def __post_init__(self) -> None:
        counts = (self.window, self.probe, self.gauge, self.pause)
        if min(counts) < 1 or self.longest_pause < self.pause or not 0 < self.weight <= 1:
            raise UserError(
                "auto: expected window, probe, gauge and pause of 1 or more, longest_pause >= "
                f"pause and 0 < weight <= 1; got {self}"
            )


@dataclass
class _Tally:
    """Rounds since a decision."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class PlainStep:
    """Seconds of a plain step: shared by all requests of one policy."""

    seconds: float | None = None
    measured: int = 0

    def add(self, seconds: float, weight: float) -> None:
        old = self.seconds if self.measured else None
        self.seconds = seconds if old is None else old + weight * (seconds - old)
        self.measured += 1


@dataclass
class Auto:
    """`inner` or plain decoding, whichever is faster.

    inner     the policy that speculates
    cost      gives the first idea of a plain step; None: it is measured
    """

    inner: Policy
    cost: CostModel | None = None
    rules: AutoSettings = field(default_factory=AutoSettings)
    plain: PlainStep = field(default_factory=PlainStep)

    name = "auto"

    def __post_init__(self) -> None:
        if self.cost is not None and self.plain.seconds is None:
            self.plain.seconds = self.cost.plain_s()
        self.mode: Mode = "speculating"
        self.pause = self.rules.pause
        self._tally = _Tally()

    @property
    def siblings(self) -> int:
        return self.inner.siblings

    @property
    def needs_confidence(self) -> bool:
        return self.inner.needs_confidence

    def draft_length(self, block_size: int) -> int:
        return 0 if self.mode in ("plain", "gauging") else self.inner.draft_length(block_size)

    def plan(self, frontier: Frontier) -> None:
        self.inner.plan(frontier)

    def observe(self, record: RoundRecord) -> None:
        seconds = record.draft_s + record.verify_s + record.other_s
        plainly = record.drafted == 0
        if plainly:
            self.plain.add(seconds, self.rules.weight)
        else:
            self.inner.observe(record)
        if plainly == (self.mode in ("plain", "gauging")):  # the last token of an answer is plain
            self._tally.rounds += 1
            self._tally.tokens += record.emitted
            self._tally.seconds += seconds
            self._decide()

    def bands(self, confidence: Sequence[float]) -> tuple[Band, ...]:
        return self.inner.bands(confidence)

    def fresh(self) -> Auto:
        return Auto(self.inner.fresh(), self.cost, self.rules, self.plain)

    def settings(self) -> dict[str, Any]:
        rules = {name: getattr(self.rules, name) for name in AutoSettings.__dataclass_fields__}
        return {"name": self.name, **rules, "inner": self.inner.settings()}

    def _decide(self) -> None:
        """At the end of a window, a pause or a probe: what comes next."""
        rules, mode = self.rules, self.mode
        ends = {
            "speculating": rules.window,
            "probing": rules.probe,
            "gauging": rules.gauge,
            "plain": self.pause,
        }
        if self._tally.rounds < ends[mode]:
            return
        if mode == "plain":
            self._enter("probing")
        elif mode == "gauging":
            self._enter("speculating")
        elif self.plain.seconds is None:
            self._enter("gauging")
        elif self._tally.tokens * self.plain.seconds > self._tally.seconds:
            self.pause = rules.pause
            self._enter("speculating")
        else:
            self.pause = (
                min(2 * self.pause, rules.longest_pause) if mode == "probing" else self.pause
            )
            self._enter("plain")

    def _enter(self, mode: Mode) -> None:
        self.mode = mode
        self._tally = _Tally()
