"""The pictures: speed and acceptance of a bench, acceptance by position of an evaluation.

Drawn without pyplot, so that importing this file touches no display and no global state. Colours
are Okabe and Ito's, which people with any common colour blindness tell apart; series also differ
in marker or hatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from dspark.files import atomic_file
from dspark.wording import counted
from dspark_eval.cells import round_parts
from dspark_eval.intervals import MIN_PROMPTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PINK, SKY, RED = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00",
)  # fmt: skip
SERIES = (BLUE, RED, GREEN, PINK, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#666666"
DPI = 150

Run = Mapping[str, Any]


def plot_bench(runs: Sequence[Run], path: Path) -> None:
    """Three panels: tokens per second, conditional acceptance by position, where a round goes."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    speed, position, split = figure.subplots(1, 3, width_ratios=(1.1, 1.1, 1))
    first = runs[0]
    draw_speed(speed, runs)
    curves = {f"temperature {run['temperature']:g}": {**run, **run["extra"]} for run in runs}
    draw_positions(position, curves)
    draw_split(split, runs)
    figure.suptitle(
        f"{_label(first['target'])}, batch {first['batch']}, draft length "
        f"{first['extra']['draft_length']}, n = {counted(first['n_prompts'], 'prompt')}, "
        f"{first['environment']['device_name']}, "
        f"threads: {first['environment']['threads']}, {first['environment']['dtype']}",
        fontsize=10,
    )
    save(figure, path)


