"""Tables in narrow places: everything that a wide one says, and no line cut short."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from dspark_eval.fitting import show

CELLS = [
    ("speculative, temperature 0\nRELAXED: TV 0.0123, accuracy -1.0 points", "1.91x [1.80, 2.01]"),
    ("plain, temperature 0", ""),
]


def _shown(width: int, capsys: pytest.CaptureFixture[str], terminal: bool = True) -> str:
    table = Table(title="A title that is itself a little longer than the narrowest console is")
    table.add_column("decoding", no_wrap=True)
    table.add_column("speed-up\n[95 %]", no_wrap=True)
    table.add_column("ms per round\ndraft + verify + other", no_wrap=True)
    for heading, cell in CELLS:
        table.add_row(heading, cell, "4.12 + 25.11 + 1.20" if cell else "")
    show(Console(width=width, force_terminal=terminal, no_color=True), table)
    return capsys.readouterr().out


def test_a_table_stays_one_where_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    wide = _shown(120, capsys)
    row = next(line for line in wide.splitlines() if "1.91x" in line)
    assert "speculative" in row
    assert "25.11" in row


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_one_goes_down_the_page_and_loses_nothing(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table takes 86 columns."""
    lines = _shown(width, capsys).splitlines()
    assert not any("…" in line for line in lines)
    assert "RELAXED: TV 0.0123, accuracy -1.0 points" in lines
    assert "  speed-up [95 %]                      1.91x [1.80, 2.01]" in lines
    assert "  ms per round draft + verify + other  4.12 + 25.11 + 1.20" in lines
    assert lines[-2] == "plain, temperature 0"  # an empty cell has no line


def test_a_pipe_takes_a_table_of_any_width(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(40, capsys, terminal=False)
    row = next(line for line in shown.splitlines() if "1.91x" in line)
    assert "4.12 + 25.11 + 1.20" in row
    assert shown == _shown(200, capsys, terminal=False)
