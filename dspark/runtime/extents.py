"""Which bytes of one slab are taken: runs, first fit, from either end.

Free runs are kept in order of their place and joined with their neighbours when one is returned, so
that no two of them touch. Lengths are multiples of `ALIGNMENT`; a taker's tail up to there is
counted as taken, since nobody else can have it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes: what an allocator of GPU memory guarantees, enough for any dtype and vector load."""


@dataclass(frozen=True, order=True)
class Extent:
    """The bytes [start, start + length) of a slab."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def aligned(nbytes: int) -> int:
    """The length of the run that `nbytes` take."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Extents:
    """Free runs of a slab of `size` bytes, a multiple of `ALIGNMENT`."""

    def __init__(self, size: int) -> None:
        if size < 1 or size % ALIGNMENT:
            raise ValueError(f"size {size}: expected a positive multiple of {ALIGNMENT}")
        self.size = size
        self._free = [Extent(0, size)]

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return sum(run.length for run in self._free)

    @property
    def largest(self) -> int:
        """Bytes of the longest free run: nothing longer can be taken."""
        return max((run.length for run in self._free), default=0)

    def take(self, nbytes: int, *, from_end: bool) -> Extent | None:
        """The first free run that is long enough, seen from the chosen end, or None.

        What has one fixed size comes from the end and what has any length from the beginning: then
        a hole that a fixed piece left fits the next one exactly, whatever came and went beside it.
        """
        length = aligned(max(1, nbytes))
        order = range(len(self._free) - 1, -1, -1) if from_end else range(len(self._free))
        place = next((i for i in order if self._free[i].length >= length), None)
        if place is None:
            return None
        run = self._free.pop(place)
        left = run.length - length
        if left:
            insort(self._free, Extent(run.start if from_end else run.start + length, left))
        return Extent(run.start + left if from_end else run.start, length)

    def give(self, extent: Extent) -> None:
        """Return a run that `take` gave.

        Raises:
            ValueError: a part of it is free already, or lies outside the slab.
        """
        place = bisect_left(self._free, extent)
        before = self._free[place - 1] if place else None
        after = self._free[place] if place < len(self._free) else None
        if (
            extent.start < 0
            or extent.stop > self.size
            or (before is not None and before.stop > extent.start)
            or (after is not None and after.start < extent.stop)
        ):
            raise ValueError(f"bytes {extent.start}..{extent.stop} are not taken")
        start, stop, low, high = extent.start, extent.stop, place, place
        if before is not None and before.stop == start:
            start, low = before.start, place - 1
        if after is not None and after.start == stop:
            stop, high = after.stop, place + 1
        self._free[low:high] = [Extent(start, stop - start)]
