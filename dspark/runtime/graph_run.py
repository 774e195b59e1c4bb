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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark import ops
from dspark.runtime.faults import raise_fault
from dspark.runtime.lanes import Mail, Span
from dspark.runtime.prefill import clock
from dspark.runtime.records import Generation
from dspark.runtime.requests import Spent, Text
from dspark.runtime.sampling import text_positions
from dspark.runtime.seats import outcome_of

if TYPE_CHECKING:
    from dspark.runtime.graph_decode import GraphDecoder


@dataclass(eq=False)
class _Flying:
    """A frame that was queued; its letter is on its way."""

    texts: tuple[Text | None, ...]
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

    def _queue(self) -> None:
        decoder = self.decoder
        with decoder.lanes.here() as span:
            result = decoder.replay.run()
        if decoder.on_frame is not None:
            decoder.on_frame(result)
        self.flying.append(_Flying(tuple(self.seated), Mail.send(result.letter), span))

    def _read(self, frame: _Flying) -> None:
        table, _ = frame.mail.read()
        drafter, drafted = self.decoder.drafter, self.decoder.length
        confident = drafter is not None and drafter.confidence_head is not None
        cuts = [ops.LETTER_HEADS, drafted, drafted, drafted if confident else 0]
        self.decoder.frame_s.append(frame.span.seconds())
        spent = Spent(0.0, self.decoder.frame_s[-1], 0.0, drafted + 1)
        for seat, (text, numbers) in enumerate(zip(frame.texts, table, strict=True)):
            if text is None or self.seated[seat] is not text:
                continue
            _raise(text, int(numbers[5]))
            outcome = outcome_of(numbers, cuts, text.left - 1)
            count = text.take(outcome)
            if drafter is not None:
                text.rounds.append(outcome.record(count, spent))
            if text.finished:
                self.ended[text] = time.perf_counter()
                self.decoder.empty(seat)
                self.seated[seat] = None


def _raise(text: Text, fault: int) -> None:
    with text_positions(lambda: [text.position]):
        raise_fault([fault])
