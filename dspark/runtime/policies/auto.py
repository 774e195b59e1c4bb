"""Speculate where it pays, decode plainly where it does not, and look again now and then.

    gain of a round = tokens - round / plain      in tokens: what plain decoding would have made in
                                                  the same time; means of the seconds of each

    speculating   until it stands `patience` tokens below the best it stood since it began
    plain         for `pause` steps
    probing       speculated rounds until they are `probe` tokens up, then it is speculating and the
                  pause at its first length again, or as many down, then plain for twice as long,
                  up to `longest_pause`
    gauging       `gauge` plain steps before anything else, where no request before has told how
                  long one takes

A round that accepts nothing loses a token or so, so that a few in a row end it, while text that
pays gains far too much in between to come near. Both times are measured here and now, not read from
a file: on a busy machine both are longer. They are running means in which one value counts for
twice the mean at most, so that a single stall decides nothing. A request starts by speculating, and
what was learnt of its text ends with it; how long a step takes here goes on to the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.errors import UserError
from dspark.runtime.policies.frontier import Frontier, Policy
from dspark.runtime.records import Band, RoundRecord

Mode = Literal["speculating", "gauging", "plain", "probing"]


@dataclass(frozen=True)
class AutoSettings:
    """patience, probe  tokens, above 0;  gauge, pause, longest_pause  plain steps, 1 or more
    weight  of a new time in a running mean
    """

    patience: float = 4.0
    probe: float = 2.0
    gauge: int = 2
    pause: int = 32
    longest_pause: int = 1024
    weight: float = 0.1

    def __post_init__(self) -> None:
        least = min(self.patience, self.probe)
        if not least > 0 or min(self.gauge, self.pause) < 1 or not 0 < self.weight <= 1:
            raise UserError(
                "auto: expected patience and probe above 0, gauge and pause of 1 or more and "
                f"0 < weight <= 1; got {self}"
            )
        if self.longest_pause < self.pause:
            raise UserError(
                f"auto: expected longest_pause of at least pause {self.pause}, got "
                f"{self.longest_pause}"
            )


STALL = 2.0
"""What a single time may count for, in means."""


@dataclass
class RunningTime:
    """A running mean of seconds that a single stall cannot move far; None before the first."""

    seconds: float | None = None

    def add(self, seconds: float, weight: float) -> None:
        mean = self.seconds
        capped = seconds if mean is None else min(seconds, STALL * mean)
        self.seconds = capped if mean is None else mean + weight * (capped - mean)


@dataclass
class Times:
    """Of a plain step and of a speculated round, on this machine: shared by all requests."""

    plain: RunningTime = field(default_factory=RunningTime)
    round: RunningTime = field(default_factory=RunningTime)


@dataclass
class Auto:
    """`inner` or plain decoding, whichever is faster.

    inner  the policy that speculates
    """

    inner: Policy
    rules: AutoSettings = field(default_factory=AutoSettings)
    times: Times = field(default_factory=Times)

    name = "auto"

    def __post_init__(self) -> None:
        known = self.times.plain.seconds is not None
        self.mode: Mode = "speculating" if known else "gauging"
        self.pause = self.rules.pause
        self._steps = 0
        self._gain = 0.0

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
        if plainly and record.target_rows > 1:
            return  # a row with nothing left to draft, in a batch that speculated
        times = self.times.plain if plainly else self.times.round
        times.add(seconds, self.rules.weight)
        if not plainly:
            self.inner.observe(record)
        if plainly and self.mode in ("plain", "gauging"):
            self._count()
        elif not plainly and self.mode in ("speculating", "probing"):
            self._judge(record.emitted)

    def bands(self, confidence: Sequence[float]) -> tuple[Band, ...]:
        return self.inner.bands(confidence)

    def fresh(self) -> Auto:
        return Auto(self.inner.fresh(), self.rules, self.times)

    def settings(self) -> dict[str, Any]:
        rules = {name: getattr(self.rules, name) for name in AutoSettings.__dataclass_fields__}
        return {"name": self.name, **rules, "inner": self.inner.settings()}

    def _count(self) -> None:
        """A plain step was taken: is it time to speculate?"""
        self._steps += 1
        if self.mode == "gauging" and self._steps >= self.rules.gauge:
            self._enter("speculating")
        elif self.mode == "plain" and self._steps >= self.pause:
            self._enter("probing")

    def _judge(self, tokens: int) -> None:
        """A round was speculated: does it go on?"""
        spent, plain = self.times.round.seconds, self.times.plain.seconds
        assert spent is not None  # this round's at least
        assert plain is not None  # gauging comes first
        rules, probing = self.rules, self.mode == "probing"
        self._gain += tokens - spent / plain
        if not probing:
            self._gain = min(self._gain, 0.0)  # what was gained before is no reason to go on
        if probing and self._gain >= rules.probe:
            self.pause = rules.pause
            self._enter("speculating")
        elif self._gain <= -(rules.probe if probing else rules.patience):
            if probing:
                self.pause = min(2 * self.pause, rules.longest_pause)
            self._enter("plain")

    def _enter(self, mode: Mode) -> None:
        self.mode = mode
        self._steps = 0
        self._gain = 0.0
