"""The pictures of a study: accepted length by arm, acceptance by position, cost by context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dspark.wording import counted
from dspark_eval.plots import BLUE, GREY, MARKERS, SERIES, save
from dspark_eval.study.markdown import measurement_name, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = ("-", "--", ":", "-.")


def plot_accepted(document: dict[str, Any], path: Path) -> None:
    """A panel for each measurement: every seed a dot, the mean a bar, the reference a line; arms in
    the order of the first one."""
    rows = sorted(document["rows"], key=lambda row: -row["results"][0]["accepted_length"])
    names = [row["arm"] for row in rows]
    panels = rows[0]["results"]
    figure = Figure(figsize=(3.2 + 2.6 * len(panels), 1.4 + 0.32 * len(rows)), layout="constrained")
    for index, axes in enumerate(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]):
        for place, row in enumerate(rows):
            result = row["results"][index]
            each = result["accepted_length_per_seed"]
            axes.plot(each, [place] * len(each), "o", color=BLUE, alpha=0.6, markersize=5)
            axes.plot(result["accepted_length"], place, "|", color="black", markersize=14)
            if row["arm"] == document["reference"]:
                axes.axvline(result["accepted_length"], color=GREY, linestyle="--", linewidth=0.8)
        axes.set_title(measurement_name(panels[index]), fontsize=9)
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="x", alpha=0.25)
    figure.axes[0].invert_yaxis()
    figure.supxlabel(
        f"accepted length, tokens per round (n = {counted(document['prompts'], 'prompt')}, draft "
        f"length {document['draft_length']}; dots: {counted(len(document['seeds']), 'seed')}, bar: "
        f"mean; dashed: {document['reference']})",
        fontsize=9,
    )
    save(figure, path)


def plot_positions(document: dict[str, Any], path: Path) -> None:
    """Conditional acceptance by position in the study's first measurement, mean over seeds."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    for index, row in enumerate(document["rows"]):
        rates = row["results"][0]["conditional_acceptance"]
        values = [float("nan") if rate is None else rate for rate in rates]
        axes.plot(range(1, len(rates) + 1), values, label=row["arm"], **_style(index))
    axes.set_xticks(range(1, document["draft_length"] + 1))
    axes.set_ylim(top=1.02)
    axes.set_xlabel("draft position")
    axes.set_ylabel("P(accepted | all before accepted)")
    axes.set_title(measurement_name(document["rows"][0]["results"][0]), fontsize=10)
    _finish(figure, axes, path)


def plot_costs(document: dict[str, Any], path: Path) -> None:
    """Milliseconds and megabytes of a draft by the length of its context."""
    rows = [row for row in document["rows"] if row["drafting"]]
    figure = Figure(figsize=(11.4, 4.4), layout="constrained")
    times, reads = figure.subplots(1, 2)
    for index, row in enumerate(rows):
        entries = row["drafting"]
        contexts = [entry["context"] for entry in entries]
        ms = [entry["draft_ms"] for entry in entries]
        read = [(entry["weight_bytes"] + entry["context_bytes"]) / 1e6 for entry in entries]
        times.plot(contexts, ms, label=row["arm"], **_style(index))
        reads.plot(contexts, read, label=row["arm"], **_style(index))
    ticks = [entry["context"] for entry in rows[0]["drafting"]]
    for axes, label in ((times, "milliseconds of a draft (median)"), (reads, "MB read by a draft")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(ticks, [short_count(tick) for tick in ticks])
        axes.set_xlabel("context, in tokens")
        axes.set_ylabel(label)
    _tidy(times)
    _finish(figure, reads, path)


def plot_long(document: dict[str, Any], path: Path) -> None:
    """Accepted length by context: a panel for chats and one for padding, both from none on."""
    rows = [row for row in document["rows"] if row["long"]]
    kinds = list(dict.fromkeys(e["context"] for e in rows[0]["long"] if e["tokens"]))
    figure = Figure(figsize=(2.4 + 4.5 * len(kinds), 4.4), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for kind, axes in zip(kinds, panels, strict=True):
        for index, row in enumerate(rows):
            shown = [e for e in row["long"] if e["context"] == kind or not e["tokens"]]
            values = [e["accepted_length"] for e in shown]
            axes.plot(range(len(shown)), values, label=row["arm"], **_style(index))
        shown = [e for e in rows[0]["long"] if e["context"] == kind or not e["tokens"]]
        ticks = [f"{short_count(e['tokens'])}\n{100 * e['exact_answers']:.0f} %" for e in shown]
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_title(kind, fontsize=10)
        axes.set_xlabel("context, in tokens; exact answers of the target")
    panels[0].set_ylabel("accepted length, greedy")
    for axes in panels[:-1]:
        _tidy(axes)
    _finish(figure, panels[-1], path)


def _style(index: int) -> dict[str, Any]:
    """Colour, marker and line that tell apart as many series as a study has arms."""
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index // len(SERIES) % len(LINES)],
    }


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    """The legend beside the last panel, and the file."""
    _tidy(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    save(figure, path)
