"""Sections on ways to draft side by side, on the same prompts.

`dspark eval --compare`, the ordering of `dspark_eval.baselines`, and `dspark_eval.real_text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dspark.errors import UserError
from dspark.wording import counted
from dspark_eval.baselines.table import SCHEMA_VERSION
from dspark_eval.baselines.table_text import equal, rate_table, rate_title, setting_table
from dspark_eval.cells import number
from dspark_eval.compare_table import markdown
from dspark_eval.measured_files import short_hash
from dspark_eval.plots import BLUE, GREY, MARKERS, SERIES, position_bounds, tidy
from dspark_eval.real_text.table import tables
from dspark_eval.reporting.blocks import Block, Picture, Prose, Section, from_markdown, notes
from dspark_eval.reporting.figures import PANEL, draw_curves, panel, with_legend
from dspark_eval.reporting.words import HOW_SURE, label, labels, machine, name, names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Entry = Mapping[str, Any]


def comparison(source: str, value: Any) -> Section:
    """A table and pictures for each prompt set."""
    title = f"Comparison: {len(value['contenders'])} ways for {name(value['target'])}"
    return Section(title, tuple(_comparison(value)), source)


def _comparison(value: Mapping[str, Any]) -> Iterator[Block]:
    length = value["draft_length"] or "each its own block"
    yield Prose(
        f"`{value['target']}`, temperature {value['temperature']:g}, draft length {length}, "
        f"{value['verification']} verification, at most "
        f"{counted(value['max_new_tokens'], 'new token')}, seed {value['seed']}, "
        f"{machine(value['environment'])}. Every contender answers every prompt with the same "
        f"seed. Ratios are to `{value['reference']}`, speed-ups to plain decoding; 95 % over "
        "prompts, resampled in pairs."
    )
    hashed = [
        f"`{entry['name']}`{short_hash(entry.get('identity'))}"
        for entry in value["contenders"]
        if entry.get("identity")
    ]
    if hashed:
        yield Prose(f"Drafters: {', '.join(hashed)}.")
    for index, (suite, found) in enumerate(value["suites"].items(), start=1):
        caption = f"{suite}, {counted(found['n_prompts'], 'prompt')}"
        alone = markdown({**value, "suites": {suite: found}, "warnings": []})
        rows = [line for line in alone.splitlines() if line.startswith("|")]
        yield from from_markdown(rows, caption)
        yield from _pictures(index, suite, found, caption)
    yield from notes(value["warnings"])


def _pictures(index: int, suite: str, found: Entry, caption: str) -> Iterator[Picture]:
    entries = found["contenders"]
    short = names([entry["name"] for entry in entries])
    n = f"{label(suite)}, n = {counted(found['n_prompts'], 'prompt')}"
    for key, axis in (("accepted_length", "value"), ("speedup", "ratio")):
        bounds = "ci95" if axis == "value" else f"{axis}_ci95"
        rows = [
            (short[entry["name"]], entry[key][axis], entry[key][bounds])
            for entry in entries
            if entry[key] is not None and entry[key][axis] is not None
        ]
        what = "accepted length" if key == "accepted_length" else "speed-up against plain decoding"
        size = (PANEL[0], 1.1 + 0.36 * len(rows))
        yield Picture(
            f"compare-{key.replace('_', '-')}-{index}",
            f"{caption}: {what}; whiskers: 95 % over prompts.",
            f"{what}: " + "; ".join(f"{who} {number(middle, 2)}" for who, middle, _ in rows),
            partial(panel, partial(draw_intervals, rows=rows, x=what), title=n, size=size),
        )
    legend = labels(list(short.values()))
    curves = {
        legend[short[entry["name"]]]: list(enumerate(entry["conditional_acceptance"], start=1))
        for entry in entries
        if entry["conditional_acceptance"]
    }
    sure = {
        legend[short[entry["name"]]]: position_bounds(entry, found["n_prompts"])
        for entry in entries
    }
    drawn = partial(
        draw_curves,
        curves=curves,
        bounds=sure,
        x="draft position",
        y="P(accepted | all before accepted)",
        share=True,
    )
    yield Picture(
        f"compare-positions-{index}",
        f"{caption}: chance that a draft is accepted once all before it were, by its position. "
        f"{HOW_SURE}",
        "; ".join(
            f"{who}: " + " ".join(number(chance, 2) for _, chance in points)
            for who, points in curves.items()
        ),
        partial(panel, drawn, title=n, size=with_legend(len(curves))),
    )


def ordering(source: str, value: Any) -> Section:
    """Several kinds of drafters trained alike, by seeds. Raises UserError for an older table."""
    if value["schema_version"] < SCHEMA_VERSION:
        raise UserError(
            f"{source}: a table of an earlier dspark; the command that wrote it makes it anew, and "
            "measures nothing twice"
        )
    return Section(f"Ways to draft: {name(value['target'])}", tuple(_ordering(value)), source)


def _ordering(value: Mapping[str, Any]) -> Iterator[Block]:
    yield Prose(equal(value))
    for index, setting in enumerate(value["results"], start=1):
        n = counted(setting["n_prompts"], "prompt")
        caption = f"{setting['suite']}, temperature {setting['temperature']:g}, {n}"
        yield from from_markdown(setting_table(value, setting), caption)
        shown = [(arm, row["accepted_length"], _ends(row)) for arm, row in setting["arms"].items()]
        size = (PANEL[0], 1.1 + 0.36 * len(shown))
        drawn = partial(draw_intervals, rows=shown, x="accepted length, mean over seeds")
        yield Picture(
            f"ordering-{index}",
            f"{caption}: accepted length; whiskers: lowest and highest seed.",
            "; ".join(f"{arm} {middle:.2f}" for arm, middle, _ in shown),
            partial(panel, drawn, title=f"{label(setting['suite'])}, n = {n}", size=size),
        )
    if trials := rate_table(value):
        yield from from_markdown(trials, rate_title(value))


def _ends(row: Mapping[str, Any]) -> tuple[float, float] | None:
    each = row["accepted_length_per_seed"]
    return (min(each), max(each)) if len(each) > 1 else None


def real_text(source: str, value: Any) -> Section:
    """Drafters of a language model's own text."""
    blocks: list[Block] = [
        Prose(
            "Accepted length with the bonus token; 95 % over prompts; ratios on the same prompts, "
            "in pairs. A loop is easy to draft: figures without loops stand beside."
        )
    ]
    for caption, text in tables(value).items():
        blocks += from_markdown(text.splitlines(), caption)
    return Section("Real text", tuple(blocks), source)


def draw_intervals(
    axes: Axes, rows: Sequence[tuple[str, float, Sequence[float] | None]], x: str
) -> None:
    """A mark and its interval for each row, the first on top; the first one's value as a line."""
    for place, (_, middle, bounds) in enumerate(rows):
        if bounds is not None:
            axes.plot(bounds, [place, place], color=GREY, linewidth=1.4)
        axes.plot(middle, place, MARKERS[place % len(MARKERS)], color=SERIES[place % len(SERIES)])
        # in a column of their own, where no line runs through them
        axes.annotate(f"{middle:.2f}", (1.02, place), xycoords=("axes fraction", "data"),
                      va="center", fontsize=8, annotation_clip=False)  # fmt: skip
    if rows:
        axes.axvline(rows[0][1], color=BLUE, linewidth=0.8, linestyle="--", alpha=0.6)
    shown = labels([who for who, *_ in rows])
    axes.set_yticks(range(len(rows)), [shown[who] for who, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.set_xlabel(x)
    tidy(axes)
    axes.grid(axis="x", alpha=0.25)
