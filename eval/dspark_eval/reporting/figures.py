"""The pictures of a report: one panel each, so that they can be read on a phone.

Colours are those of `dspark_eval.plots`; series also differ in marker, hatch or line. What a
figure rests on (n) stands on it, since pictures are copied without their captions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dspark_eval.plots import (
    BLUE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PINK,
    RED,
    SERIES,
    SKY,
    Bounds,
    draw_sure,
    legend_below,
    save,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = (4.8, 3.5)  # inches: its text is still legible where this is 360 pixels wide
LEGEND_LINE = 0.2
TEXT = {"font.size": 9}
PARTS = (("draft_ms", "draft", SKY), ("verify_ms", "verify", GREEN), ("other_ms", "other", PINK))
SHOWN_ROUNDS = 14


def panel(
    draw: Callable[[Axes], None], path: Path, *, title: str = "", size: tuple[float, float] = PANEL
) -> None:
    """One pair of axes in a file. `title` is what the figure rests on, small and to the left."""
    with rc_context(TEXT):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title("")
        axes.set_title(title, fontsize=8.5, color=GREY, loc="left")
        save(figure, path)


def with_legend(curves: int) -> tuple[float, float]:
    """Size of a panel whose legend of so many lines stands below it."""
    return PANEL[0], PANEL[1] + LEGEND_LINE * curves


def plot_lengths(bins: Sequence[Mapping[str, Any]], key: str, title: str, path: Path) -> None:
    """How many drafts a round sent ("verified") or got through ("accepted"): a histogram for each
    bin of `dspark_eval.lengths_by_entropy`, the surest on top."""
    figure = Figure(figsize=(PANEL[0], max(2.4, 1.2 + 0.58 * len(bins))), layout="constrained")
    with rc_context(TEXT):
        panels = figure.subplots(len(bins), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, found in zip(panels, bins, strict=True):
            counts, n = found[key], found["rounds"]
            mean = sum(k * count for k, count in enumerate(counts)) / n
            axes.bar(range(len(counts)), [100 * count / n for count in counts], 0.8, color=BLUE)
            axes.axvline(mean, color=RED, linewidth=1.2, linestyle="--")
            axes.set_ylabel(f"{nats(found)}\nn = {n}", rotation=0, ha="right", va="center")
            axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
            axes.yaxis.set_label_coords(-0.12, 0.5)
            tidy(axes)
        panels[-1].set_xticks(range(max(len(found[key]) for found in bins)))
        panels[-1].set_xlabel(
            f"drafts {'sent' if key == 'verified' else 'accepted'} in a round (dashed: mean)"
        )
        panels[0].set_title(title, fontsize=8.5, color=GREY, loc="left")
        figure.supylabel("rounds (%), by\nmean entropy of the block", fontsize=9)
        save(figure, path)


def nats(found: Mapping[str, Any]) -> str:
    """A bin of entropy in words."""
    if found["high"] is None:
        return f"{found['low']:g} nats up"
    return f"{found['low']:g} to {found['high']:g} nats"


def draw_timeline(figure: Figure, sample: Mapping[str, Any], plain_ms: float | None) -> None:
    """Tokens over time as a stair of rounds, above the parts of each round.

    plain_ms: of one plain step; None: plain decoding was not measured.
    """
    stair, strip = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    rounds = sample["rounds"][:SHOWN_ROUNDS]
    clock, tokens = 0.0, 1
    times, counts = [0.0], [1]
    for number, record in enumerate(rounds):
        start = clock
        for key, label, colour in PARTS:
            strip.broken_barh(
                [(clock, record[key])], (0, 1), facecolors=colour, edgecolor="white",
                linewidth=0.4, label=None if number else label,
            )  # fmt: skip
            clock += record[key]
        tokens += record["emitted"]
        times.append(clock)
        counts.append(tokens)
        strip.text((start + clock) / 2, 1.12, f"+{record['emitted']}", ha="center", fontsize=7.5)
    stair.step(times, counts, where="post", color=BLUE, marker="o", markersize=3,
               label="speculative")  # fmt: skip
    if plain_ms is not None:
        # one dot is one token, over the same stretch of time
        steps = min(int(clock / plain_ms), tokens - 1)
        stair.plot([k * plain_ms for k in range(steps + 1)], range(1, steps + 2), color=ORANGE,
                   marker=".", markersize=3, linewidth=0.8, label="plain, mean step")  # fmt: skip
    stair.set_ylabel("tokens")
    stair.yaxis.set_major_locator(MaxNLocator(integer=True))
    stair.legend(frameon=False, fontsize=8, loc="upper left")
    tidy(stair)
    strip.set_yticks([])
    strip.set_ylim(0, 1.75)
    strip.set_xlim(0, None)
    strip.spines[["top", "right", "left"]].set_visible(False)
    strip.set_xlabel("milliseconds after the first token")
    strip.legend(frameon=False, fontsize=8, ncols=3, loc="upper center",
                 bbox_to_anchor=(0.5, -0.75))  # fmt: skip


def plot_timeline(
    sample: Mapping[str, Any], plain_ms: float | None, title: str, path: Path
) -> None:
    """The first rounds of one answer."""
    with rc_context(TEXT):
        figure = Figure(figsize=(PANEL[0], 3.9), layout="constrained")
        draw_timeline(figure, sample, plain_ms)
        figure.axes[0].set_title(title, fontsize=8.5, color=GREY, loc="left")
        save(figure, path)


def draw_curves(
    axes: Axes,
    curves: Mapping[str, Sequence[tuple[float, float | None]]],
    *,
    x: str,
    y: str,
    share: bool = False,
    bounds: Mapping[str, Bounds] | None = None,
) -> None:
    """One line for each curve of (x, y) points; points without a value are left out. `share`: of
    values between 0 and 1, all of which are shown. `bounds`: how sure each point is."""
    for index, (label, points) in enumerate(curves.items()):
        known = [(at, value) for at, value in points if value is not None]
        if not known:
            continue
        if bounds is not None:
            draw_sure(axes, index, points, label, bounds[label])
            continue
        axes.plot(
            *zip(*known, strict=True),
            color=SERIES[index % len(SERIES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            markevery=max(1, len(known) // 12),
            linewidth=1.3,
            label=label,
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if share:
        axes.set_ylim(0, 1.02)
    if len(curves) > 1 or bounds is not None:
        legend_below(axes)
    tidy(axes)
