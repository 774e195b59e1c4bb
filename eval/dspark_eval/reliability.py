"""The reliability diagram: predicted against observed survival, one panel for each draft
position; a mark's area tells how many forecasts it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from dspark.wording import counted
from dspark_eval.plots import BLUE, GREY, ORANGE, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
SMALLEST_DOT, LARGEST_DOT = 8.0, 90.0  # points squared; the area tells how many rounds


def plot_reliability(document: Mapping[str, Any], report: Mapping[str, Any], path: Path) -> None:
    """Draw one entry of `reliability.json` into a file."""
    slots = len(report["diagram"])
    columns = min(COLUMNS, slots)
    rows = math.ceil(slots / columns)
    figure = Figure(figsize=(3.1 * columns, 3.1 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for slot, axes in enumerate(panels):
        if slot < slots:
            _draw_slot(axes, report, slot)
        else:
            axes.set_visible(False)
    panels[0].legend(loc="upper left", frameon=False, fontsize=8)
    name = Path(document["target"]).name or document["target"]
    figure.suptitle(
        f"{name}, temperature {report['temperature']:g}: average ECE "
        f"{_percent(report['average_ece_before'])} before, "
        f"{_percent(report['average_ece_after'])} after "
        f"(a perfect forecast: {_percent(report['average_ece_floor'])}), "
        f"{counted(report['rounds'], 'round')} of {counted(report['prompts'], 'prompt')}",
        fontsize=10,
    )
    figure.supxlabel("predicted survival", fontsize=10)
    figure.supylabel("observed survival", fontsize=10)
    save(figure, path)


def _draw_slot(axes: Axes, report: Mapping[str, Any], slot: int) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--")
    for name, colour, marker in (("before", ORANGE, "s"), ("after", BLUE, "o")):
        bins = report["diagram"][slot][name]
        points = [
            (predicted / count, survived / count, count)
            for count, predicted, survived in zip(
                bins["rounds"], bins["predicted_sum"], bins["survived"], strict=True
            )
            if count
        ]
        if not points:
            continue
        x, y, counts = zip(*points, strict=True)
        most = max(counts)
        sizes = [max(SMALLEST_DOT, LARGEST_DOT * count / most) for count in counts]
        axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
        axes.scatter(x, y, sizes, color=colour, marker=marker, label=name, alpha=0.85,
                     clip_on=False, zorder=3)  # fmt: skip
    axes.set_title(
        f"position {slot + 1}: AUC {_number(report['auc'][slot])}\n"
        f"ECE {_percent(report['ece_before'][slot])} to {_percent(report['ece_after'][slot])}, "
        f"perfect {_percent(report['ece_floor'][slot])}",
        fontsize=8,
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.grid(alpha=0.25)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
