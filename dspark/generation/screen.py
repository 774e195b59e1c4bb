"""What a user sees while text is generated.

`Plain` writes the text alone. `Marked` shows where each token came from: in colour on a terminal,
in brackets anywhere else, with the drafter's confidence behind every accepted token. A line break
is drawn as well as made, since it is a token like any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from dspark.files import atomic_write_text
from dspark.generation.reader import Piece
from dspark.runtime.records import Emitted, EmittedKind

STYLES: dict[EmittedKind, str] = {
    "accepted": "green",
    "sibling": "bold cyan",
    "corrected": "bold red",
    "bonus": "bold yellow",
    "first": "",
    "plain": "",
}
BRACKETS: dict[EmittedKind, tuple[str, str]] = {
    "accepted": ("(", ")"),
    "sibling": ("<", ">"),
    "corrected": ("[", "]"),
    "bonus": ("{", "}"),
    "first": ("", ""),
    "plain": ("", ""),
}
LEGEND: tuple[tuple[EmittedKind, str], ...] = (
    ("accepted", "accepted"),
    ("sibling", "sibling accepted"),
    ("corrected", "corrected by the target"),
    ("bonus", "bonus of the target"),
)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
PICTURE_WIDTH = 108


class Silent:
    """Nothing: a document follows."""

    def show(self, piece: Piece) -> None:
        """Nobody looks."""

    def finish(self) -> None:
        """Nothing to end."""


class Plain:
    """The text, and nothing but the text, as soon as it is certain."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, piece: Piece) -> None:
        self._out.write(piece.text)
        self._out.flush()

    def finish(self) -> None:
        """End the last line."""
        self._out.write("\n")
        self._out.flush()


class Marked:
    """Every token with where it came from, below a legend; `picture` repeats it as an SVG file."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False, markup=False)
        self._colour = self._console.color_system is not None and not self._console.no_color
        self._pieces: list[Piece] = []

    def show(self, piece: Piece) -> None:
        if not self._pieces:
            self._write(legend(self._colour) + Text("\n"))
        self._pieces.append(piece)
        self._write(marked(piece, self._colour))

    def finish(self) -> None:
        """End the last line."""
        self._write(Text("\n"))

    def picture(self, path: Path, command: str, below: Sequence[RenderableType]) -> None:
        """What a terminal with colours shows: the command, the text, and `below` it the rest."""
        console = Console(
            record=True,
            width=PICTURE_WIDTH,
            file=StringIO(),
            force_terminal=True,
            highlight=False,
        )
        text = Text().join(marked(piece, colour=True) for piece in self._pieces)
        above = (Text.assemble(("$ ", "dim"), (command, "bold")), legend(colour=True), text)
        for part in (*above, *below):
            console.print(part)
            console.print()
        atomic_write_text(path, _svg(console))

    def _write(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)
        self._console.file.flush()


def marked(piece: Piece, colour: bool) -> Text:
    """One piece of text, coloured, or without colours in the brackets of its kind."""
    kind = piece.token.kind
    if colour:
        style = STYLES[kind]
        head, *rest = piece.text.split("\n", 1)
        drawn = Text(head + "⏎" * bool(rest), style)
        drawn.append(_percent(piece.token).translate(_RAISED), "bright_black")
        if rest:
            drawn.append("\n" + rest[0].replace("\n", "⏎\n"), style)
        return drawn
    opening, closing = BRACKETS[kind]
    if not opening:
        return Text(piece.text)
    breaks = "\n" * piece.text.count("\n")
    text = piece.text.replace("\n", "\\n")
    return Text(f"{opening}{text}{closing}{_percent(piece.token)}{breaks}")


def legend(colour: bool) -> Text:
    """One line that says what the marks mean."""
    number = "97"
    parts = []
    for kind, name in LEGEND:
        if colour:
            text = Text(name, STYLES[kind])
            text.append(number.translate(_RAISED) if kind == "accepted" else "", "bright_black")
        else:
            opening, closing = BRACKETS[kind]
            text = Text(f"{opening}{name}{closing}{number if kind == 'accepted' else ''}")
        parts.append(text)
    line = Text("  ").join(parts)
    if not colour:
        return line.append(f"   {number}: confidence, %")
    return line.append(f"   {number.translate(_RAISED)} confidence, %", "bright_black")


def _percent(token: Emitted) -> str:
    """Two digits at most: 99 is everything above."""
    return "" if token.confidence is None else str(min(99, math.floor(100 * token.confidence)))


def _svg(console: Console) -> str:
    """The recorded screen without web fonts: a picture should look the same without a network."""
    return _FACE.sub("", console.export_svg(title="dspark generate"))
