"""`dspark bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import (
    CostModelFile,
    Device,
    Draft,
    DraftLength,
    DType,
    Graphs,
    High,
    Low,
    MaxNewTokens,
    PolicyName,
    PromptCount,
    Seed,
    Siblings,
    Target,
    Threads,
    TopK,
    TopP,
    UseBands,
    UseProfile,
    UseRelaxed,
    Verification,
    default_draft,
    end_with_verdict,
    print_json,
)


@app.command(epilog="Example: `dspark bench --batch 1 --temperature 0 1 --json bench.json`")
def bench(
    batch: Annotated[
        int, typer.Option(help="Prompts decoded at once; more than 1 with --graphs alone.")
    ] = 1,
    draft: Draft = None,
    target: Target = "nano",
    prompts: Annotated[str, typer.Option(help="Name of a suite, or a JSONL file.")] = (
        "nano-problems"
    ),
    n_prompts: PromptCount = 60,
    max_new_tokens: MaxNewTokens = 256,
    draft_length: DraftLength = None,
    policy: PolicyName = "fixed",
    bands: UseBands = False,
    high: High = None,
    low: Low = None,
    siblings: Siblings = None,
    verification: Verification = "token",
    relaxed: UseRelaxed = False,
    cost_model: CostModelFile = None,
    profile: UseProfile = False,
    temperature: Annotated[
        list[float], typer.Option(help="One run for each value; 0 is greedy.")
    ] = [0.0],  # noqa: B006 - typer reads it, nobody changes it
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 980406,
    warmup: Annotated[int, typer.Option(help="Prompts decoded before the clock counts.")] = 2,
    repeats: Annotated[int, typer.Option(help="Times each prompt is measured.")] = 1,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: DType = "float32",
    peer: Annotated[
        bool,
        typer.Option("--peer", help="Also time transformers' generate on a model of equal shape."),
    ] = False,
    graphs: Graphs = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result there; `-` prints it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a picture (png, svg, pdf).")] = None,
) -> None:
    """Measure plain against speculative tokens per second, in one process.

    Exit code 1, with everything written, where a text is NOT LOSSLESS.
    """
    from dspark_eval.settings import BenchOptions

    to_stdout = json_file == Path("-")
    options = BenchOptions(
        draft=draft or default_draft(),
        target=target,
        prompts=prompts,
        n_prompts=n_prompts,
        max_new_tokens=max_new_tokens,
        draft_length=draft_length,
        batch=batch,
        policy=policy,
        bands=bands,
        high=high,
        low=low,
        siblings=siblings,
        verification=verification,
        relaxed=relaxed,
        cost_model=cost_model,
        profile=profile,
        temperature=tuple(temperature),
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        warmup=warmup,
        repeats=repeats,
        threads=threads,
        device=device,
        dtype=dtype,
        peer=peer,
        graphs=graphs,
        json=None if to_stdout else json_file,
        plot=plot,
        quiet=to_stdout,
    )
    from dspark_eval.bench import run_bench

    result = run_bench(options)
    if to_stdout:
        print_json(result)
    end_with_verdict(result)
