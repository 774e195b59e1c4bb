"""A comparison as a table, one for each suite: markdown that reads well on a terminal too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import NOT_MEASURED, interval, number, percent

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
    length = document["draft_length"] or "each its own block"
    lines = [
        f"Target {document['target']}, temperature {document['temperature']:g}, draft length "
        f"{length}, verification {document['verification']}; first: {document['reference']}"
    ]
    kinds = {entry["name"]: entry for entry in document["contenders"]}
    for name, suite in document["suites"].items():
        rows = [_row(entry, kinds[entry["name"]]) for entry in suite["contenders"]]
        lines += ["", f"{name}, {suite['n_prompts']} prompts", "", *table(HEAD, rows)]
    lines += [f"\nwarning: {text}" for text in document["warnings"]]
    return "\n".join(lines) + "\n"


def _row(entry: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    length, ratio, speed = entry["accepted_length"], entry["ratio"], entry["speedup"]
    parameters, wrong = facts["parameters"], entry["greedy_mismatches"]
    return [
        entry["name"],
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
    return f"{'passed' if found['passed'] else 'FAILED'}, {counted(found['tokens'], 'token')}"


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
