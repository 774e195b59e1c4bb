"""The pruning curve: size against accepted length against predicted tokens per second.

    python -m dspark_eval.prune_curve --draft runs/mine --out runs/curve --steps 300

A drafter is pruned to several shares of its parameters by `dspark prune`, each in a folder of its
own under OUT, and decoded greedily on the held-out prompts of its own run, before and after
recovery. Speed is predicted by `dspark.inspection`: from a table of measured step times if one is
given, else from bytes at a stated bandwidth, which is a guess and called one. What is finished is
kept; the same command goes on. Writes OUT/curve.json and OUT/curve.png.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from dspark.console import Parser, module_command
from dspark.distill.prune import run_prune
from dspark.distill.prune_options import PruneOptions
from dspark.distill.pruned_folder import PRUNED, REPORT
from dspark.draft.checkpoint import read_config
from dspark.draft.speedup import best
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.inspection import inspect_drafter
from dspark.inspection_inputs import read_cost_table
from dspark.wording import counted
from dspark_eval.environment import describe_environment
from dspark_eval.plots import BLUE, GREY, RED, save

SHARES = (100, 80, 65, 50, 40, 30)
CURVE_FILE, PLOT_FILE = "curve.json", "curve.png"
STAGES = ("pruned", "recovered")


@dataclass(frozen=True)
class CurveOptions:
    """What to measure.

    shares: percentages of the drafter's parameters. prompts: held-out prompts decoded at each.
    bandwidth: bytes a second, for predictions from bytes. cost_table: measured step times instead.
    """

    draft: Path
    out: Path
    shares: tuple[int, ...] = SHARES
    steps: int = 300
    prompts: int = 32
    bandwidth: float = 1e11
    cost_table: Path | None = None

    def __post_init__(self) -> None:
        if len(self.shares) < 2 or any(not 0 < share <= 100 for share in self.shares):
            raise UserError(
                f"--sizes {' '.join(map(str, self.shares))}: expected two or more percentages of "
                "the drafter's parameters, up to 100"
            )
        if self.steps < 1:
            raise UserError(f"--steps {self.steps}: expected at least 1, the curve shows recovery")
        if self.prompts < 1:
            raise UserError(f"--prompts {self.prompts}: expected at least 1")
        if not 0 < self.bandwidth < float("inf"):
            raise UserError(f"--bandwidth {self.bandwidth / 1e9:g}: expected GB/s above 0")


def run_curve(options: CurveOptions) -> dict[str, Any]:
    """Prune to every share, or go on; returns the curve, which is OUT/curve.json."""
    times = None if options.cost_table is None else read_cost_table(options.cost_table)
    points = [_point(options, share, times) for share in sorted(options.shares, reverse=True)]
    document = {
        "schema_version": 1,
        "target": points[0]["target"],
        "draft": str(options.draft),
        "steps": options.steps,
        "prompts": options.prompts,
        "temperature": 0.0,
        "speed_from": points[0]["speed_from"],
        "points": points,
        "environment": _environment(options.out / CURVE_FILE, points),
    }
    atomic_write_json(options.out / CURVE_FILE, document)
    plot_curve(document, options.out / PLOT_FILE)
    return document


def _environment(before: Path, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the points were measured: here and now, or as the file of them says already."""
    known = read_json(before) if before.is_file() else {}
    if known.get("points") == points and known.get("environment"):
        return dict(known["environment"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # as pruning chooses
    return describe_environment(device, torch.float32)


def _point(options: CurveOptions, share: int, times: Mapping[int, float] | None) -> dict[str, Any]:
    folder = options.out / f"params-{share:03d}"
    decoding = {"eval.prompts": options.prompts, "eval.temperatures": [0.0]}
    pruning = PruneOptions(
        options.draft, folder, f"params={share}%", steps=options.steps, settings=decoding
    )
    report = run_prune(pruning, resume=(folder / REPORT).is_file())
    config = read_config(folder)
    point: dict[str, Any] = {
        "share": share,
        "parameters": report["pruned"]["parameters"],
        "bytes_per_draft_step": report["pruned"]["bytes_per_draft_step"],
        "layers": config.num_layers,
        "heads": config.num_attention_heads,
        "mlp": config.intermediate_size,
        "rank": config.markov_rank,
    }
    recovery = report["recovery"]
    for stage, where in zip(STAGES, (folder / PRUNED, folder), strict=True):
        (decoded,) = report[stage]["decoded"]
        known = [chance for chance in decoded["conditional_acceptance"] if chance is not None]
        found = inspect_drafter(
            where,
            target=recovery["target"]["name"],
            acceptance={"T=0": tuple(known)},
            times=times,
            bandwidth=None if times else options.bandwidth,
        )
        prediction = best(found.predictions["T=0"])
        point["speed_from"], point["target"] = found.times_from, recovery["target"]["name"]
        point[stage] = {
            "accepted_length": decoded["accepted_length"],
            "conditional_acceptance": known,
            "draft_length": prediction and prediction.draft_length,
            "speed_up": prediction and prediction.speed_up,
            "tokens_per_s": prediction and prediction.tokens_per_s,
        }
    return point


def plot_curve(document: Mapping[str, Any], path: Path) -> None:
    """Two panels over the number of parameters: accepted length, and predicted tokens a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    length, speed = figure.subplots(1, 2)
    sizes = [point["parameters"] / 1e6 for point in document["points"]]
    for stage, colour, marker in zip(STAGES, (RED, BLUE), ("s", "o"), strict=True):
        label = "before recovery" if stage == "pruned" else "after recovery"
        for axes, key in ((length, "accepted_length"), (speed, "tokens_per_s")):
            values = [point[stage][key] for point in document["points"]]
            axes.plot(sizes, values, color=colour, marker=marker, label=label)
    length.set_ylabel("accepted length, temperature 0")
    speed.set_ylabel("predicted tokens per second")
    for axes in (length, speed):
        axes.set_xlabel("parameters (M)")
        axes.grid(color=GREY, alpha=0.2)
        axes.legend(frameon=False)
    speed.set_title(f"from {document['speed_from']}", fontsize=9)
    length.set_title(
        f"{counted(document['prompts'], 'held-out prompt')}, {counted(document['steps'], 'step')} "
        "of recovery",
        fontsize=9,
    )
    save(figure, path)


def table(document: Mapping[str, Any]) -> str:
    """The curve as Markdown."""
    lines = [
        "| parameters | layers | heads | MLP | rank | MB a draft step | accepted length, cut "
        "| recovered | tokens/s, cut | recovered |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for point in document["points"]:
        cells = [f"{point['parameters']:,}"]
        cells += [str(point[key]) for key in ("layers", "heads", "mlp", "rank")]
        cells += [f"{point['bytes_per_draft_step'] / 1e6:.2f}"]
        cells += [f"{point[stage]['accepted_length']:.2f}" for stage in STAGES]
        cells += [f"{point[stage]['tokens_per_s'] or 0:.0f}" for stage in STAGES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@module_command
def main(arguments: Sequence[str]) -> None:
    """Parse, run, print."""
    parser = Parser(prog="python -m dspark_eval.prune_curve", description=__doc__)
    parser.add_argument("--draft", type=Path, required=True, help="folder of a trained drafter")
    parser.add_argument("--out", type=Path, required=True, help="folder of all sizes")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SHARES), help="percentages")
    parser.add_argument("--steps", type=int, default=300, help="steps of recovery at each size")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts decoded")
    parser.add_argument("--bandwidth", type=float, default=100.0, help="GB/s of the memory")
    parser.add_argument("--cost-table", type=Path, help="measured step times, instead of bytes")
    given = parser.parse_args(arguments)
    options = CurveOptions(
        given.draft, given.out, tuple(given.sizes), given.steps, given.prompts,
        1e9 * given.bandwidth, given.cost_table,
    )  # fmt: skip
    typer.echo(table(run_curve(options)))


if __name__ == "__main__":
    sys.exit(main())
