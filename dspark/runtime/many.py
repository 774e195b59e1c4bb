"""Many requests in one batch, each at its own pace: ragged rounds, rows that leave and join.

Every request reads its prompt alone and then takes a seat; when its text ends, the next one that
waits takes that seat, and when nobody waits the batch shrinks. Its draws are its own and its cut
depends on itself alone, so its text does not depend on who sits beside it: in float32 its logits
are those of another shape of the same products, equal to rounding, its tokens the same.

A policy that shares one budget among the rows (`throughput`) or learns from all of them
(`throughput-delayed`, `auto`) is the exception that its own page names: there a neighbour may
change where a block is cut, which keeps the law and not the sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dspark.errors import UserError
from dspark.runtime.prefill import clock
from dspark.runtime.records import Generation
from dspark.runtime.requests import Text
from dspark.runtime.rounds import Rounds
from dspark.runtime.sampling import BadLogits
from dspark.runtime.seats import Seats

Begin = Callable[[Text], Seats]
"""Reads one prompt and emits its first token: a batch of one."""


class Many:
    """A list of texts on their way through a batch of at most `batch` rows."""

    def __init__(self, rounds: Rounds, texts: Sequence[Text], batch: int, begin: Begin) -> None:
        if batch < 1:
            raise UserError(f"batch: expected at least 1 row, got {batch}")
        self.rounds = rounds
        self._begin = begin
        self._texts = texts
        self._waiting = deque(texts)
        self._rows = min(batch, len(texts))
        self._times: dict[int, tuple[float, float]] = {}
        self._done: dict[int, Generation] = {}

    def run(self) -> list[Generation]:
        """Decode all of them; the results are in the order of the texts.

        One whose logits are not finite ends there, and nobody beside it notices.
        """
        seats = self._open()
        while seats is not None:
            self.rounds.run(seats)
            seats = self._turn(seats)
        done = [self._done[id(text)] for text in self._texts]
        return [
            each if each.fault is None else replace(each, fault=each.fault.located([0], [number]))
            for number, each in enumerate(done)
        ]

    def _open(self) -> Seats | None:
        """The first batch; None if every text ended with its first token."""
        first = [alone for _ in range(self._rows) if (alone := self._next()) is not None]
        if len(first) < 2:
            return first[0] if first else None
        longest = max(text.request.max_length for text in self._texts)
        target, drafter = self.rounds.target, self.rounds.drafter
        # a row at the very end of its text pads its pass like all others
        room = 1 + self.rounds.block + self.rounds.sibling_rows
        cache = target.new_cache(len(first), longest + room)
        context = drafter.new_context(len(first), longest)
        anchor = torch.cat([alone.anchor for alone in first])
        seats = Seats(cache, context, anchor, [alone.texts[0] for alone in first])
        for row, alone in enumerate(first):
            cache.put(row, alone.cache)
            context.put(row, alone.context)
        return seats

    def _turn(self, seats: Seats) -> Seats | None:
        """Seats given up by finished texts go to waiting ones, or are taken away."""
        live: list[int] = []
        for row, text in enumerate(seats.texts):
            if text.finished:
                self._finish(text)
                alone = self._next()
                if alone is None:
                    continue
                if len(seats.texts) == 1:
                    return alone
                seats.put(row, alone)
            live.append(row)
        if not live:
            return None
        if len(live) < len(seats.texts):
            seats.select(live)
        return seats

    def _next(self) -> Seats | None:
        """The next waiting text that goes on after its first token, its prompt read."""
        device = self.rounds.target.device
        while self._waiting:
            text = self._waiting.popleft()
            start, alone = clock(device), None
            try:
                alone = self._begin(text)
            except BadLogits as error:
                text.fail(error)
            self._times[id(text)] = (start, clock(device))
            if not text.finished:
                return alone
            self._finish(text)
        return None

    def _finish(self, text: Text) -> None:
        start, decoding = self._times[id(text)]
        spent = clock(self.rounds.target.device) - decoding
        self._done[id(text)] = text.generation(decoding - start, spent)
