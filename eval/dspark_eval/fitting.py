"""A table where there is room for it, else its rows one below the other: no number is ever cut.

A pipe or a file takes a table of any width. On a terminal that is narrower than the table, each of
its rows becomes a block of lines, headed by the row's first cell.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

UNBOUNDED = 10_000
"""Columns that no table has."""
INDENT = "  "


def show(console: Console, table: Table) -> None:
    """Print a table, whose cells are plain strings, in the way that fits."""
    free = console.options.update(width=UNBOUNDED)
    needed = console.measure(table, options=free).maximum
    if not console.is_terminal:
        console.width = max(console.width, needed)  # nobody's screen ends there
    if needed <= console.width:
        console.print(table)
        return
    if table.title is not None:
        console.print(Text(str(table.title), "italic"), soft_wrap=True)
    for line in _lines(table):
        console.print(line, soft_wrap=True)


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
