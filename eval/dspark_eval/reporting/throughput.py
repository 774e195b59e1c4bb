"""The section on throughput against concurrency: measured, and what step times foretell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import NullLocator

from dspark.wording import counted
from dspark_eval.cells import NOT_MEASURED, interval, number
from dspark_eval.plots import BLUE, ORANGE, tidy
from dspark_eval.reporting.blocks import Block, Picture, Prose, Section, table
from dspark_eval.reporting.figures import PANEL, panel
from dspark_eval.reporting.words import label, machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILLS = ("full", "none", "left", "right")


@dataclass(frozen=True)
class Rate:
    """Tokens per second of all requests together; `n` prompts of `origin` stand behind it, in
    `groups` of that many at once where they were served so. speedup_ci95: where it is known."""

    concurrency: int
    plain: float
    speculative: float
    measured: bool
    origin: str
    n: int
    groups: int | None = None
    speedup_ci95: Sequence[float] | None = None

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
        sure = run["speedup_ci95"]
        yield (
            _of(run["target"], run),
            Rate(run["batch"], plain, fast, True, prompts, n, speedup_ci95=sure),
        )
    elif kind == "frames":
        for name, found in value["suites"].items():
            plain, fast = (found[way]["tokens_per_s"] for way in ("plain", "speculative"))
            sure, n = found["speedup_ci95"], found["n_prompts"]
            rate = Rate(value["batch"], plain, fast, True, name, n, speedup_ci95=sure)
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
            groups, bounds = point.get("groups"), point.get("speedup_ci95")
            yield Rate(point["concurrency"], plain, fast, measured, origin, n, groups, bounds)


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
            "for that many requests. Groups: how many times so many requests were served together; "
            "a few say little, and have no interval."
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
                    "groups",
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
        NOT_MEASURED if rate.groups is None else str(rate.groups),
        number(rate.plain, 1),
        number(rate.speculative, 1),
        f"{number(rate.speculative / rate.plain, 2)}x {interval(rate.speedup_ci95)}".strip(),
        "measured" if rate.measured else "modelled",
    )


def draw_throughput(axes: Axes, found: Sequence[Rate]) -> None:
    """Modelled values as lines, or as a dash where there is but one; measured ones as marks, with
    the groups that they are of."""
    modelled = [rate for rate in found if not rate.measured]
    measured = [rate for rate in found if rate.measured]
    origins = list(dict.fromkeys(rate.named for rate in modelled))
    for origin, line in zip(origins, ("-", "--", ":", "-.") * len(origins), strict=False):
        own = [rate for rate in modelled if rate.named == origin]
        for way, colour in (("plain", ORANGE), ("speculative", BLUE)):
            if way == "plain" and origin != origins[0]:
                continue  # plain decoding costs the same whatever is asked
            axes.plot([r.concurrency for r in own], [getattr(r, way) for r in own], color=colour,
                      linestyle=line, marker="" if len(own) > 1 else "_", markersize=14,
                      markeredgewidth=2, label=f"{way}, modelled"
                      + (f" ({origin})" if way == "speculative" else ""))  # fmt: skip
    origins = list(dict.fromkeys(rate.named for rate in measured))
    for origin, fill in zip(origins, FILLS * len(origins), strict=False):
        own = [rate for rate in measured if rate.named == origin]
        for way, colour, marker in (("plain", ORANGE, "s"), ("speculative", BLUE, "o")):
            axes.plot([r.concurrency for r in own], [getattr(r, way) for r in own], linestyle="",
                      marker=marker, color=colour, fillstyle=fill,
                      label=f"{way}, measured ({origin})")  # fmt: skip
        for rate in own:
            if rate.groups is not None:
                top = max(rate.plain, rate.speculative)
                axes.annotate(counted(rate.groups, "group"), (rate.concurrency, top), (0, 7),
                              textcoords="offset points", ha="center", fontsize=7)  # fmt: skip
    ticks = sorted({rate.concurrency for rate in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second, all requests")
    axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    tidy(axes)
