"""`dspark calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import (
    CostModelFile,
    Device,
    Draft,
    DType,
    MaxNewTokens,
    PrintJson,
    PromptCount,
    Seed,
    Target,
    Threads,
    TopK,
    TopP,
    default_draft,
    print_json,
)


@app.command(epilog="Example: `dspark calibrate --draft runs/mine --prompts held-out.jsonl`")
def calibrate(
    draft: Draft = None,
    target: Target = "nano",
    suite: Annotated[
        list[str],
        typer.Option(
            "--suite", "--prompts", help="Suites or JSONL files that it was not trained on."
        ),
    ] = ["nano-validation"],  # noqa: B006 - typer reads it, nobody changes it
    n_prompts: PromptCount = 200,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[
        list[float], typer.Option(help="One entry is fitted for each value; 0 is greedy.")
    ] = [0.0, 1.0],  # noqa: B006
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 980406,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: DType = "float32",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for reliability.json and its pictures; else the drafter's."),
    ] = None,
    sglang: Annotated[
        Path | None, typer.Option(help="Folder for SGLang's temperature file and cost table.")
    ] = None,
    cost_model: CostModelFile = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Measure step times first, for thresholds of draft-length policies; they go "
            "where --cost-model says.",
        ),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace entries that were fitted on more prompts, too."),
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Fit what the drafter's confidence is worth, on rounds it was not trained on."""
    from dspark_eval.settings import CalibrateOptions

    options = CalibrateOptions(
        draft=draft or default_draft(),
        target=target,
        suites=tuple(suite),
        n_prompts=n_prompts,
        max_new_tokens=max_new_tokens,
        temperature=tuple(temperature),
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        threads=threads,
        device=device,
        dtype=dtype,
        out=out,
        sglang=sglang,
        cost_model=cost_model,
        profile=profile,
        replace=replace,
        quiet=as_json,
    )
    from dspark_eval.calibrate import run_calibrate

    result = run_calibrate(options)
    if as_json:
        print_json(result)
