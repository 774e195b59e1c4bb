"""`dspark generate`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import (
    CostModelFile,
    Device,
    DraftLength,
    DType,
    Graphs,
    MaxNewTokens,
    PrintJson,
    Seed,
    Target,
    Threads,
    TopK,
    TopP,
    UseBands,
)

INTERRUPTED, CLOSED = 130, 1


@app.command(epilog='Example: `dspark generate "What is 12 times 7?" --show-draft --stats`')
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; `-` reads it from stdin.")],
    target: Target = "nano",
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the drafter; without it, the one `dspark distill` wrote for this "
            "target, or plain decoding if there is none."
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode without a drafter, one token per step.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            help="How long drafts are: fixed, entropy, confidence, throughput, "
            "throughput-delayed or auto; without it, fixed."
        ),
    ] = None,
    draft_length: DraftLength = None,
    bands: UseBands = False,
    siblings: Annotated[
        int | None, typer.Option(help="Siblings of a position in the mid band, 2; means --bands.")
    ] = None,
    cost_model: CostModelFile = None,
    verification: Annotated[
        str | None,
        typer.Option(help="token or block, both lossless; without it, token."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    max_new_tokens: MaxNewTokens = 256,
    min_new_tokens: Annotated[
        int, typer.Option(help="Nothing but --max-new-tokens ends the answer before.")
    ] = 0,
    stop: Annotated[
        list[str], typer.Option(help="Strings that end the answer; they are not part of it.")
    ] = [],  # noqa: B006 - typer reads it, nobody changes it
    logit_bias: Annotated[
        list[str],
        typer.Option(help="ID:NUMBER or TOKEN:NUMBER added to a logit; -inf forbids the token."),
    ] = [],  # noqa: B006
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens seen before become less likely.")
    ] = 1.0,
    no_repeat_ngram: Annotated[
        int, typer.Option(help="No sequence of this many tokens comes twice; 0 is off.")
    ] = 0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompt as it is: no chat template.")
    ] = False,
    show_draft: Annotated[
        bool, typer.Option("--show-draft", help="Mark where each token came from.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="End with the table of rounds, on stderr.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Save what --show-draft shows as a picture.")
    ] = None,
    graphs: Graphs = False,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: DType = "float32",
    as_json: PrintJson = False,
) -> None:
    """Answer a prompt, showing the text as it is committed.

    The distribution is the target's own with any drafter, policy and verification. Ctrl-C ends the
    answer and keeps what is there.
    """
    from dspark.generation.options import GenerateOptions

    if plain and draft is not None:
        raise typer.BadParameter("--plain decodes without a drafter, --draft names one")
    remarks: list[str] = []
    if draft is None and not plain:
        draft = _own_draft(target, remarks)
    options = GenerateOptions(
        prompt=prompt,
        target=target,
        draft=draft,
        policy=policy,
        draft_length=draft_length,
        bands=bands,
        siblings=siblings,
        cost_model=cost_model,
        verification=verification,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop=tuple(stop),
        logit_bias=tuple(logit_bias),
        repetition_penalty=repetition_penalty,
        no_repeat_ngram=no_repeat_ngram,
        seed=seed,
        system=system,
        raw=raw,
        show_draft=show_draft,
        stats=stats,
        svg=svg,
        graphs=graphs,
        json=as_json,
        threads=threads,
        device=device,
        dtype=dtype,
    )
    from dspark.generation.run import run_generate

    try:
        document = run_generate(options, remarks)
    except BrokenPipeError:  # whoever read the text has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(CLOSED) from None
    if document["finish"] == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _own_draft(target: str, remarks: list[str]) -> Path | None:
    """The drafter where `dspark distill` writes, if it was made for this target; remarks if not."""
    from dspark.distill.config import load_config

    folder = Path(load_config().out.dir)
    if not (folder / "config.json").is_file():
        missing = f"no drafter in {folder}, where `dspark distill` writes"
    else:
        from dspark.draft.checkpoint import read_config

        made_for = read_config(folder).target
        if made_for is None or made_for.name == target:
            return folder
        missing = f"the drafter in {folder} was made for target {made_for.name}"
    remarks.append(f"{missing}; decoding plainly, one token per step")
    return None
