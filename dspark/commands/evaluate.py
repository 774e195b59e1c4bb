"""`dspark eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    end_with_verdict,
    print_json,
)
from dspark.commands.side_by_side import side_by_side

SuiteFolder = Annotated[
    Path | None,
    typer.Option(
        "--suite-dir",
        help="Folder with NAME.jsonl of public sets; else DSPARK_SUITES, else the hub.",
    ),
]
ProtocolName = Annotated[
    str | None,
    typer.Option(
        help="dspark-paper: temperature 1, chain, block 7, first turns, the paper's sizes."
    ),
]
Turns = Annotated[int | None, typer.Option(help="Turns of each conversation; without it, all.")]
Plain = Annotated[
    int, typer.Option(help="Prompts of each set that plain decoding answers too: texts, accuracy.")
]
CheckTexts = Annotated[
    bool, typer.Option("--check/--no-check", help="Hold every text against the target's own law.")
]
RunCode = Annotated[
    bool,
    typer.Option(
        "--run-code",
        help="RUNS MODEL-WRITTEN CODE to grade it: limits, but no sandbox; use a container.",
    ),
]
Concurrency = Annotated[
    list[int], typer.Option(help="Batch sizes at which plain and speculative decoding are timed.")
]
Rounds = Annotated[
    Path | None,
    typer.Option(help="JSONL file for every round: counts, level, confidence, entropy, seconds."),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        help="Several side by side, the first the reference: folders of drafters and baselines, "
        "lookup, model:NAME, plain."
    ),
]


@app.command(
    "eval", epilog="Example: `dspark eval --draft runs/mine --suite nano chats.jsonl --out report`"
)
def evaluate(
    context: typer.Context,
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
    suite_dir: SuiteFolder = None,
    protocol: ProtocolName = None,
    turns: Turns = None,
    plain: Plain = 0,
    check: CheckTexts = True,
    run_code: RunCode = False,
    concurrency: Concurrency = [],  # noqa: B006 - typer reads it, nobody changes it
    rounds: Rounds = None,
    compare: Compare = None,
    as_json: PrintJson = False,
) -> None:
    """Measure where a drafter is accepted: accepted length, acceptance at each position.

    Exit code 1, with everything written, where a text is NOT LOSSLESS.
    """
    from dspark_eval.protocols import with_protocol
    from dspark_eval.settings import EvalOptions

    asked: dict[str, Any] = {
        "n_prompts": n_prompts,
        "max_new_tokens": max_new_tokens,
        "draft_length": draft_length,
        "policy": policy,
        "bands": bands,
        "verification": verification,
        "relaxed": relaxed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "turns": turns,
    }
    given = {name: value for name, value in asked.items() if _was_given(context, name)}
    settings = with_protocol(protocol, given, asked)
    if compare:
        side_by_side(context, settings)
        return
    options = EvalOptions(
        draft=draft or default_draft(),
        target=target,
        suites=tuple(suite),
        high=high,
        low=low,
        siblings=siblings,
        cost_model=cost_model,
        profile=profile,
        threads=threads,
        device=device,
        dtype=dtype,
        out=out,
        quiet=as_json,
        suite_dir=suite_dir,
        protocol=protocol,
        plain=plain,
        check_texts=check,
        run_code=run_code,
        concurrency=tuple(concurrency),
        rounds=rounds,
        command=context.obj,
        **settings,
    )
    from dspark_eval.acceptance import run_eval

    result = run_eval(options)
    if as_json:
        print_json(result)
    end_with_verdict(result)


def _was_given(context: typer.Context, name: str) -> bool:
    """Whether the option stood on the command line: a protocol replaces defaults alone."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
