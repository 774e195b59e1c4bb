"""What a report says of each kind of file: a heading, how it was measured, a table, pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dspark.wording import counted
from dspark_eval.plots import plot_bench, plot_eval
from dspark_eval.reliability import plot_reliability
from dspark_eval.study import plots as study_plots
from dspark_eval.study.markdown import markdown
from dspark_eval.study.runs import STUDY_FILE
from dspark_eval.study.table import read_table
from dspark_eval.training_plot import plot_training

__all__ = ["STUDY_FILE", "Picture", "Section", "bench", "calibration", "curve", "evaluation",
           "study", "training"]  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A file name without its ending, what it shows, and the function that draws it."""

    name: str
    caption: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Section:
    """Lines of Markdown, and the pictures that follow them."""

    lines: tuple[str, ...]
    pictures: tuple[Picture, ...] = ()


def study(path: Path, value: Any) -> Section:
    """The table of all arms, rebuilt from their runs."""
    document = read_table(path.parent)
    pictures = [
        Picture("accepted", "accepted length by arm", partial(study_plots.plot_accepted, document)),
        Picture(
            "positions", "acceptance by position", partial(study_plots.plot_positions, document)
        ),
    ]
    if any(row["long"] for row in document["rows"]):
        drawn = partial(study_plots.plot_long, document)
        pictures.append(Picture("long", "accepted length by context", drawn))
    if any(row["drafting"] for row in document["rows"]):
        drawn = partial(study_plots.plot_costs, document)
        pictures.append(Picture("costs", "cost of a draft by context", drawn))
    question, _, rest = markdown(document).partition("\n")
    lines = (f"## {question.lstrip('# ')}", "", f"Study `{path.parent}`.", *rest.splitlines(), "")
    return Section(lines, tuple(pictures))


def bench(path: Path, value: Any) -> Section:
    """Plain against speculative decoding."""
    runs = value.get("runs", [value])
    first, extra = runs[0], runs[0]["extra"]
    lines = [
        f"## Speed: `{path}`",
        "",
        f"`{first['drafter']}` for `{first['target']}`, batch {first['batch']}, draft length "
        f"{extra['draft_length']}, {counted(first['n_prompts'], 'prompt')} of {extra['prompts']}, "
        "at most "
        f"{counted(first['max_new_tokens'], 'new token')}, {_machine(first['environment'])}. Both "
        "ways in one "
        "process, in turn on every prompt; tokens per second after the first token; 95 % bootstrap "
        "over prompts.",
        "",
        *_table(
            ("temperature", "plain, tokens/s", "speculative", "speed-up", "accepted length",
             "accepted drafts", "ms a round: draft + verify + other", "same text"),
            (_bench_row(run) for run in runs),
        ),
        *_warnings(warning for run in runs for warning in run["extra"]["warnings"]),
    ]  # fmt: skip
    return Section(tuple(lines), (Picture("bench", "speed", partial(plot_bench, runs)),))


def _bench_row(run: dict[str, Any]) -> Sequence[str]:
    mismatches, prompts = run["greedy_mismatches"], run["n_prompts"]
    return (
        f"{run['temperature']:g}",
        _number(run["plain_tokens_per_s"], 1),
        _number(run["speculative_tokens_per_s"], 1),
        f"{_number(run['speedup'], 2)}x{_interval(run['speedup_ci95'])}",
        f"{_number(run['accepted_length'], 2)}{_interval(run['accepted_length_ci95'])}",
        _percent(run["acceptance_rate"]),
        " + ".join(_number(run[key], 2) for key in ("draft_ms", "verify_ms", "other_ms")),
        "-" if mismatches is None else f"{prompts - mismatches} of {prompts}",
    )


