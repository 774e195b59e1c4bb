"""The threshold sweep: acceptance rate and accepted length against the threshold of a rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from dspark_eval.plots import GREY, MARKERS, SERIES, save, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "confidence": "stop where the survival product falls below",
    "entropy": "stop where the mean entropy rises above (nats)",
}
PANELS = (
    ("acceptance_rate", "accepted drafts (share of those sent)"),
    ("accepted_length", "accepted length (tokens per round)"),
    ("tokens_per_s", "modelled tokens per second"),
)


def plot_sweeps(document: Mapping[str, Any], path: Path) -> None:
    """One row of panels for each rule, one line for each prompt set."""
    rules = [rule for rule in LABELS if rule in next(iter(document["sweeps"].values()))]
    figure = Figure(figsize=(11.5, 3.4 * len(rules)), layout="constrained")
    axes = figure.subplots(len(rules), len(PANELS), squeeze=False)
    for row, rule in zip(axes, rules, strict=True):
        fitted = document["stops"]["s_stop" if rule == "confidence" else "h_stop"]
        for panel, (key, label) in zip(row, PANELS, strict=True):
            _draw(panel, document, rule, key, fitted)
            panel.set_xlabel(LABELS[rule], fontsize=8)
            panel.set_ylabel(label, fontsize=9)
    lines, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    figure.suptitle(
        f"{Path(document['drafter']).name} for {document['target']}, temperature "
        f"{document['temperature']:g}: replayed rounds of whole blocks; dashed: fitted threshold",
        fontsize=10,
    )
    save(figure, path)


def _draw(axes: Axes, document: Mapping[str, Any], rule: str, key: str, fitted: float) -> None:
    for index, (name, sweeps) in enumerate(document["sweeps"].items()):
        points = [p for p in sweeps[rule] if p[key] is not None]
        axes.plot(
            [p["threshold"] for p in points],
            [p[key] for p in points],
            label=f"{name} (n = {sweeps[rule][0]['rounds']} rounds)",
            color=SERIES[index % len(SERIES)],
            marker=MARKERS[index % len(MARKERS)],
            markevery=5,
            markersize=4,
            linewidth=1.2,
        )
    axes.axvline(fitted, color=GREY, linewidth=0.8, linestyle="--")
    tidy(axes)
