"""Where one text ends: an end token, a stop string, or the last token asked for.

Whichever comes first token by token wins, and what ended the text is its last token. On the same
token an end token goes before a stop string, and both before the length.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.runtime.records import Finish
from dspark.runtime.stops import StopSearch


class Ending:
    """Cuts the tokens of one request as they come; `finish` is set once its text has ended."""

    def __init__(
        self, ends: frozenset[int], max_new_tokens: int, stop: StopSearch | None = None
    ) -> None:
        self.finish: Finish | None = None
        self._ends = ends
        self._left = max_new_tokens
        self._stop = stop

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """The next tokens up to and including the one that ends the text."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self._left -= 1
            if token in self._ends:
                self.finish = "end"
            elif self._stop is not None and self._stop.push([token]) is not None:
                self.finish = "stop"
            elif self._left == 0:
                self.finish = "length"
            if self.finish is not None:
                break
        return kept