def plot_eval(document: dict[str, Any], path: Path) -> None:
    """Conditional acceptance by draft position, one line for each prompt set."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    curves = {
        f"{name} (n = {counted(suite['n_prompts'], 'prompt')})": suite
        for name, suite in document["suites"].items()
    }
    draw_positions(axes, curves)
    setting = f"temperature {document['temperature']:g}, draft length {document['draft_length']}"
    axes.set_title(f"{_label(document['target'])}, {setting}", fontsize=10)
    save(figure, path)


def draw_speed(axes: Axes, runs: Sequence[Run]) -> None:
    """Bars with 95 % intervals; the speed-up stands above each speculative bar."""
    width = 0.38
    ways = (("plain", BLUE, ""), ("speculative", ORANGE, "//"))
    for shift, (way, colour, hatch) in zip((-width / 2, width / 2), ways, strict=True):
        heights = [run[f"{way}_tokens_per_s"] for run in runs]
        bounds = [run["extra"][f"{way}_tokens_per_s_ci95"] for run in runs]
        places = [index + shift for index in range(len(runs))]
        axes.bar(places, heights, width, label=way, color=colour, hatch=hatch, edgecolor="white")
        for place, height, bound in zip(places, heights, bounds, strict=True):
            if bound is not None:
                whiskers = [[max(height - bound[0], 0)], [max(bound[1] - height, 0)]]
                axes.errorbar(place, height, yerr=whiskers, color="black", capsize=4)
    tops = [
        (run["extra"]["speculative_tokens_per_s_ci95"] or [run["speculative_tokens_per_s"]])[-1]
        for run in runs
    ]
    for index, (run, top) in enumerate(zip(runs, tops, strict=True)):
        text = f"{run['speedup']:.2f}x"
        axes.annotate(
            text,
            (index + width / 2, top),
            (0, 5),
            textcoords="offset points",
            ha="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
        )
    peer = runs[0]["extra"]["peer"]
    if peer is not None:
        axes.axhline(
            peer["tokens_per_s"], color=GREY, linestyle="--", label="transformers generate"
        )
    axes.set_xticks(range(len(runs)), [f"temperature {run['temperature']:g}" for run in runs])
    axes.set_ylabel("tokens per second, after the first token")
    axes.set_title("Speed (whiskers: 95 % over prompts)", fontsize=10)
    axes.set_ylim(0, 1.3 * max(*tops, *(run["plain_tokens_per_s"] for run in runs)))
    axes.legend(loc="upper right", frameon=False, ncols=3, fontsize=8)
    tidy(axes)


def draw_positions(axes: Axes, curves: Mapping[str, Run]) -> None:
    """A line for each curve; the accepted length of a run that has one stands in the legend.
    Shaded: 95 %; hollow: too few prompts for it to be relied on."""
    longest = 1
    for index, (label, run) in enumerate(curves.items()):
        chances = run["conditional_acceptance"]
        longest = max(longest, len(chances))
        tau = run["accepted_length"]
        shown = label if tau is None else f"{label}: accepted length {tau:.2f}"
        draw_sure(
            axes,
            index,
            list(enumerate(chances, start=1)),
            shown,
            position_bounds(run, run["n_prompts"]),
        )
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.5, longest + 0.5)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("draft position")
    axes.set_ylabel("P(accepted | all before accepted)")
    axes.set_title("Conditional acceptance", fontsize=10)
    legend_below(axes)
    tidy(axes)


Bounds = Sequence[tuple[Sequence[float] | None, bool]]
"""Of each point its 95 % interval, and whether too few prompts stand behind it."""


def position_bounds(run: Run, n_prompts: int) -> Bounds:
    """Of conditional acceptance; a run that does not tell has at best all its `n_prompts`."""
    few = n_prompts < MIN_PROMPTS
    found = run.get("positions", {}).get("conditional_acceptance")
    if found is None:
        return [(None, few)] * len(run["conditional_acceptance"])
    return [(estimate["ci95"], estimate.get("few", few)) for estimate in found]


def draw_sure(
    axes: Axes,
    index: int,
    points: Sequence[tuple[float, float | None]],
    label: str,
    bounds: Bounds = (),
) -> None:
    """The line of one series through (x, y) points, gaps where y is None; its shade and marks say
    how sure it is."""
    colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
    bounds = [*bounds, *[(None, False)] * (len(points) - len(bounds))]
    known = [(x, *ci) for (x, _), (ci, _) in zip(points, bounds, strict=True) if ci is not None]
    if known:
        places, low, high = zip(*known, strict=True)
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    y = [float("nan") if value is None else value for _, value in points]
    axes.plot([x for x, _ in points], y, color=colour, linewidth=1.3)
    for few, fill in ((False, "full"), (True, "none")):
        own = [(x, v) for (x, v), (_, f) in zip(points, bounds, strict=True) if f is few]
        known_own = [point for point in own if point[1] is not None]
        if known_own:
            axes.plot(*zip(*known_own, strict=True), color=colour, marker=marker, linestyle="",
                      markersize=4.5, fillstyle=fill, clip_on=False)  # fmt: skip
    axes.plot([], [], color=colour, marker=marker, markersize=4.5, linewidth=1.3, label=label)


def legend_below(axes: Axes) -> None:
    """Where it hides no curve."""
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def draw_split(axes: Axes, runs: Sequence[Run]) -> None:
    """Stacked milliseconds of a round beside the plain steps that give as many tokens."""
    looks = {"draft": (SKY, ""), "verify": (GREEN, "//"), "frame": (GREEN, "//"),
             "other": (PINK, "..")}  # fmt: skip
    width = 0.38
    for index, run in enumerate(runs):
        bottom = 0.0
        for label, ms in round_parts(run):
            colour, hatch = looks[label]
            axes.bar(
                index + width / 2, ms, width, bottom=bottom, color=colour, hatch=hatch,
                edgecolor="white", label=label if index == 0 else None,
            )  # fmt: skip
            bottom += ms
        plain = run["extra"]["plain_ms_per_token"] * run["accepted_length"]
        axes.bar(
            index - width / 2, plain, width, color=BLUE, edgecolor="white",
            label="plain steps for as many tokens" if index == 0 else None,
        )  # fmt: skip
    axes.set_xticks(range(len(runs)), [f"temperature {run['temperature']:g}" for run in runs])
    axes.set_ylabel("milliseconds per round")
    axes.set_title("Where a round goes", fontsize=10)
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    axes.legend(loc="upper right", frameon=False, ncols=2, fontsize=8)
    tidy(axes)


def _label(name: str) -> str:
    """A target's name; the last part where it is a folder."""
    return Path(name).name or name


def tidy(axes: Axes) -> None:
    """Two spines, and a grid that stays in the background."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """In the format that the ending names; a kill leaves the old picture or the new one."""
    with atomic_file(path) as fresh:
        figure.savefig(fresh, dpi=DPI, format=path.suffix.removeprefix(".").lower())
