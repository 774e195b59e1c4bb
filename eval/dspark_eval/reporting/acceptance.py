"""The section of `dspark eval`: accepted length by prompt set, and what explains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import NOT_MEASURED, interval, number, percent, percent_of
from dspark_eval.measured_files import short_hash
from dspark_eval.plots import draw_positions
from dspark_eval.report_notes import policy_words
from dspark_eval.reporting import words
from dspark_eval.reporting.blocks import Block, Picture, Prose, Section, notes, table
from dspark_eval.reporting.figures import draw_curves, panel, with_legend
from dspark_eval.reporting.outcomes import outcome_tables, positions_table, task_cell
from dspark_eval.reporting.speed import round_blocks
from dspark_eval.reporting.words import HOW_SURE, labels, machine, positions_alt

Suites = Mapping[str, Mapping[str, Any]]


def evaluation(source: str, value: Any) -> Section:
    """Sets are never merged: the topic of a prompt moves accepted length more than a drafter."""
    title = f"Acceptance: {words.name(value['drafter'])}, temperature {value['temperature']:g}"
    return Section(title, tuple(_evaluation(value)), source)


def _evaluation(value: Mapping[str, Any]) -> Iterator[Block]:
    suites: Suites = value["suites"]
    first = next(iter(suites.values()))
    setting = f"temperature {value['temperature']:g}, draft length {value['draft_length']}"
    if value.get("policy", "fixed") != "fixed":
        setting = f"temperature {value['temperature']:g}, policy {policy_words(first)}"
    yield Prose(
        f"`{value['drafter']}`{short_hash((value.get('identity') or {}).get('drafter'))} for "
        f"`{value['target']}`, {setting}, at most "
        f"{counted(first['max_new_tokens'], 'new token')}, seed {value['seed']}, "
        f"{machine(first['environment'])}. Pooled over prompts, the bonus token included; 95 % "
        "bootstrap over prompts. Lossless check: the target has read every text again."
    )
    yield table(
        "Each prompt set",
        ("prompt set", "prompts", "rounds", "accepted length", "without bonus", "without loops",
         "accepted drafts", "loops", "exact answers", "exact, plain", "lossless check"),
        (_suite_row(name, suite) for name, suite in suites.items()),
    )  # fmt: skip
    yield positions_table(suites)
    yield from notes(value["warnings"])
    yield Picture(
        "acceptance",
        f"Chance that a draft is accepted once all before it were, by its position. {HOW_SURE}",
        positions_alt(suites),
        partial(
            panel,
            partial(draw_positions, curves=_named(suites)),
            title=setting,
            size=with_legend(len(suites)),
        ),
    )
    yield from _thresholds(suites, setting)
    yield from round_blocks({name: {**suite} for name, suite in suites.items()})
    yield from _contexts(suites)
    yield from outcome_tables(suites)


def _named(suites: Suites) -> dict[str, Any]:
    short = labels(list(suites))
    return {
        f"{short[name]} (n = {counted(suite['n_prompts'], 'prompt')})": suite
        for name, suite in suites.items()
    }


def _suite_row(name: str, suite: Mapping[str, Any]) -> Sequence[str]:
    sure = suite.get("estimates", {})
    return (
        name,
        str(suite["n_prompts"]),
        str(suite["n_rounds"]),
        f"{number(suite['accepted_length'], 2)} {interval(suite['accepted_length_ci95'])}",
        number(suite.get("accepted_length_without_bonus"), 2),
        f"{number(suite['accepted_length_without_loops'], 2)} "
        f"{interval((sure.get('accepted_length_without_loops') or {}).get('ci95'))}".strip(),
        percent_of(sure.get("acceptance_rate") or _alone(suite["acceptance_rate"])),
        percent_of(sure.get("loop_share") or _alone(suite["loop_share"])),
        task_cell(suite["task"]) if suite.get("task") else percent(suite["exact_answers"]),
        task_cell((suite.get("plain") or {}).get("task")),
        verdict(suite.get("lossless")),
    )


def _alone(value: float | None) -> Mapping[str, Any]:
    """A share of a file that does not tell how sure it is."""
    return {"value": value, "ci95": None}


def verdict(lossless: Mapping[str, Any] | None) -> str:
    """What the target says of the texts when it reads them again (`dspark_eval.fidelity`)."""
    if lossless is None or lossless["passed"] is None:
        return NOT_MEASURED
    return f"{'passed' if lossless['passed'] else 'FAILED'}\n{lossless['tokens']} tokens"


def _thresholds(suites: Suites, setting: str) -> Iterator[Picture]:
    """What the recorded rounds would have given, cut where confidence falls below a threshold."""
    found = {name: s["thresholds"] for name, s in suites.items() if s.get("thresholds")}
    short = labels(list(found))
    for key, what in (
        ("accepted_length", "accepted length (tokens per round)"),
        ("acceptance_rate", "accepted drafts (share of those sent)"),
    ):
        curves = {
            f"{short[name]} (n = {counted(points[0]['rounds'], 'round')})": [
                (point["threshold"], point[key]) for point in points
            ]
            for name, points in found.items()
        }
        bounds = {
            label: [(point.get(f"{key}_ci95"), point.get("few", False)) for point in points]
            for label, points in zip(curves, found.values(), strict=True)
        }
        if curves:
            axis, share = "confidence threshold of a cut", key == "acceptance_rate"
            drawn = partial(draw_curves, curves=curves, x=axis, y=what, share=share, bounds=bounds)
            yield Picture(
                f"threshold-{key.split('_')[0]}",
                f"Threshold sweep: {what} of the same rounds, cut at the first draft whose "
                f"confidence is below. {HOW_SURE}",
                _curves_alt(curves),
                partial(panel, drawn, title=setting, size=with_legend(len(curves))),
            )


def _curves_alt(curves: Mapping[str, Sequence[tuple[float, float | None]]]) -> str:
    return "; ".join(
        f"{name}: " + ", ".join(f"{number(y, 2)} at {x:g}" for x, y in points)
        for name, points in curves.items()
    )


def _contexts(suites: Suites) -> Iterator[Block]:
    """By the tokens in front of a round, if there is more than one bucket of it."""
    if all(len(suite["context_buckets"]) < 2 for suite in suites.values()):
        return
    yield table(
        "Accepted length by the tokens in front of a round",
        ("prompt set", "tokens", "prompts", "rounds", "accepted length"),
        (
            (
                name,
                _bucket(b),
                str(b.get("n_prompts", NOT_MEASURED)),
                str(b["rounds"]),
                f"{number(b['accepted_length'], 2)} {interval(b.get('accepted_length_ci95'))}",
            )
            for name, suite in suites.items()
            for b in suite["context_buckets"]
        ),
        texts=2,
    )


def _bucket(bucket: Mapping[str, Any]) -> str:
    low, high = bucket["low"], bucket["high"]
    return f"{low} and more" if high is None else f"{low} to {high - 1}"