def evaluation(path: Path, value: Any) -> Section:
    """Accepted length by prompt set, and by context length."""
    suites = value["suites"]
    first = next(iter(suites.values()))
    lines = [
        f"## Acceptance: `{path}`",
        "",
        f"`{value['drafter']}` for `{value['target']}`, temperature {value['temperature']:g}, "
        f"draft length {value['draft_length']}, at most "
        f"{counted(first['max_new_tokens'], 'new token')}, seed "
        f"{value['seed']}, {_machine(first['environment'])}. Pooled over prompts, the bonus token "
        "included; 95 % bootstrap over prompts.",
        "",
        *_table(
            ("prompt set", "prompts", "accepted length", "without loops", "accepted drafts",
             "exact answers", "conditional acceptance"),
            (
                (
                    name, str(suite["n_prompts"]),
                    _number(suite["accepted_length"], 2) + _interval(suite["accepted_length_ci95"]),
                    _number(suite["accepted_length_without_loops"], 2),
                    _percent(suite["acceptance_rate"]), _percent(suite["exact_answers"]),
                    " ".join(_number(chance, 2) for chance in suite["conditional_acceptance"]),
                )
                for name, suite in suites.items()
            ),
        ),
        "Accepted length by the tokens in front of a round:",
        "",
        *_table(
            ("prompt set", "tokens", "rounds", "accepted length"),
            (
                (name, _bucket(b), str(b["rounds"]), _number(b["accepted_length"], 2))
                for name, suite in suites.items()
                for b in suite["context_buckets"]
            ),
        ),
        *_warnings(value["warnings"]),
    ]  # fmt: skip
    drawn = partial(plot_eval, value)
    return Section(tuple(lines), (Picture("eval", "acceptance by position", drawn),))


def _bucket(bucket: dict[str, Any]) -> str:
    low, high = bucket["low"], bucket["high"]
    return f"{low} and more" if high is None else f"{low} to {high - 1}"


def calibration(path: Path, value: Any) -> Section:
    """What the confidence is worth, before and after its fit."""
    lines = [
        f"## Calibration: `{path}`",
        "",
        f"`{value['drafter']}` for `{value['target']}`, on {value['dataset']}. Expected "
        f"calibration error of the predicted survival, {value['bins']} bins, averaged over slots; "
        "after the fit on prompts that it has not seen; perfect: what chance alone shows on as "
        "many rounds.",
        "",
        *_table(
            ("temperature", "prompts", "rounds", "before", "after", "perfect"),
            (
                (
                    f"{s['temperature']:g}", str(s["prompts"]), str(s["rounds"]),
                    *(_percent(s[f"average_ece_{key}"]) for key in ("before", "after", "floor")),
                )
                for s in value["settings"]
            ),
        ),
        *_warnings(value["warnings"]),
    ]  # fmt: skip
    pictures = [
        Picture(
            f"reliability-t{setting['temperature']:g}",
            f"reliability at temperature {setting['temperature']:g}",
            partial(plot_reliability, value, setting),
        )
        for setting in value["settings"]
    ]
    return Section(tuple(lines), tuple(pictures))


def training(path: Path, value: Any) -> Section:
    """The curves of a run and where they ended."""
    last = value[-1]
    held_out = last.get("held_out") or {}
    lines = [
        f"## Training: `{path.parent}`",
        "",
        f"{counted(last['step'], 'step')} in {last['train_s']:.0f} s. Under teacher forcing, "
        "training rows "
        "as they came and held-out rows: what a drafter would have accepted of the row itself. "
        "Real rounds are measured by eval.",
        "",
        *_table(
            ("rows", "loss", "accepted length"),
            (
                (name, _number(part.get("loss"), 3), _number(part.get("accepted_length"), 2))
                for name, part in (("training", last), ("held-out", held_out))
            ),
        ),
    ]
    drawn = partial(plot_training, value)
    return Section(tuple(lines), (Picture("training", "training curves", drawn),))


def curve(path: Path, value: Any) -> Section:
    """Size against accepted length and predicted speed."""
    from dspark_eval.prune_curve import plot_curve, table

    lines = (
        f"## Pruning: `{path}`",
        "",
        f"`{value['draft']}` cut to shares of its parameters, {counted(value['steps'], 'step')} of "
        "recovery, "
        f"{counted(value['prompts'], 'held-out prompt')} decoded at temperature "
        f"{value['temperature']:g}. "
        f"Tokens per second are predicted from {value['speed_from']}, not measured.",
        "",
        *table(value).splitlines(),
        "",
    )
    return Section(lines, (Picture("curve", "pruning curve", partial(plot_curve, value)),))


# ------------------------------------------------------------------ pieces


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
    ]


def _warnings(found: Sequence[str] | Iterator[str]) -> list[str]:
    lines = [f"- Warning: {warning}" for warning in dict.fromkeys(found)]
    return [*lines, ""] if lines else []


def _machine(environment: dict[str, Any]) -> str:
    return (
        f"{environment['device_name']}, {counted(environment['threads'], 'thread')}, "
        f"{environment['dtype']}, "
        f"torch {environment['torch']}, {environment['date'][:10]}"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"
