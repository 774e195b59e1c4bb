"""Where the slots of a frame run, and how long they took, without a wait to find out.

On a CPU a slot runs when it is asked for. On CUDA drafting and verification have a stream each, so
that the draft slot of one group runs beside the verify slot of another; a slot waits, on the
device, for the slots it reads from. Times there are events, read when the frame has long ended.

Every tensor that outlives a round (caches, contexts, anchors) is made and changed in the verify
lane; the draft lane only reads them and makes proposals, which their frame holds until it is read.
No memory is therefore handed out again on one stream while the other still uses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Span:
    """One slot in time; on CUDA its end is an event that others can wait for."""

    started: float = 0.0
    ended: float = 0.0
    start_event: torch.cuda.Event | None = None
    end_event: torch.cuda.Event | None = None

    def seconds(self) -> float:
        """Of the device. On CUDA only once the slot is known to have ended."""
        if self.start_event is None or self.end_event is None:
            return self.ended - self.started
        return self.start_event.elapsed_time(self.end_event) / 1e3

    def idle_after(self, before: Span) -> float:
        """Seconds between the end of the slot queued before and the start of this one; 0 if they
        overlap. On CUDA only once both are known to have ended."""
        if before.end_event is None or self.start_event is None:
            return max(0.0, self.started - before.ended)
        return max(0.0, before.end_event.elapsed_time(self.start_event) / 1e3)


class Lanes:
    """The two lanes of a device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._draft = torch.cuda.Stream(device) if self.cuda else None
        self._verify = torch.cuda.Stream(device) if self.cuda else None
        if self._verify is not None:  # weights and whatever else was made before
            self._verify.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def draft(self, after: Span | None) -> Iterator[Span]:
        """A draft slot that starts when the slot `after` has ended."""
        with self._slot(self._draft, after) as span:
            yield span

    @contextmanager
    def verify(self, after: Span | None) -> Iterator[Span]:
        """A verify slot, or anything else that changes a group."""
        with self._slot(self._verify, after) as span:
            yield span

    @contextmanager
    def here(self) -> Iterator[Span]:
        """A slot on the current stream, behind whatever is queued there."""
        stream = torch.cuda.current_stream() if self.cuda else None
        with self._slot(stream, None) as span:
            yield span

    @contextmanager
    def _slot(self, stream: torch.cuda.Stream | None, after: Span | None) -> Iterator[Span]:
        if stream is None:
            span = Span(started=time.perf_counter())
            yield span
            span.ended = time.perf_counter()
            return
        span = Span(0.0, 0.0, *(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        if after is not None and after.end_event is not None:
            stream.wait_event(after.end_event)
        with torch.cuda.stream(stream):
            assert span.start_event is not None
            assert span.end_event is not None
            span.start_event.record(stream)
            yield span
            span.end_event.record(stream)


@dataclass(frozen=True, eq=False)
class Mail:
    """Numbers on their way to the host."""

    table: Tensor
    sent: torch.cuda.Event | None

    @classmethod
    def send(cls, table: Tensor) -> Mail:
        """Queue the copy, into pinned memory where there is a device to copy from."""
        if table.device.type != "cuda":
            return cls(table, None)
        host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
        host.copy_(table, non_blocking=True)
        sent = torch.cuda.Event()
        sent.record()
        return cls(host, sent)

    def read(self) -> tuple[list[list[float]], bool]:
        """The numbers, and whether the host had to wait for them."""
        waited = self.sent is not None and not self.sent.query()
        if self.sent is not None:
            self.sent.synchronize()
        return self.table.tolist(), waited
