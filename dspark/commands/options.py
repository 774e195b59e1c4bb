"""Options that several commands share, and what they print and default to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.errors import UserError

Draft = Annotated[
    Path | None,
    typer.Option(help="Folder of the drafter; without it, where `dspark distill` writes."),
]
Target = Annotated[str, typer.Option(help="`nano`, `smollm2`, or a checkpoint's folder.")]
DraftLength = Annotated[
    int | None,
    typer.Option(help="Tokens proposed per round; without it, the drafter's block size."),
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        help="Draft length: fixed, entropy, confidence, throughput, throughput-delayed, auto.",
    ),
]
UseBands = Annotated[
    bool,
    typer.Option("--bands", help="Siblings where confidence is middling, a cut where it is low."),
]
High = Annotated[
    float | None, typer.Option(help="Confidence of the high band, 0.9 (with --bands).")
]
Low = Annotated[
    float | None, typer.Option(help="Confidence below which a block is cut, 0.3 (with --bands).")
]
Siblings = Annotated[
    int | None, typer.Option(help="Siblings of a position in the mid band, 2 (with --bands).")
]
Verification = Annotated[
    str, typer.Option(help="token, or block, which accepts a little more; both lossless.")
]
UseRelaxed = Annotated[
    bool,
    typer.Option("--relaxed", help="Lossy: also accept typical tokens where confidence is high."),
]
CostModelFile = Annotated[
    Path | None,
    typer.Option(
        "--cost-model", help="Step times; without it, cost_model.json in the drafter's folder."
    ),
]
UseProfile = Annotated[
    bool,
    typer.Option("--profile", help="Measure step times first; they go where --cost-model says."),
]
PromptCount = Annotated[int, typer.Option(help="At most this many prompts of each set.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
TopP = Annotated[float, typer.Option(help="Nucleus; 1 keeps every token.")]
TopK = Annotated[int, typer.Option(help="Most likely tokens kept; 0 keeps every token.")]
Seed = Annotated[int, typer.Option(help="Decides every draw.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; without it, torch's choice.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
DType = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Graphs = Annotated[
    bool,
    typer.Option("--graphs", help="Recorded frames: the whole round as one CUDA graph."),
]
PrintJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def default_draft() -> Path:
    """Where `dspark distill` writes by default. Raises UserError if no drafter is there."""
    from dspark.distill.config import load_config

    folder = Path(load_config().out.dir)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--draft: no drafter in {folder}, where `dspark distill` writes; run it first, "
            "or give --draft DIR"
        )
    return folder


def print_json(result: object) -> None:
    """Indented JSON on stdout."""
    typer.echo(json.dumps(result, indent=2, allow_nan=False))


def end_with_verdict(document: Mapping[str, Any]) -> None:
    """Exit code 1 if a text of this measurement is not the target's; the numbers are out by now."""
    from dspark_eval.verdicts import exit_code

    if exit_code(document):
        raise typer.Exit(1)
