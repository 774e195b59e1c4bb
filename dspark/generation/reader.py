"""Emitted tokens to pieces of text that will not be taken back.

A token's text waits while the end of the text may still turn out to be a stop string, and while it
is part of an unfinished character; then it comes as one piece, with the token it belongs to. A
character of several tokens belongs to the last of them. End tokens have no text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dspark.runtime.records import Emitted
from dspark.runtime.stops import StopSearch


@dataclass(frozen=True)
class Piece:
    """Text that one token made readable. `text` may be empty: part of a character, an end token."""

    text: str
    token: Emitted


class Reader:
    """Collects what a request emits; `show` receives every piece with text once, in order.

    pieces   one for each emitted token, as far as they are certain
    """

    def __init__(
        self, search: StopSearch, ends: Collection[int], show: Callable[[Piece], None]
    ) -> None:
        self.pieces: list[Piece] = []
        self._search = search
        self._ends = frozenset(ends)
        self._show = show
        self._waiting: list[Piece] = []
        self._shown = 0  # characters

    @property
    def text(self) -> str:
        return self._search.text

    @property
    def found(self) -> str | None:
        """The stop string that ended the text."""
        return self._search.found

    def read(self, emitted: Sequence[Emitted]) -> None:
        """The tokens of one round, cut where the text ends."""
        for token in emitted:
            before = len(self._search.text)
            if token.token not in self._ends:
                self._search.push([token.token])
            self._waiting.append(Piece(self._search.text[before:], token))
        self._release(len(self._search.text) - self._search.held)

    def finish(self) -> None:
        """No more tokens: what still waits is certain now, a broken character included."""
        end = len(self._search.text)
        broken = self._search.finish()[end:]
        self._release(end)
        for piece in self._waiting:  # where a stop string cut the text
            text = piece.text[: end - self._shown]
            self._give(Piece(text, piece.token))
        if broken:
            last = self.pieces.pop()
            self._give(Piece(broken, last.token))
            self.pieces[-1] = Piece(last.text + broken, last.token)

    def _release(self, certain: int) -> None:
        while self._waiting and self._shown + len(self._waiting[0].text) <= certain:
            self._give(self._waiting.pop(0))

    def _give(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self._shown += len(piece.text)
        if piece.text:
            self._show(piece)
