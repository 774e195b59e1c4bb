"""Tables in narrow places: everything that a wide one says, and no line cut short."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from rich.table import Table

from dspark.fitting import say, show
from dspark.generation.account import Account
from dspark.runtime.records import RoundRecord
from dspark_eval.compare_table import markdown, print_comparison
from tests.report_documents import COMPARISON, EVIL

PATH = "/a/path/that/nobody/should/break"
SENTENCE = f"written to {PATH} after so-called rounds, 2.23 [2.17, 2.29], of short prompts: 17.5 %"
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


@pytest.mark.parametrize("width", [24, 60])
def test_a_sentence_goes_on_below_between_two_words(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    say(Console(width=width, force_terminal=True, color_system=None), SENTENCE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert " ".join(" ".join(lines).split()) == SENTENCE  # nothing lost, no word broken
    assert all(len(line) <= width or line.strip() == PATH for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])
    assert lines[-1].endswith("17.5 %")  # a number and its unit stay together


def test_a_pipe_takes_a_sentence_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say(Console(width=40, force_terminal=False), SENTENCE)
    assert capsys.readouterr().out == SENTENCE + "\n"


def test_a_column_that_may_be_wrapped_gives_way_before_the_table_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ten places for numbers that take twenty in one line, and none of them cut."""
    table = Table(box=None, pad_edge=False)
    table.add_column("round", no_wrap=True)
    table.add_column("confidence")
    table.add_row("1", "99 98 97 | 96 95 94")
    show(Console(width=17, force_terminal=True, color_system=None), table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["round", "confidence"]
    assert " ".join(lines[1:]).split() == ["1", "99", "98", "97", "|", "96", "95", "94"]


@pytest.mark.parametrize("width", [60, 80, 400])
def test_rounds_of_generate_fit_a_narrow_terminal(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine columns of 78 places at least; in 60 every round is a block of lines."""
    record = RoundRecord(
        drafted=7, verified=7, accepted=2, emitted=3, level=0, draft_s=0.0123, verify_s=0.0645,
        other_s=0.0003, confidence=(0.66, 0.79, 0.35, 0.66, 0.01, 0.27, 0.99), entropy=(0.1,) * 7,
    )  # fmt: skip
    account = Account([1, 2, 3], "length", [record], 0.5, 0.1)
    show(Console(width=width, force_terminal=True, color_system=None), account.table())
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(cell in shown for cell in ("12.3", "64.5", "0.3", "all accepted", "verified"))
    assert "66 79 | 35" in shown
    assert (len(shown.splitlines()) > 9) == (width == 60)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width


@pytest.mark.parametrize("width", [60, 80, 400])
def test_a_comparison_fits_a_terminal_and_is_markdown_in_a_pipe(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "runs/of-november/drafter-with-a-long-name"
    document = json.loads(json.dumps(COMPARISON).replace(json.dumps(EVIL)[1:-1], long))
    print_comparison(document, Console(width=width, force_terminal=True, color_system=None))
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("first", "plain", long))
    assert "…" not in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    print_comparison(document, Console(width=width, force_terminal=False))
    assert capsys.readouterr().out == markdown(document) + "\n"
