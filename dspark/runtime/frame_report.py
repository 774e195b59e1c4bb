"""What a frame scheduler tells: of each request, of each slot, and of all frames together."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from dspark.errors import UserError
from dspark.runtime.lanes import Span
from dspark.runtime.records import Generation
from dspark.runtime.requests import Text

if TYPE_CHECKING:
    from dspark.runtime.frame_group import Frame

REMEMBERED = 10_000
"""Frames whose times are kept for the percentiles."""


@dataclass(frozen=True)
class Slot:
    """Something that was queued or read: of which group and frame, and how many primaries."""

    group: int
    frame: int
    kind: Literal["draft", "verify", "read"]
    size: int


class Handle:
    """A request on its way. `tokens` grow as frames are read."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.cancelled = False
        self.error: UserError | None = None
        self._seated = self._decoding = self._ended = 0.0

    def seated(self) -> None:
        """Its prompt is about to be read."""
        self._seated = self._decoding = self._ended = time.perf_counter()

    def decoding(self) -> None:
        """Its prompt was read."""
        self._decoding = self._ended = time.perf_counter()

    def ended(self) -> None:
        """Its last frame was read."""
        self._ended = time.perf_counter()

    @property
    def tokens(self) -> list[int]:
        """What was read so far."""
        return self.text.tokens

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.text.finished or self.cancelled or self.error is not None

    def generation(self) -> Generation:
        """The finished text. Raises what ended it, if that was an error, and UserError if it was
        cancelled."""
        if self.error is not None:
            raise self.error
        if self.cancelled:
            raise UserError("this request was cancelled: it has `tokens`, but no finished text")
        return self.text.generation(self._decoding - self._seated, self._ended - self._decoding)


@dataclass(frozen=True)
class FrameReport:
    """Frames since a scheduler was made; None where there is nothing to measure.

    frames        read so far;  tokens  of requests that have left, first tokens included
    frame_ms_p50, frame_ms_p99   draft and verify slot of a frame, of the last `REMEMBERED` frames
    idle_s        between slots, whatever the host did then but read prompts
    host_syncs    waits of the host: for a prompt's first token, and for a frame that had not ended
                  when it was to be read (never, on a CPU). What a target does inside is its own
    rows_per_frame  of the verify slot, for each seat of the group
    """

    frames: int
    tokens: int
    frame_ms_p50: float | None
    frame_ms_p99: float | None
    idle_s: float
    host_syncs: int
    rows_per_frame: float | None

    @property
    def host_syncs_per_token(self) -> float | None:
        return self.host_syncs / self.tokens if self.tokens else None


class FrameTimes:
    """Collects what a `FrameReport` says. Slots are given in the order they were queued in."""

    def __init__(self) -> None:
        self.tokens = self.host_syncs = 0
        self._frames = self._rows = 0
        self._idle = 0.0
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._last: Span | None = None
        self._gaps: deque[tuple[Span, Span]] = deque()

    def queued(self, span: Span) -> None:
        """A slot, or reading a prompt."""
        if self._last is not None:
            self._gaps.append((self._last, span))
        self._last = span

    def read(self, frame: Frame, waited: bool) -> None:
        """A frame has ended, and everything that was queued before it."""
        assert frame.verified is not None
        self._frames += 1
        self._rows += frame.rows
        self.host_syncs += waited
        self._seconds.append(frame.drafted.seconds() + frame.verified.seconds())
        while self._gaps:
            before, span = self._gaps.popleft()
            self._idle += span.idle_after(before)
            if span is frame.verified:
                break

    def report(self) -> FrameReport:
        times = torch.tensor(self._seconds, dtype=torch.float64)
        p50, p99 = (
            (float(times.quantile(q)) * 1e3 if self._seconds else None) for q in (0.5, 0.99)
        )
        rows = self._rows / self._frames if self._frames else None
        return FrameReport(self._frames, self.tokens, p50, p99, self._idle, self.host_syncs, rows)
