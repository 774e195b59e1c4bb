"""What a report is made of, whatever it is written as: Markdown, HTML or JSON.

A section is a title and blocks in reading order. Prose and cells are plain text in which only
`code` between backticks is marked; each writer escapes what its format would take for more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BETWEEN_CELLS = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Prose:
    """One paragraph."""

    text: str


@dataclass(frozen=True)
class Notes:
    """What to keep in mind: warnings, one line each."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """`caption` says what a row is; every row has as many cells as there are heads. The first
    `texts` columns hold words, the others numbers."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.heads)]
        if wrong:
            raise ValueError(f"{len(self.heads)} heads, a row with {len(wrong[0])} cells: {wrong}")


@dataclass(frozen=True)
class Picture:
    """A file name without its ending, the line under it, what somebody who cannot see it should
    know, and the function that draws it. `wide`: panels side by side, a row to itself."""

    name: str
    caption: str
    alt: str
    draw: Callable[[Path], None]
    wide: bool = False


@dataclass(frozen=True)
class Samples:
    """Answers token by token, as `dspark_eval.samples` keeps them."""

    entries: tuple[dict[str, Any], ...]


Block = Prose | Notes | Table | Picture | Samples


@dataclass(frozen=True)
class Section:
    """`source`: the file it was made from; empty where it draws on all of them."""

    title: str
    blocks: tuple[Block, ...]
    source: str = ""

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(block for block in self.blocks if isinstance(block, Picture))


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1
) -> Table:
    """A table of any sequences."""
    return Table(caption, tuple(heads), tuple(map(tuple, rows)), texts)


def notes(found: Iterable[str]) -> Iterator[Notes]:
    """Each warning once; nothing for none."""
    lines = tuple(dict.fromkeys(found))
    if lines:
        yield Notes(lines)


def from_markdown(lines: Sequence[str], caption: str) -> Iterator[Block]:
    """The paragraphs and tables of Markdown that another part of this package wrote."""
    paragraph: list[str] = []
    rows: list[tuple[str, ...]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            cells = _BETWEEN_CELLS.split(line.strip()[1:-1])
            rows.append(tuple(cell.strip().replace("\\|", "|") for cell in cells))
        elif line.strip():
            paragraph.append(line.strip())
        else:
            if paragraph:
                yield Prose(" ".join(paragraph))
            if rows:
                yield table(caption, rows[0], rows[2:])
            paragraph, rows = [], []


def block_json(block: Block, files: dict[str, str]) -> dict[str, Any]:
    """A block as `report.json` has it; `files` names the file of each picture."""
    if isinstance(block, Picture):
        return {
            "picture": files[block.name],
            "caption": block.caption,
            "alt": block.alt,
        }
    kind = type(block).__name__.lower()
    return {kind: asdict(block)}
