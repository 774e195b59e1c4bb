"""The table of ways to draft as markdown: what was equal, a table for each setting, the rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.wording import counted
from dspark_eval.baselines.plan import LOOKUP
from dspark_eval.cells import NOT_MEASURED, number
from dspark_eval.compare_table import ratio_cell, table

HEAD = (
    "arm",
    "parameters",
    "learning rate",
    "training seconds",
    "drafter passes for k tokens",
    "accepted length (seeds)",
    "dspark over it [95 %]",
    "standard error: prompts, seeds",
    "dspark is",
)


def markdown(document: Mapping[str, Any]) -> str:
    """What was equal, a table for each setting, and the learning rates."""
    lines = [equal(document)]
    for setting in document["results"]:
        lines += ["", title(setting), "", *setting_table(document, setting)]
    if trials := rate_table(document):
        lines += ["", rate_title(document), "", *trials]
    return "\n".join(lines) + "\n"


def equal(document: Mapping[str, Any]) -> str:
    """What every trained arm has alike, what it has not, and how a verdict is come to."""
    rows = document["rows"]
    learned = "the same rows"
    if rows is not None:
        learned = f"the same {rows['rows']:,} rows ({rows['supervised_tokens']:,} tokens to learn)"
    rate = f"learning rate {document['rates'][0]:g}"
    unlike = ["seconds, of runs that shared a machine"]
    if document["rate_search"] is not None:
        rate, unlike = "", ["the learning rate, each arm's best of those tried", *unlike]
    size = f"parameters within {100 * _apart(document):.1f} %"
    if document["sizes"] == "own":
        size, unlike = "", ["the number of parameters", *unlike]
    steps = f"{counted(document['steps'], 'step', ',')} of {document['rows_per_step']} rows"
    alike = ", ".join(part for part in (learned, "their order", steps, rate, size) if part)
    return (
        f"Target {document['target']}, draft length {document['draft_length']}; accepted length "
        f"with bonus. Equal for every trained arm: {alike}. Not equal: {'; '.join(unlike)}. "
        "95 % over prompts and seeds; ahead: the whole interval lies above 1."
    )


def _apart(document: Mapping[str, Any]) -> float:
    """How far the size of an arm is from the first's, at most."""
    sizes = [entry["parameters"] for entry in document["arms"] if entry["arm"] != LOOKUP]
    return max(abs(size / sizes[0] - 1) for size in sizes)


def title(setting: Mapping[str, Any]) -> str:
    """A prompt set, its temperature, and how many prompts."""
    n = counted(setting["n_prompts"], "prompt")
    return f"{setting['suite']}, T = {setting['temperature']:g}, {n}"


def setting_table(document: Mapping[str, Any], setting: Mapping[str, Any]) -> list[str]:
    """Every arm on a prompt set, lines of a markdown table."""
    facts = {entry["arm"]: entry for entry in document["arms"]}
    return table(HEAD, [_line(arm, row, facts[arm]) for arm, row in setting["arms"].items()])


def _line(arm: str, row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    each, over, size = row["accepted_length_per_seed"], row["dspark_over"], facts["parameters"]
    seeds = f" ({', '.join(f'{length:.2f}' for length in each)})" if len(each) > 1 else ""
    seconds = [value for value in facts["seconds_per_seed"] if value is not None]
    ratio, parts = "", ""
    if over is not None:
        ratio = ratio_cell(over["ratio"], over["ratio_ci95"])
        parts = ", ".join(_percent(over[key]) for key in ("prompts_sd", "seeds_sd"))
    return [
        arm,
        NOT_MEASURED if size is None else f"{size / 1e6:.2f} M",
        NOT_MEASURED if facts["lr"] is None else f"{facts['lr']:g}",
        number(sum(seconds) / len(seconds), 0) if seconds else NOT_MEASURED,
        facts["passes"],
        f"{row['accepted_length']:.2f}{seeds}",
        ratio,
        parts,
        row["verdict"] or "",
    ]


def _percent(error: float | None) -> str:
    """A standard error of log ratio."""
    return NOT_MEASURED if error is None else f"{100 * error:.1f} %"


def rate_title(document: Mapping[str, Any]) -> str:
    """What the trials of learning rates were."""
    search = document["rate_search"]
    return (
        f"Learning rates: accepted length on {document['rate_prompts']} validation prompts "
        f"({search['suite']}, T = {search['temperature']:g}) after "
        f"{counted(document['rate_steps'], 'step')}, seed {search['seed']}"
    )


def rate_table(document: Mapping[str, Any]) -> list[str]:
    """Every trial, an arm a line; nothing where one rate was given."""
    search = document["rate_search"]
    if search is None:
        return []
    rates = sorted(document["rates"])
    rows = [_trials(arm, entry, rates) for arm, entry in search["arms"].items()]
    return table(("arm", *(f"{rate:g}" for rate in rates), "taken"), rows)


def _trials(arm: str, entry: Mapping[str, Any], rates: Sequence[float]) -> list[str]:
    lengths = {trial["lr"]: trial for trial in entry["trials"]}
    cells = [_trial(lengths.get(rate)) for rate in rates]
    taken = NOT_MEASURED if entry["best"] is None else f"{entry['best']:g}"
    return [arm, *cells, taken + (" (at the edge)" if entry["at_the_edge"] else "")]


def _trial(trial: Mapping[str, Any] | None) -> str:
    if trial is None:
        return NOT_MEASURED
    return "NaN" if trial["accepted_length"] is None else number(trial["accepted_length"], 2)
