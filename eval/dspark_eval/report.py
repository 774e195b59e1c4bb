"""Tables on the terminal, and the progress bar that only a terminal sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dspark.fitting import say, show
from dspark.reading import shown_in
from dspark.wording import counted
from dspark_eval.cells import NOT_MEASURED, interval, number, percent, rate, round_parts
from dspark_eval.report_notes import (
    cost_lines,
    evaluation_lines,
    frame_line,
    lossless_words,
    mismatch_lines,
    outcome_lines,
    policy_words,
    relaxed_label,
    relaxed_line,
    stops_lines,
)
from dspark_eval.verdicts import mark, run_fails, suite_fails

Run = dict[str, Any]


@contextmanager
def progress(title: str, total: int, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step. Draws on stderr, and only on a terminal.

    Inside, a prompt that takes long to read has a line of its own.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = quiet or not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=hidden, transient=True
    ) as bar:
        task = bar.add_task(title, total=total)
        with shown_in(bar):
            yield lambda: bar.advance(task)


def print_bench(runs: Sequence[Run], console: Console | None = None) -> None:
    """One table, a row for each sampling setting, and the transformers peer where measured."""
    console = console or Console(markup=False)
    first = runs[0]
    table = Table(title=_bench_title(first), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("decoding", no_wrap=True)
    for name in (
        "tokens/s",
        "speed-up\n[95 %]",
        "accepted length\n[95 %]",
        "accepted\ndrafts",
        f"ms per round\n{' + '.join(part for part, _ in round_parts(first))}",
        "same\ntext",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        _add_run(table, run)
    peer = first["extra"]["peer"]
    if peer is not None:
        table.add_row(peer["name"].replace(" (", "\n("), rate(peer["tokens_per_s"]), *[""] * 5)
    show(console, table)
    for line in _bench_notes(runs):
        say(console, line)


def _add_run(table: Table, run: Run) -> None:
    setting = f"temperature {run['temperature']:g}"
    table.add_row(f"plain, {setting}", rate(run["plain_tokens_per_s"]), *[""] * 5)
    times = " + ".join(number(ms, 2) for _, ms in round_parts(run))
    table.add_row(
        f"speculative, {setting}{relaxed_label(run)}{mark(run_fails(run))}",
        rate(run["speculative_tokens_per_s"]),
        f"{number(run['speedup'], 2)}x {interval(run['speedup_ci95'])}",
        f"{number(run['accepted_length'], 2)} {interval(run['accepted_length_ci95'])}",
        percent(run["acceptance_rate"]),
        times,
        _same_text(run),
        style="bold",
        end_section=True,
    )


def _bench_title(run: Run) -> str:
    return (
        f"{run['drafter']} drafts for {run['target']}: batch {run['batch']}, {policy_words(run)}, "
        f"{counted(run['n_prompts'], 'prompt')} of {run['extra']['prompts']}, "
        f"at most {counted(run['max_new_tokens'], 'new token')}"
    )


def _bench_notes(runs: Sequence[Run]) -> Iterator[str]:
    first, environment = runs[0], runs[0]["environment"]
    yield (
        "Tokens/s: after the first token, pooled over prompts. [95 %]: bootstrap over prompts. "
        "Accepted length counts the bonus token."
    )
    for run in runs:
        extra = run["extra"]
        yield (
            f"temperature {run['temperature']:g}: speculation pays above an accepted length of "
            f"{number(run['break_even'], 2)}; "
            f"{percent(extra['loop_share'])} of the answers loop, accepted length without them "
            f"{number(extra['accepted_length_without_loops'], 2)}"
        )
        name = f"temperature {run['temperature']:g}"
        for lines in (outcome_lines, relaxed_line, mismatch_lines, frame_line):
            yield from lines(run, name)
        if extra["lossless"] is not None:
            yield f"{name}: the first {lossless_words(extra['lossless'])}"
    yield from cost_lines(first["extra"])
    peer = first["extra"]["peer"]
    if peer is not None:
        yield (
            f"Plain decoding runs at {number(peer['plain_over_peer'], 2)}x "
            f"{interval(peer['plain_over_peer_ci95'])} of transformers' generate "
            f"({counted(peer['n_prompts'], 'prompt')}, greedy)."
        )
    backends = ", ".join(f"{op} {name}" for op, name in first["backends"].items())
    yield (
        f"{environment['device_name']}, threads: {environment['threads']}, {environment['dtype']}, "
        f"torch {environment['torch']}; kernels: {backends}"
    )
    for warning in dict.fromkeys(w for run in runs for w in run["extra"]["warnings"]):
        yield f"warning: {warning}"


def print_eval(document: dict[str, Any], console: Console | None = None) -> None:
    """One row for each prompt set, then acceptance by position."""
    console = console or Console(markup=False)
    title = (
        f"{document['drafter']} drafts for {document['target']}: temperature "
        f"{document['temperature']:g}, {policy_words(next(iter(document['suites'].values())))}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("prompt set")
    for name in (
        "prompts",
        "accepted length\n[95 %]",
        "without\nloops",
        "accepted\ndrafts",
        "with\nbonus",
        "answers\nthat loop",
        "exact\nanswers",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, suite in document["suites"].items():
        table.add_row(
            name + relaxed_label(suite) + mark(suite_fails(suite)),
            str(suite["n_prompts"]),
            f"{number(suite['accepted_length'], 2)} {interval(suite['accepted_length_ci95'])}",
            number(suite["accepted_length_without_loops"], 2),
            percent(suite["acceptance_rate"]),
            percent(suite["acceptance_rate_with_bonus"]),
            percent(suite["loop_share"]),
            _exact(suite),
        )
    show(console, table)
    for name, suite in document["suites"].items():
        chances = " ".join(number(value, 2) for value in suite["conditional_acceptance"])
        said = [f"{name}: conditional acceptance by position {chances}"]
        if suite["confidence"] is not None:
            said.append(f"{name}: {_confidence_line(suite['confidence'])}")
        for lines in (outcome_lines, relaxed_line, evaluation_lines):
            said += lines(suite, name)
        for line in said:
            say(console, line)
    for warning in document["warnings"]:
        say(console, f"warning: {warning}")


def _exact(suite: dict[str, Any]) -> str:
    """The share of right answers and of how many: not every prompt has an answer to hold one to."""
    graded = suite["task"]
    return NOT_MEASURED if graded is None else f"{percent(graded['value'])} of {graded['n']:.0f}"


def _confidence_line(found: dict[str, Any]) -> str:
    errors = " ".join(number(None if e is None else 100 * e, 1) for e in found["ece"])
    return (
        f"calibration error of the predicted survival by position {errors} %, "
        f"average {percent(found['average_ece'])} "
        f"(a perfect forecast: {percent(found['average_ece_floor'])})"
    )


def print_calibration(document: dict[str, Any], path: str, console: Console | None = None) -> None:
    """A block for each setting: calibration error of the survival by slot, before and after."""
    console = console or Console(markup=False)
    slots = len(document["settings"][0]["temperatures"])
    title = (
        f"{document['drafter']} drafts for {document['target']}: calibration error of the "
        f"predicted survival, in percent, on {document['dataset']}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("confidence", no_wrap=True)
    for name in (*(f"slot {slot}" for slot in range(1, slots + 1)), "average"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in document["settings"]:
        _add_setting(table, report)
    show(console, table)
    for report in document["settings"]:
        say(
            console,
            f"temperature {report['temperature']:g}: {counted(report['rounds'], 'round')} of "
            f"{counted(report['prompts'], 'prompt')}; average after "
            f"{percent(report['average_ece_after'])} "
            f"{_percent_interval(report['average_ece_after_ci95'])}; AUC by slot, and of how many "
            f"rounds how many survived: {_auc_words(report)}",
        )
        for line in stops_lines(report):
            say(console, line)
    say(
        console,
        "After the fit: on prompts not fitted on. A perfect forecast: what chance alone shows on "
        "as many rounds; more prompts lower it.",
    )
    for warning in document["warnings"]:
        say(console, f"warning: {warning}")
    say(console, f"written to {path}")


def _auc_words(report: dict[str, Any]) -> str:
    """An area under a curve is as sure as the rarer of the two kinds is frequent."""
    counts = [
        (sum(slot["after"]["rounds"]), sum(slot["after"]["survived"])) for slot in report["diagram"]
    ]
    return ", ".join(
        f"{number(value, 2)} ({survived:.0f} of {judged:.0f})"
        for value, (judged, survived) in zip(report["auc"], counts, strict=True)
    )


def _add_setting(table: Table, report: dict[str, Any]) -> None:
    rows = (
        ("ece_before", f"temperature {report['temperature']:g}, the head's own"),
        ("ece_scaled", "  with temperatures"),
        ("ece_after", "  with temperatures and curves"),
        ("ece_floor", "  a perfect forecast"),
    )
    for key, label in rows:
        values = [*report[key], report[f"average_{key}"]]
        cells = (NOT_MEASURED if value is None else f"{100 * value:.1f}" for value in values)
        last = key == "ece_floor"
        table.add_row(label, *cells, style="bold" if key == "ece_after" else "", end_section=last)


def _percent_interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"[{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def _same_text(run: Run) -> str:
    mismatches, prompts = run["greedy_mismatches"], run["n_prompts"]
    return NOT_MEASURED if mismatches is None else f"{prompts - mismatches}/{prompts}"
