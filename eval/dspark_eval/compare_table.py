"""A comparison as a table, one for each suite: markdown, and on a terminal whatever fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dspark.fitting import say, show
from dspark.wording import counted
from dspark_eval.cells import NOT_MEASURED, interval, number, percent
from dspark_eval.verdicts import NOT_LOSSLESS, fails, verdict

HEAD = (
    "drafter",
    "kind",
    "parameters",
    "accepted length [95 %]",
    "over the first [95 %]",
    "accepted drafts",
    "draft share",
    "speed-up [95 %]",
    "other greedy texts",
    "read again by the target",
)


def markdown(document: Mapping[str, Any]) -> str:
    """The setting in a line, a table for each suite, and what to be warned of."""
    lines = [_setting(document)]
    for title, rows in _suites(document):
        lines += ["", title, "", *table(HEAD, rows)]
    lines += [f"\nwarning: {text}" for text in document["warnings"]]
    return "\n".join(lines) + "\n"


def print_comparison(document: Mapping[str, Any], console: Console | None = None) -> None:
    """The same on stdout: markdown, but on a terminal tables that it has room for."""
    console = console or Console(markup=False)
    if not console.is_terminal:
        console.file.write(markdown(document) + "\n")
        return
    say(console, _setting(document))
    for title, rows in _suites(document):
        shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in HEAD:
            shown.add_column(name.replace(" [", "\n["), no_wrap=True)
        for row in rows:
            shown.add_row(*row)
        show(console, shown)
    for text in document["warnings"]:
        say(console, f"warning: {text}")


def _setting(document: Mapping[str, Any]) -> str:
    length = document["draft_length"] or "each its own block"
    return (
        f"Target {document['target']}, temperature {document['temperature']:g}, draft length "
        f"{length}, verification {document['verification']}; first: {document['reference']}"
    )


def _suites(document: Mapping[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    """A title and the rows under `HEAD` of each suite."""
    kinds = {entry["name"]: entry for entry in document["contenders"]}
    for name, suite in document["suites"].items():
        rows = [_row(entry, kinds[entry["name"]]) for entry in suite["contenders"]]
        yield f"{name}, {counted(suite['n_prompts'], 'prompt')}", rows


def _row(entry: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    length, ratio, speed = entry["accepted_length"], entry["ratio"], entry["speedup"]
    parameters, wrong = facts["parameters"], entry["greedy_mismatches"]
    return [
        entry["name"] + f" ({NOT_LOSSLESS})" * fails(entry.get("lossless")),
        facts["kind"],
        NOT_MEASURED if parameters is None else f"{parameters / 1e6:.2f} M",
        f"{number(length['value'], 2)} {interval(length['ci95'])}".strip(),
        NOT_MEASURED if ratio is None else ratio_cell(ratio["ratio"], ratio["ratio_ci95"]),
        percent(entry["acceptance_rate"]["value"]),
        percent(entry["draft_share"]["value"]),
        NOT_MEASURED if speed is None else ratio_cell(speed["ratio"], speed["ratio_ci95"]),
        NOT_MEASURED if wrong is None else str(wrong),
        lossless_cell(entry.get("lossless")),
    ]


def lossless_cell(found: Mapping[str, Any] | None) -> str:
    """What the target says of the texts (`fidelity.judge`)."""
    if found is None or found["passed"] is None:
        return NOT_MEASURED
    said = NOT_LOSSLESS if fails(found) else verdict(found)
    return f"{said}, {counted(found['tokens'], 'token', ',')}"


def ratio_cell(value: float | None, bounds: Sequence[float] | None) -> str:
    """A ratio and its interval, to the third digit: 1 per cent has to show."""
    inside = "" if bounds is None else f" [{bounds[0]:.3f}, {bounds[1]:.3f}]"
    return number(value, 3) + inside


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a markdown table, its columns padded so that they stand under each other. A cell's
    own `|` is escaped."""
    head, rows = _escaped(head), [_escaped(row) for row in rows]
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)]


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]
