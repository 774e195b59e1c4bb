"""`dspark eval`."""

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
    High,
    Low,
    MaxNewTokens,
    PolicyName,
    PrintJson,
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
    print_json,
)


@app.command(
    "eval", epilog="Example: `dspark eval --draft runs/mine --suite nano chats.jsonl --out report`"
)
def evaluate(
    draft: Draft = None,
    target: Target = "nano",
    suite: Annotated[
        list[str],
        typer.Option("--suite", "--prompts", help="Names of suites or JSONL files, each apart."),
    ] = ["nano"],  # noqa: B006 - typer reads it, nobody changes it
    n_prompts: PromptCount = 100,
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
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 980406,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: DType = "float32",
    out: Annotated[
        Path | None, typer.Option(help="Folder for eval.json and acceptance.png.")
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Measure where a drafter is accepted: accepted length, acceptance at each position."""
    from dspark_eval.settings import EvalOptions

    options = EvalOptions(
        draft=draft or default_draft(),
        target=target,
        suites=tuple(suite),
        n_prompts=n_prompts,
        max_new_tokens=max_new_tokens,
        draft_length=draft_length,
        policy=policy,
        bands=bands,
        high=high,
        low=low,
        siblings=siblings,
        verification=verification,
        relaxed=relaxed,
        cost_model=cost_model,
        profile=profile,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        threads=threads,
        device=device,
        dtype=dtype,
        out=out,
        quiet=as_json,
    )
    from dspark_eval.acceptance import run_eval

    result = run_eval(options)
    if as_json:
        print_json(result)
