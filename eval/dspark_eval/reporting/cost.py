"""The section on step times: the cost model with its measured points, and what it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from dspark.runtime.cost_model import BatchCosts, CostModel, cost_model_from_dict, interpolate
from dspark.wording import counted
from dspark_eval.plots import GREY, MARKERS, SERIES, tidy
from dspark_eval.reporting import words
from dspark_eval.reporting.blocks import Block, Picture, Prose, Section, table
from dspark_eval.reporting.figures import panel
from dspark_eval.reporting.refusals import Unreadable
from dspark_eval.reporting.words import machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS = 60


def cost_model(source: str, value: Any) -> Section:
    """Seconds of a draft and a verify pass by their length, and what a drafter must reach."""
    return Section(f"Cost model: {words.name(value['drafter'])}", tuple(_blocks(value)), source)


def _blocks(value: Mapping[str, Any]) -> Iterator[Block]:
    try:
        model = cost_model_from_dict(value)
    except ValueError as problem:
        raise Unreadable(str(problem)) from None
    where = f", {machine(model.environment)}" if model.environment else ""
    yield Prose(
        f"`{model.drafter}` drafting for `{model.target}` after "
        f"{counted(model.context_tokens, 'token')}{where}. {_measured(model)}; between "
        "measured points time is interpolated. Speculation pays where accepted length is above "
        "break-even: seconds of a round / seconds of a plain step."
    )
    yield table(
        "Step times by batch size",
        ("batch", "plain step, ms", "longest draft, ms", "its verify pass, ms", "other, ms",
         "break-even accepted length"),
        (_row(model, costs) for costs in model.batches),
        texts=0,
    )  # fmt: skip
    name = machine(model.environment, short=True) if model.environment else Path(model.target).name
    if "passes" in model.environment:
        name = f"n = {model.environment['passes']} a point, {name}"
    for key, drawn, caption in _figures(model):
        yield Picture(key, caption, _alt(model, key), partial(panel, drawn, title=name))


def _measured(model: CostModel) -> str:
    """What a point is."""
    frames = model.environment.get("frames")
    if frames is None:
        return "Lower quartiles of real passes"
    return (
        f"Medians of {frames} frames; each drafts the whole block and stands as a verify pass of "
        "its rows, for drafting has no seconds of its own"
    )


def _figures(model: CostModel) -> Iterator[tuple[str, Callable[[Axes], None], str]]:
    for kind, x, what in (
        ("verify", "rows of a request in a target pass", "A verify pass by its rows"),
        ("draft", "tokens drafted", "A draft pass by its length"),
    ):
        drawn = partial(draw_times, model=model, kind=kind, x=x)
        yield f"cost-{kind}", drawn, f"{what}: measured points, and what is assumed between them."
    yield (
        "break-even",
        partial(draw_break_even, model=model),
        "Accepted length above which a round beats plain decoding, by draft length.",
    )


def _row(model: CostModel, costs: BatchCosts) -> Sequence[str]:
    longest = max(costs.draft)
    return (
        str(costs.batch),
        f"{1e3 * costs.plain:.2f}",
        f"{1e3 * costs.draft[longest]:.2f} ({counted(longest, 'token')})",
        f"{1e3 * interpolate(costs.verify, 1 + longest):.2f} ({counted(1 + longest, 'row')})",
        f"{1e3 * costs.other:.2f}",
        f"{model.break_even(longest, 1 + longest, costs.batch):.2f}",
    )


def _alt(model: CostModel, key: str) -> str:
    if key == "break-even":
        costs = model.batches[0]
        pairs = (f"{g}: {model.break_even(g, 1 + g, costs.batch):.2f}" for g in sorted(costs.draft))
        return f"Batch {costs.batch}, by draft length: " + ", ".join(pairs)
    return "; ".join(
        f"Batch {costs.batch}: from {1e3 * points[min(points)]:.2f} ms at {min(points)} to "
        f"{1e3 * points[max(points)]:.2f} ms at {max(points)}"
        for costs in model.batches
        for points in (costs.verify if key == "cost-verify" else costs.draft,)
    )


def draw_times(axes: Axes, model: CostModel, kind: str, x: str) -> None:
    """Milliseconds: marks are measured, lines are `interpolate`."""
    for index, costs in enumerate(model.batches):
        points: Mapping[int, float] = getattr(costs, kind)
        low, high = min(points), max(points)
        places = [low + (high - low) * k / CURVE_POINTS for k in range(CURVE_POINTS + 1)]
        colour = SERIES[index % len(SERIES)]
        axes.plot(places, [1e3 * interpolate(points, at) for at in places], color=colour,
                  linewidth=1)  # fmt: skip
        axes.plot(
            sorted(points), [1e3 * points[n] for n in sorted(points)], linestyle="",
            marker=MARKERS[index % len(MARKERS)], color=colour, markersize=4.5,
            label=f"batch {costs.batch}",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x)
    axes.set_ylabel("milliseconds")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)


def draw_break_even(axes: Axes, model: CostModel) -> None:
    """A line for each batch size, and the most that a draft length can give."""
    longest = 1
    for index, costs in enumerate(model.batches):
        lengths = sorted(costs.draft)
        longest = max(longest, *lengths)
        axes.plot(
            lengths, [model.break_even(g, 1 + g, costs.batch) for g in lengths],
            color=SERIES[index % len(SERIES)], marker=MARKERS[index % len(MARKERS)],
            markersize=4.5, label=f"batch {costs.batch}",
        )  # fmt: skip
    axes.plot([1, longest], [2, longest + 1], color=GREY, linestyle="--", linewidth=0.8,
              label="every draft accepted")  # fmt: skip
    axes.set_ylim(bottom=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("draft length")
    axes.set_ylabel("accepted length to break even")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
