"""The command line: parse, call one function, print.

Each command imports what it needs when it runs, so `--help` answers at once. `dspark.console` turns
what goes wrong into one line and an exit code. Defaults that a dataclass owns are repeated here
only to be shown by `--help`; a test holds them equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark import __version__, console
from dspark.errors import UserError

app = typer.Typer(
    name="dspark",
    help="Distil, run and measure DSpark drafters: lossless speculative decoding at batch 1.",
    epilog="Start here: `dspark distill`, then `dspark bench --batch 1`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Draft = Annotated[
    Path | None,
    typer.Option(help="Folder of the drafter; without it, where `dspark distill` writes."),
]
Target = Annotated[str, typer.Option(help="The shipped `nano`, or the folder of a checkpoint.")]
DraftLength = Annotated[
    int | None,
    typer.Option(help="Tokens proposed per round; without it, the drafter's block size."),
]
PromptCount = Annotated[int, typer.Option(help="At most this many prompts of each set.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
TopP = Annotated[float, typer.Option(help="Nucleus; 1 keeps every token.")]
TopK = Annotated[int, typer.Option(help="Most likely tokens kept; 0 keeps every token.")]
Seed = Annotated[int, typer.Option(help="Decides every draw.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; without it, torch's choice.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
DType = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
PrintJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: `dspark distill --prompts mine.jsonl --out runs/mine --steps 500`")
def distill(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; the options here override it.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The shipped `nano`, or the folder of a checkpoint.")
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL files with `prompt`, `turns` or `messages`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; becomes the drafter's checkpoint.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="End after this many optimiser steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every draw of the run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other key, as `train.lr=1e-3`.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the run folder.")
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Train a drafter for a target (defaults: the shipped target and prompts)."""
    from dspark.distill.config import load_config

    overrides: dict[str, Any] = {
        "target.name": target,
        "data.prompts": [str(path) for path in prompts] if prompts else None,
        "out.dir": None if out is None else str(out),
        "train.max_steps": steps,
        "train.seed": seed,
    }
    given = {key: value for key, value in overrides.items() if value is not None}
    loaded = load_config(config, given | _parse_settings(settings))
    from dspark.distill.run import run_distill

    folder = run_distill(loaded, resume=resume)
    if as_json:
        from dspark.files import read_json

        _print_json({"drafter": str(folder), "last": read_json(folder / "training.json")[-1]})


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
        draft=draft or _default_draft(),
        target=target,
        suites=tuple(suite),
        n_prompts=n_prompts,
        max_new_tokens=max_new_tokens,
        draft_length=draft_length,
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
        _print_json(result)


@app.command(epilog="Example: `dspark bench --batch 1 --temperature 0 1 --json bench.json`")
def bench(
    batch: Annotated[int, typer.Option(help="Sequences decoded at once; 1 is what it does.")] = 1,
    draft: Draft = None,
    target: Target = "nano",
    prompts: Annotated[str, typer.Option(help="Name of a suite, or a JSONL file.")] = (
        "nano-problems"
    ),
    n_prompts: PromptCount = 60,
    max_new_tokens: MaxNewTokens = 256,
    draft_length: DraftLength = None,
    policy: Annotated[str, typer.Option(help="How the draft length is chosen: fixed.")] = "fixed",
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
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result there; `-` prints it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a picture (png, svg, pdf).")] = None,
) -> None:
    """Measure plain against speculative tokens per second, in one process."""
    from dspark_eval.settings import BenchOptions

    to_stdout = json_file == Path("-")
    options = BenchOptions(
        draft=draft or _default_draft(),
        target=target,
        prompts=prompts,
        n_prompts=n_prompts,
        max_new_tokens=max_new_tokens,
        draft_length=draft_length,
        batch=batch,
        policy=policy,
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
        json=None if to_stdout else json_file,
        plot=plot,
        quiet=to_stdout,
    )
    from dspark_eval.bench import run_bench

    result = run_bench(options)
    if to_stdout:
        _print_json(result)


@app.command(epilog="Example: `dspark doctor --json`")
def doctor(as_json: PrintJson = False) -> None:
    """Show versions, devices, usable kernel backends and whether the shipped files are intact."""
    from dspark.doctor import examine, render

    report = examine()
    if as_json:
        _print_json(report.to_dict())
    else:
        render(report)
    raise typer.Exit(0 if report.ok else 1)


def _default_draft() -> Path:
    from dspark.distill.config import load_config

    folder = Path(load_config().out.dir)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--draft: no drafter in {folder}, where `dspark distill` writes; run it first, "
            "or give --draft DIR"
        )
    return folder


def _parse_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    import yaml

    parsed = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: expected section.key=value, such as train.lr=1e-3")
        try:
            parsed[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):  # ValueError: an impossible date
            raise UserError(f"--set {text}: the value is not YAML; quote it") from None
    return parsed


def _print_json(result: object) -> None:
    typer.echo(json.dumps(result, indent=2, allow_nan=False))


def main() -> None:
    """Entry point of the console script and of `python -m dspark`."""
    sys.exit(console.run(app, sys.argv[1:]))
