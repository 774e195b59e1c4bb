"""The recorded frames of a decoder, in turns.

    drafting frame    leaves the rows that it accepted in the target's slots
    plain frame       folds its row at once; the first one behind a draft those rows as well
    reading           of the taps that plain frames left, by the draft context: before a draft, and
                      where their places are full

So a plain frame costs what it costs where nobody drafts, but for its taps. The host knows which
frames it has queued; it asks the device for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from dspark.runtime.graph_replay import Replay
from dspark.runtime.graph_taps import PLACES

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Between(Generic[Result]):
    """What plain frames among drafting ones need: the first one behind a draft, and reading."""

    first: Replay[Result]
    read: Replay[None]


class Turns(Generic[Result]):
    """Frames by their primaries; ``between`` None: they are all plain, or all draft."""

    def __init__(
        self, frames: dict[int, Replay[Result]], between: Between[Result] | None = None
    ) -> None:
        self.frames, self._between = frames, between
        self._waits, self._unread = False, 0

    def run(self, size: int) -> Result:
        """Queue the next frame and what has to come before it."""
        between = self._between
        if between is None:
            return self.frames[size].run()
        if self._unread == PLACES or (size and self._unread):
            between.read.run()
            self._unread = 0
        if size:
            self._waits = True
            return self.frames[size].run()
        self._unread += 1
        frame = between.first if self._waits else self.frames[0]
        self._waits = False
        return frame.run()

    @property
    def recorded(self) -> bool:
        """Whether all of them are graphs."""
        between = self._between
        more = [] if between is None else [between.first.recorded, between.read.recorded]
        return all([frame.recorded for frame in self.frames.values()] + more)
