"""The report as markdown: a table for each prompt set, the targets, what the columns mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import interval, number, percent, rate

EASY = "nano-problems"
ACCEPTANCE, SHARE = 0.9, 0.95
HEAD = (
    "| policy | accepted length [95 %] | acceptance rate | drafted | verified | rows | "
    "tokens/s measured [95 %] | modelled | of plain |"
)

Row = Mapping[str, Any]


def page(document: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = [*_opening(document)]
    for name, found in document["sets"].items():
        lines += [
            "",
            f"## {name}, {counted(found['n_prompts'], 'prompt')}",
            "",
            *_table(found["rows"]),
        ]
    lines += ["", "## Targets", "", *targets(document), "", "## Block verification", ""]
    lines += [*_methods(document["block_verification"]), "", *_meaning()]
    return "\n".join(lines) + "\n"


def _opening(document: Mapping[str, Any]) -> Iterator[str]:
    environment, stops = document["environment"], document["stops"]
    yield f"# Draft-length policies: {Path(document['drafter']).name} for {document['target']}"
    yield ""
    yield (
        f"{environment['date']}, {environment['device_name']}, "
        f"{counted(environment['threads'], 'thread')}, "
        f"{environment['dtype']}, temperature {document['temperature']:g}, at most "
        f"{counted(document['max_new_tokens'], 'new token')}, seed {document['seed']}, load "
        "average "
        f"{environment['load_average_1m']}."
    )
    yield (
        f"A plain step takes {1e3 * document['plain_s']:.2f} ms; speculation pays above an "
        "accepted length of "
        + ", ".join(f"{value:.2f} (draft {g})" for g, value in document["break_even"].items())
        + "."
    )
    known = ", ".join(f"{name} {value:g}" for name, value in stops.items() if value is not None)
    yield f"Thresholds, fitted on other prompts: {known}."
    for warning in document["warnings"]:
        yield f"Warning: {warning}."
    yield ""
    yield "![Threshold sweep](threshold-sweep.png)"


def _table(rows: list[Row]) -> Iterator[str]:
    yield HEAD
    yield "| --- |" + " ---: |" * (HEAD.count("|") - 2)
    plain = rows[0]["modelled_tokens_per_s"]
    for row in rows:
        cells = (
            row["policy"],
            f"{number(row['accepted_length'], 2)} {interval(row['accepted_length_ci95'])}",
            percent(row["acceptance_rate"]),
            number(row["drafted"], 2),
            number(row["verified"], 2),
            number(row["rows_per_round"], 2),
            f"{rate(row['tokens_per_s'])} {_whole(row['tokens_per_s_ci95'])}",
            rate(row["modelled_tokens_per_s"]),
            f"{number(row['modelled_tokens_per_s'] / plain, 2)}x",
        )
        yield "| " + " | ".join(cell.strip() for cell in cells) + " |"
    wrong = [row for row in rows if row["mismatches"]]
    if wrong:
        names = ", ".join(f"{row['policy']} ({row['mismatches']})" for row in wrong)
        yield ""
        yield f"Answers that differ from plain decoding: {names}."


def targets(document: Mapping[str, Any]) -> Iterator[str]:
    """What was hoped for, and what was found."""
    rows = document["sets"][EASY]["rows"][1:]
    for column, word in _COLUMNS:
        best = max((row for row in rows if row["constant"]), key=lambda row: row[column])
        good = [
            row
            for row in rows
            if (row["acceptance_rate"] or 0) >= ACCEPTANCE and row[column] >= SHARE * best[column]
        ]
        sure = max(rows, key=lambda row: row["acceptance_rate"] or 0)
        met = max(good, key=lambda row: row[column], default=None)
        shown = sure if met is None else met
        yield (
            f"* {EASY}, {word}: acceptance rate of at least {percent(ACCEPTANCE)} at "
            f"{percent(SHARE)} of the best constant length ({best['policy']}, "
            f"{rate(best[column])} tokens/s): **{'met' if met else 'not met'}**, {shown['policy']} "
            f"with {percent(shown['acceptance_rate'])} at {percent(shown[column] / best[column])}."
        )
    rows = document["sets"][document["mix"]]["rows"][1:]
    for column, word in _COLUMNS:
        best = max((row for row in rows if row["constant"]), key=lambda row: row[column])
        first = max((row for row in rows if not row["constant"]), key=lambda row: row[column])
        met = first[column] > best[column]
        yield (
            f"* {document['mix']}, {word}: more tokens/s than every constant length: "
            f"**{'met' if met else 'not met'}**, {first['policy']} {rate(first[column])} against "
            f"{best['policy']} {rate(best[column])}."
        )


_COLUMNS = (("modelled_tokens_per_s", "modelled"), ("tokens_per_s", "measured"))


def _methods(rows: list[Row]) -> Iterator[str]:
    yield "| draft length | verification | accepted length [95 %] | acceptance rate |"
    yield "| ---: | --- | ---: | ---: |"
    for row in rows:
        yield (
            f"| {row['draft_length']} | {row['verification']} | "
            f"{number(row['accepted_length'], 2)} {interval(row['accepted_length_ci95'])} | "
            f"{percent(row['acceptance_rate'])} |"
        )
    yield ""
    yield "Word problems, temperature 1, the same seeds; at temperature 0 the two are one rule."


def _meaning() -> Iterator[str]:
    yield "## Columns"
    yield ""
    yield (
        "Accepted length counts the bonus token, acceptance rate primaries alone. Measured: tokens "
        "after the first over the seconds spent on them, arms taking turns on every prompt. "
        "Modelled: the same rounds on the step-time curve. Intervals resample prompts. The sweep "
        "replays thresholds on rounds of whole blocks; what a cut changes about later rounds is in "
        "the tables, which are real runs."
    )


def _whole(bounds: tuple[float, float] | None) -> str:
    return "" if bounds is None else f"[{bounds[0]:.0f}, {bounds[1]:.0f}]"
