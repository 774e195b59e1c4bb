"""Sections on step times: the cost model with its measured points, and what follows for a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator, NullLocator

from dspark.runtime.cost_model import BatchCosts, CostModel, cost_model_from_dict, interpolate
from dspark.wording import counted
from dspark_eval.cells import number
from dspark_eval.plots import BLUE, GREY, MARKERS, ORANGE, SERIES, tidy
from dspark_eval.reporting import words
from dspark_eval.reporting.blocks import Block, Picture, Prose, Section, table
from dspark_eval.reporting.figures import PANEL, panel
from dspark_eval.reporting.words import label, machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS = 60
FILLS = ("full", "none", "left", "right")


def cost_model(source: str, value: Any) -> Section:
    """Seconds of a draft and a verify pass by their length, and what a drafter must reach."""
    return Section(f"Cost model: {words.name(value['drafter'])}", tuple(_blocks(value)), source)


def _blocks(value: Mapping[str, Any]) -> Iterator[Block]:
    model = cost_model_from_dict(value)
    where = f", {machine(model.environment)}" if model.environment else ""
    yield Prose(
        f"`{model.drafter}` drafting for `{model.target}` after "
        f"{counted(model.context_tokens, 'token')}{where}. Lower quartiles of real passes; between "
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


# ------------------------------------------------------------------ throughput


@dataclass(frozen=True)
class Rate:
    """Tokens per second of all requests together; `n` prompts of `origin` stand behind it."""

    concurrency: int
    plain: float
    speculative: float
    measured: bool
    origin: str
    n: int

    @property
    def named(self) -> str:
        """For a legend."""
        return f"{label(self.origin)}, n = {self.n}"


def rates(kind: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Rate]]:
    """What a document says of throughput, each with the machine and target it is of."""
    if kind == "bench":
        run = value.get("runs", [value])[0]
        plain, fast = run["plain_tokens_per_s"], run["speculative_tokens_per_s"]
        prompts, n = run["extra"]["prompts"], run["n_prompts"]
        yield _of(run["target"], run), Rate(run["batch"], plain, fast, True, prompts, n)
    elif kind == "frames":
        for name, found in value["suites"].items():
            plain, fast = (found[way]["tokens_per_s"] for way in ("plain", "speculative"))
            rate = Rate(value["batch"], plain, fast, True, name, found["n_prompts"])
            yield _of(value["target"], value), rate
    elif kind == "eval":
        for name, suite in value["suites"].items():
            for key, measured in (("goodput", False), ("served", True)):
                found = _points(suite.get(key) or (), measured, name, suite["n_prompts"])
                yield from ((_of(value["target"], suite), rate) for rate in found)


def _points(
    points: Sequence[Mapping[str, Any]], measured: bool, origin: str, n: int
) -> Iterator[Rate]:
    for point in points:
        plain, fast = point["plain"], point["speculative"]
        if plain and fast:
            yield Rate(point["concurrency"], plain, fast, measured, origin, n)


def _of(target: str, holder: Mapping[str, Any]) -> str:
    return f"{Path(target).name}, {machine(holder['environment'], short=True)}"


def throughput(documents: Sequence[tuple[str, Mapping[str, Any]]]) -> Section | None:
    """Total tokens per second against concurrency, over all documents; None without two points."""
    groups: dict[str, list[Rate]] = {}
    for kind, value in documents:
        for name, rate in rates(kind, value):
            groups.setdefault(name, []).append(rate)
    groups = {
        name: found for name, found in groups.items() if len({r.concurrency for r in found}) > 1
    }
    if not groups:
        return None
    blocks: list[Block] = [
        Prose(
            "Tokens per second of all requests together. Measured: whole runs. Modelled: accepted "
            "length of recorded blocks over measured step times, at the draft length that is best "
            "for that many requests."
        )
    ]
    for number_, (name, found) in enumerate(groups.items(), 1):
        ordered = sorted(found, key=lambda r: (r.concurrency, r.origin, r.measured))
        blocks.append(
            table(
                f"Throughput against concurrency: {name}",
                (
                    "requests",
                    "prompt set",
                    "prompts",
                    "plain, tokens/s",
                    "speculative",
                    "speed-up",
                    "how",
                ),
                map(_rate_row, ordered),
                texts=0,
            )
        )
        blocks.append(
            Picture(
                f"throughput-{number_}",
                f"Throughput against concurrency, {name}.",
                "; ".join(
                    f"{r.concurrency} requests: plain {r.plain:.0f}, speculative "
                    f"{r.speculative:.0f}"
                    for r in ordered
                ),
                partial(
                    panel,
                    partial(draw_throughput, found=ordered),
                    title=name,
                    size=(PANEL[0], 4.6),
                ),
            )
        )
    return Section("Throughput against concurrency", tuple(blocks))


def _rate_row(rate: Rate) -> Sequence[str]:
    return (
        str(rate.concurrency),
        rate.origin,
        str(rate.n),
        number(rate.plain, 1),
        number(rate.speculative, 1),
        f"{number(rate.speculative / rate.plain, 2)}x",
        "measured" if rate.measured else "modelled",
    )


def draw_throughput(axes: Axes, found: Sequence[Rate]) -> None:
    """Modelled values as lines, measured ones as marks."""
    modelled = [rate for rate in found if not rate.measured]
    measured = [rate for rate in found if rate.measured]
    origins = list(dict.fromkeys(rate.named for rate in modelled))
    for origin, line in zip(origins, ("-", "--", ":", "-.") * len(origins), strict=False):
        own = [rate for rate in modelled if rate.named == origin]
        for way, colour in (("plain", ORANGE), ("speculative", BLUE)):
            if way == "plain" and origin != origins[0]:
                continue  # plain decoding costs the same whatever is asked
            axes.plot([r.concurrency for r in own], [getattr(r, way) for r in own], color=colour,
                      linestyle=line, label=f"{way}, modelled"
                      + (f" ({origin})" if way == "speculative" else ""))  # fmt: skip
    origins = list(dict.fromkeys(rate.named for rate in measured))
    for origin, fill in zip(
        origins, ("full", "none", "left", "right") * len(origins), strict=False
    ):
        own = [rate for rate in measured if rate.named == origin]
        for way, colour, marker in (("plain", ORANGE, "s"), ("speculative", BLUE, "o")):
            axes.plot([r.concurrency for r in own], [getattr(r, way) for r in own], linestyle="",
                      marker=marker, color=colour, fillstyle=fill,
                      label=f"{way}, measured ({origin})")  # fmt: skip
    ticks = sorted({rate.concurrency for rate in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second, all requests")
    axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    tidy(axes)
