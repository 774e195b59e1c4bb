"""Requests on their way through the seats of a `GraphDecoder`.

    fill     read prompts for empty seats
    queue    frame n
    read     the letter of frame n - 1, while frame n runs

The host never waits for the frame that it has just queued. A seat is empty again as soon as a
letter says that its text has ended; by then the frame in flight ran it as an idle one.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dspark import ops
from dspark.runtime.faults import raise_fault
from dspark.runtime.lanes import Mail, Span
from dspark.runtime.prefill import clock
from dspark.runtime.records import ALL_ACCEPTED, CUT, Generation
from dspark.runtime.requests import Outcome, Spent, Text
from dspark.runtime.sampling import text_positions
from dspark.runtime.seats import outcome_of

if TYPE_CHECKING:
    from dspark.runtime.graph_decode import GraphDecoder


@dataclass(eq=False)
class _Flying:
    """A frame that was queued; its letter is on its way."""

    texts: tuple[Text | None, ...]
    size: int
    mail: Mail
    span: Span


class GraphRun:
    """Requests on their way through the seats of a decoder."""

    def __init__(self, decoder: GraphDecoder, texts: list[Text]) -> None:
        self.decoder, self.texts = decoder, texts
        self.seated: list[Text | None] = [None] * decoder.seats.batch
        self.waiting = deque(texts)
        self.flying: deque[_Flying] = deque()
        self.started: dict[Text, tuple[float, float]] = {}
        self.ended: dict[Text, float] = {}

    def finish(self) -> list[Generation]:
        """Run until every text has ended."""
        decoder = self.decoder
        device = decoder.target.device
        try:
            while self.waiting or self.flying or any(self.seated):
                self._fill()
                if any(self.seated):
                    self._queue()
                while len(self.flying) > (1 if any(self.seated) else 0):
                    self._read(self.flying.popleft())
        finally:
            for seat, text in enumerate(self.seated):
                if text is not None:
                    decoder.empty(seat)
        clock(device)
        return [
            text.generation(self.started[text][1] - self.started[text][0], self._decode_s(text))
            for text in self.texts
        ]

    def _decode_s(self, text: Text) -> float:
        return self.ended.get(text, self.started[text][1]) - self.started[text][1]

    def _fill(self) -> None:
        for seat in range(len(self.seated)):
            while self.waiting and self.seated[seat] is None:
                text = self.waiting.popleft()
                start = clock(self.decoder.target.device)
                self.decoder.join(seat, text)
                self.started[text] = (start, clock(self.decoder.target.device))
                if not text.finished:
                    self.seated[seat] = text
                    self.decoder.rule.join(seat)

    def _queue(self) -> None:
        decoder = self.decoder
        size = decoder.rule.next(
            [seat for seat, text in enumerate(self.seated) if text is not None]
        )
        with decoder.lanes.here() as span:
            result = decoder.turns.run(size)
        if decoder.on_frame is not None:
            decoder.on_frame(result)
        self.flying.append(_Flying(tuple(self.seated), size, Mail.send(result.letter), span))

    def _read(self, frame: _Flying) -> None:
        table, _ = frame.mail.read()
        decoder, seconds = self.decoder, frame.span.seconds()
        decoder.frame_s.append(seconds)
        decoder.frame_sizes.append(frame.size)
        said = self._outcomes(frame, table)
        decoder.rule.learn(said)
        spent = Spent(0.0, seconds, 0.0, frame.size + 1)
        for seat, outcome in said.items():
            text = self.seated[seat]
            assert text is not None
            count = text.take(outcome)
            if decoder.drafter is not None:
                text.rounds.append(outcome.record(count, spent))
                decoder.rule.observe(text.rounds[-1])
            if text.finished:
                self.ended[text] = time.perf_counter()
                decoder.empty(seat)
                self.seated[seat] = None

    def _outcomes(self, frame: _Flying, table: list[list[float]]) -> dict[int, Outcome]:
        """What a letter says of the texts that still run. Raises BadLogits."""
        drafter = self.decoder.drafter
        drafted = self.decoder.length if frame.size else 0
        confident = drafter is not None and drafter.confidence_head is not None
        cuts = [ops.LETTER_HEADS, drafted, drafted, drafted if confident else 0]
        said = {}
        for seat, (text, numbers) in enumerate(zip(frame.texts, table, strict=True)):
            if text is None or self.seated[seat] is not text:
                continue
            _raise(text, int(numbers[5]))
            found = outcome_of(numbers, cuts, text.left - 1)
            if found.level == ALL_ACCEPTED and found.length < len(found.tokens):
                found = replace(found, level=CUT)  # the frame ended before the draft
            said[seat] = found
        return said


def _raise(text: Text, fault: int) -> None:
    with text_positions(lambda: [text.position]):
        raise_fault([fault])
