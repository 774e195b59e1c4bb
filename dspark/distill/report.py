"""What became of every line of the prompt files, counted by reason with its places.

Two kinds: a *skipped* line is no usable conversation (``messages.SKIP_REASONS``); a *noted* one is
used, and there is something that its owner may want to know (``NOTES``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.distill.messages import SKIP_REASONS
from dspark.wording import counted

Places = tuple[tuple[str, int], ...]
"""(file, line) of each."""

NOTES: dict[str, str] = {
    "lone-surrogates": "with lone surrogates, now U+FFFD",
    "later-turns": "with more than one turn: only the first is used",
    "repeated-id": "with an id that an earlier line of the file has",
    "repeated-question": "ask what an earlier line asks (they are held out together)",
    "byte-order-mark": "with a byte order mark, left out",
    "crlf": "end in CRLF",
}
LINES_SHOWN = 8
_QUIET = frozenset({"byte-order-mark", "crlf"})  # true of a whole file: no list of lines


@dataclass(frozen=True)
class SkippedLine:
    """A line that is not usable; ``reason`` is a key of ``SKIP_REASONS``."""

    file: str
    line: int
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class ReadReport:
    """What became of every non-blank line."""

    read: int
    kept: int
    skipped: tuple[SkippedLine, ...]
    noted: Mapping[str, Places]  # key of NOTES -> places

    @property
    def repaired(self) -> Places:
        """Lines in which lone surrogates became U+FFFD."""
        return self.noted.get("lone-surrogates", ())

    @property
    def later_turns(self) -> int:
        """Rows whose second and later turns were left out."""
        return len(self.noted.get("later-turns", ()))

    def by_reason(self) -> dict[str, tuple[SkippedLine, ...]]:
        """Skipped lines by reason, in the order of ``SKIP_REASONS``."""
        grouped = {
            reason: tuple(line for line in self.skipped if line.reason == reason)
            for reason in SKIP_REASONS
        }
        return {reason: lines for reason, lines in grouped.items() if lines}

    def summary(self) -> str:
        """One line of totals, then one line for each thing that a reader should know."""
        out = [f"{counted(self.read, 'row')} read, {self.kept} kept, {len(self.skipped)} skipped"]
        for reason, lines in self.by_reason().items():
            places = show_places([(line.file, line.line) for line in lines])
            detail = f"; first: {lines[0].detail}" if lines[0].detail else ""
            out.append(
                f"  {len(lines)} skipped, {reason}: {SKIP_REASONS[reason]} ({places}{detail})"
            )
        for note, found in self.noted.items():
            shown = show_places(found[:1] if note in _QUIET else found)
            out.append(f"  {len(found)} {NOTES[note]} ({shown})")
        return "\n".join(out)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: counts, and by reason the places of all lines."""
        return {
            "read": self.read,
            "kept": self.kept,
            "skipped": {
                reason: {
                    "count": len(lines),
                    "lines": [f"{line.file}:{line.line}" for line in lines],
                    "first": lines[0].detail or None,
                }
                for reason, lines in self.by_reason().items()
            },
            "noted": {
                note: {"count": len(found), "lines": [f"{file}:{line}" for file, line in found]}
                for note, found in self.noted.items()
            },
        }


class Recorder:
    """Collects a ``ReadReport`` while files are read. Questions are remembered by their hash."""

    def __init__(self) -> None:
        self._skipped: list[SkippedLine] = []
        self._noted: dict[str, list[tuple[str, int]]] = {note: [] for note in NOTES}
        self._ids: set[tuple[str, str]] = set()
        self._questions: set[bytes] = set()

    def skip(self, file: str, line: int, reason: str, detail: str) -> None:
        """This line is not used."""
        self._skipped.append(SkippedLine(file, line, reason, detail))

    def note(self, note: str, file: str, line: int) -> None:
        """This line is used, and ``note`` is true of it."""
        self._noted[note].append((file, line))

    def repeats(self, file: str, line: int, row_id: object, question: str) -> None:
        """Note an id or a question that has occurred before."""
        if row_id is not None:
            name = (file, f"{type(row_id).__name__} {row_id}")
            if name in self._ids:
                self.note("repeated-id", file, line)
            self._ids.add(name)
        digest = hashlib.blake2b(question.encode(), digest_size=16).digest()
        if digest in self._questions:
            self.note("repeated-question", file, line)
        self._questions.add(digest)

    def report(self, kept: int) -> ReadReport:
        """Everything seen, with ``kept`` usable rows."""
        noted = {note: tuple(found) for note, found in self._noted.items() if found}
        return ReadReport(kept + len(self._skipped), kept, tuple(self._skipped), noted)


def show_places(lines: Sequence[tuple[str, int]]) -> str:
    """``file:3, file:9, ... and 12 more`` with the file named once while it stays the same."""
    parts = []
    last = None
    for file, line in lines[:LINES_SHOWN]:
        parts.append(str(line) if file == last else f"{file}:{line}")
        last = file
    more = len(lines) - LINES_SHOWN
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")
