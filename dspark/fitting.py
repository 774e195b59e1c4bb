"""Tables and sentences where there is room for them, else on more lines: nothing is ever cut.

A pipe or a file takes a table of any width, and a sentence as one line. On a terminal that is
narrower than a table, each of its rows becomes a block of lines, headed by the row's first cell;
a sentence goes on below, between two of its words.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

UNBOUNDED = 10_000
"""Columns that no table has."""
INDENT = "  "
GLUE = "\N{NO-BREAK SPACE}"


def say(console: Console, sentence: str, style: str = "") -> None:
    """Print one line, as it is. A word that is longer than the screen, as paths are, stays one."""
    lines = [sentence]
    if console.is_terminal:
        lines = textwrap.wrap(
            sentence.replace(" %", f"{GLUE}%"),
            console.width,
            subsequent_indent=INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    for line in lines:
        console.print(Text(line.replace(GLUE, " "), style), soft_wrap=True)


def show(console: Console, table: Table) -> None:
    """Print a table, whose cells are plain strings, in the way that fits.

    Columns that may not be wrapped are those with `no_wrap`; the others give way first.
    """
    free = console.options.update(width=UNBOUNDED)
    needed = console.measure(table, options=free).maximum
    if not console.is_terminal:
        console.width = max(console.width, needed)  # nobody's screen ends there
    if needed - sum(map(_slack, table.columns)) <= console.width:
        console.print(table)
        return
    if table.title is not None:
        say(console, str(table.title), "italic")
    for line in _lines(table):
        console.print(line, soft_wrap=True)


def _slack(column: Column) -> int:
    """By how much a column shrinks before one of its words is cut."""
    if column.no_wrap:
        return 0
    cells = [str(cell) for cell in (column.header, *column.cells)]
    widest = max(cell_len(line) for cell in cells for line in cell.split("\n"))
    word = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
    return max(widest - max(word, column.min_width or 0), 0)


def _lines(table: Table) -> Iterator[Text]:
    """A heading for each row, and a line for each of its cells that holds anything."""
    headers = [str(column.header).replace("\n", " ") for column in table.columns]
    wide = max(map(len, headers[1:]), default=0)
    for number, cells in enumerate(zip(*(column.cells for column in table.columns), strict=True)):
        yield Text()
        heading, *rest = map(str, cells)
        yield Text(heading.strip(), table.rows[number].style or "")
        for header, cell in zip(headers[1:], rest, strict=True):
            if cell:
                yield Text(f"{INDENT}{header:<{wide}}{INDENT}{cell}")
    yield Text()
