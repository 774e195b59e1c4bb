"""Sections on what a drafter knows about itself: calibration, and policies that rest on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dspark.wording import counted
from dspark_eval.cells import interval, number, percent, rate
from dspark_eval.plots import BLUE, GREY, ORANGE, tidy
from dspark_eval.policies.plots import LABELS
from dspark_eval.reliability import plot_reliability
from dspark_eval.report_notes import stops_lines
from dspark_eval.reporting import words
from dspark_eval.reporting.blocks import Block, Picture, Prose, Section, notes, table
from dspark_eval.reporting.figures import draw_curves, panel
from dspark_eval.reporting.words import machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Setting = Mapping[str, Any]
WAYS = (("before", ORANGE, "s", "--"), ("after", BLUE, "o", "-"))


def calibration(source: str, value: Any) -> Section:
    """What the confidence is worth, before and after its fit."""
    title = f"Calibration: {words.name(value['drafter'])}"
    return Section(title, tuple(_calibration(value)), source)


def _calibration(value: Mapping[str, Any]) -> Iterator[Block]:
    where = f", {machine(value['environment'])}" if value.get("environment") else ""
    yield Prose(
        f"`{value['drafter']}` for `{value['target']}`, on {value['dataset']}, seed "
        f"{value['seed']}{where}. Expected calibration error of the predicted survival, "
        f"{value['bins']} bins, averaged over draft positions; after the fit on prompts that it "
        "has not seen; perfect: what chance alone shows on as many rounds."
    )
    yield table(
        "Calibration error in each sampling setting",
        ("temperature", "prompts", "rounds", "before", "after", "perfect"),
        (
            (
                f"{s['temperature']:g}", str(s["prompts"]), str(s["rounds"]),
                *(percent(s[f"average_ece_{key}"]) for key in ("before", "after", "floor")),
            )
            for s in value["settings"]
        ),
        texts=0,
    )  # fmt: skip
    yield from notes(
        [*value["warnings"], *(line for s in value["settings"] for line in stops_lines(s))]
    )
    for setting in value["settings"]:
        yield from _pictures(value, setting)


def _pictures(value: Mapping[str, Any], setting: Setting) -> Iterator[Picture]:
    degrees = f"{setting['temperature']:g}"
    n = (
        f"temperature {degrees}, n = {counted(setting['rounds'], 'round')} of "
        f"{counted(setting['prompts'], 'prompt')}"
    )
    yield Picture(
        f"reliability-t{degrees}",
        f"Reliability at temperature {degrees}, all draft positions: predicted against observed "
        "survival, before and after the fit. On the dashed line a forecast comes true; a larger "
        "mark stands for more forecasts.",
        _pooled_alt(setting),
        partial(panel, partial(draw_reliability, setting=setting), title=n, size=(4.8, 4.2)),
    )
    yield Picture(
        f"ece-t{degrees}",
        f"Calibration error by draft position at temperature {degrees}; perfect: what chance "
        "alone shows.",
        _ece_alt(setting),
        partial(panel, partial(draw_ece, setting=setting), title=n, size=(4.8, 4.2)),
    )
    yield Picture(
        f"reliability-by-position-t{degrees}",
        f"Reliability at temperature {degrees}, position by position; a larger mark stands for "
        "more forecasts.",
        _ece_alt(setting),
        partial(plot_reliability, value, setting),
        wide=True,
    )


def pooled(setting: Setting, way: str) -> list[tuple[float, float, int]]:
    """(mean prediction, share that survived, rounds) of each bin that has any, all positions."""
    parts = [slot[way] for slot in setting["diagram"]]
    sums = [
        [sum(column) for column in zip(*(part[key] for part in parts), strict=True)]
        for key in ("predicted_sum", "survived", "rounds")
    ]
    return [(p / n, s / n, int(n)) for p, s, n in zip(*sums, strict=True) if n]


def draw_reliability(axes: Axes, setting: Setting) -> None:
    """Two lines over the diagonal; the area of a mark tells how many forecasts it stands for."""
    floor = percent(setting["average_ece_floor"])
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--",
              label=f"perfect: ECE {floor}")  # fmt: skip
    for way, colour, marker, line in WAYS:
        points = pooled(setting, way)
        if not points:
            continue
        x, y, counts = zip(*points, strict=True)
        sizes = [max(10, 120 * count / max(counts)) for count in counts]
        error = percent(setting[f"average_ece_{way}"])
        axes.plot(x, y, color=colour, linewidth=1, linestyle=line)
        axes.scatter(x, y, sizes, color=colour, marker=marker, label=f"{way}: ECE {error}",
                     edgecolor="white", linewidth=0.5, zorder=3, clip_on=False)  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("predicted survival")
    axes.set_ylabel("observed survival")
    axes.legend(frameon=False, fontsize=8, loc="upper left", markerscale=0.7)
    tidy(axes)


def draw_ece(axes: Axes, setting: Setting) -> None:
    """Calibration error of each position, in percent."""
    for way, colour, marker, line in (*WAYS, ("floor", GREY, "", ":")):
        values = setting[f"ece_{way}"]
        axes.plot(
            range(1, len(values) + 1),
            [float("nan") if value is None else 100 * value for value in values],
            color=colour, marker=marker, linestyle=line,
            label="perfect" if way == "floor" else way,
        )  # fmt: skip
    axes.set_xticks(range(1, len(setting["ece_after"]) + 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("draft position")
    axes.set_ylabel("expected calibration error (%)")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)


def _pooled_alt(setting: Setting) -> str:
    return "; ".join(
        f"{way}: "
        + ", ".join(f"{y:.2f} survived of {n} forecasts near {x:.2f}" for x, y, n in points)
        for way in ("before", "after")
        if (points := pooled(setting, way))
    )


def _ece_alt(setting: Setting) -> str:
    return "; ".join(
        f"Calibration error by position {said}: " + " ".join(map(percent, setting[f"ece_{way}"]))
        for way, said in (
            ("before", "before"),
            ("after", "after"),
            ("floor", "of a perfect forecast"),
        )
    )


# ------------------------------------------------------------------ policies


def policies(source: str, value: Any) -> Section:
    """Draft-length policies side by side, and the sweep of their thresholds."""
    return Section(f"Policies: {words.name(value['drafter'])}", tuple(_policies(value)), source)


def _policies(value: Mapping[str, Any]) -> Iterator[Block]:
    stops = ", ".join(f"{name} {x:g}" for name, x in value["stops"].items() if x is not None)
    yield Prose(
        f"`{value['drafter']}` for `{value['target']}`, temperature {value['temperature']:g}, at "
        f"most {counted(value['max_new_tokens'], 'new token')}, seed {value['seed']}, "
        f"{machine(value['environment'])}. Thresholds, fitted on other prompts: {stops}. Modelled "
        "tokens per second come from whole blocks and measured step times. Verified: drafts that "
        "were judged, none behind an accepted end token. Rows: all of a target pass, with the "
        "anchor, siblings, padding and drafts behind the end."
    )
    for name, found in value["sets"].items():
        yield table(
            f"{name}, {counted(found['n_prompts'], 'prompt')}",
            ("policy", "accepted length", "accepted drafts", "drafted", "verified", "rows",
             "tokens/s measured", "modelled"),
            map(_policy_row, found["rows"]),
        )  # fmt: skip
    yield from notes(value["warnings"])
    for rule, label in LABELS.items():
        for key, y in (
            ("accepted_length", "accepted length (tokens per round)"),
            ("acceptance_rate", "accepted drafts (share of those sent)"),
            ("tokens_per_s", "modelled tokens per second"),
        ):
            curves = {
                name: [(point["threshold"], point[key]) for point in sweeps[rule]]
                for name, sweeps in value["sweeps"].items()
                if rule in sweeps
            }
            if curves:
                yield _sweep_picture(value, rule, label, key, y, curves)


def _sweep_picture(
    value: Mapping[str, Any],
    rule: str,
    label: str,
    key: str,
    y: str,
    curves: Mapping[str, Sequence[tuple[float, float | None]]],
) -> Picture:
    fitted = value["stops"]["s_stop" if rule == "confidence" else "h_stop"]

    def draw(axes: Axes) -> None:
        draw_curves(axes, curves, x=label, y=y)
        axes.axvline(fitted, color=GREY, linewidth=0.8, linestyle="--")

    n = " + ".join(str(sweeps[rule][0]["rounds"]) for sweeps in value["sweeps"].values())
    return Picture(
        f"sweep-{rule}-{key.split('_')[0]}",
        f"Threshold sweep of the {rule} rule: {y}. Dashed: the fitted threshold.",
        "; ".join(_best(name, points) for name, points in curves.items()),
        partial(panel, draw, title=f"n = {n} rounds of whole blocks"),
    )


def _best(name: str, points: Sequence[tuple[float, float | None]]) -> str:
    known = [(value, at) for at, value in points if value is not None]
    if not known:
        return f"{name}: not measured"
    value, at = max(known)
    return f"{name}: at most {value:.2f}, at {at:g}"


def _policy_row(row: Mapping[str, Any]) -> Sequence[str]:
    return (
        row["policy"],
        f"{number(row['accepted_length'], 2)} {interval(row['accepted_length_ci95'])}".strip(),
        percent(row["acceptance_rate"]),
        number(row["drafted"], 2),
        number(row["verified"], 2),
        number(row["rows_per_round"], 2),
        rate(row["tokens_per_s"]),
        rate(row["modelled_tokens_per_s"]),
    )
