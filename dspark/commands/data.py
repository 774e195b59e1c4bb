"""`dspark data inspect` and `dspark data check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import PrintJson, Target, print_json
from dspark.errors import UserError
from dspark.wording import counted

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.distill.chat import ChatFormat, TrainingRow
    from dspark.distill.responses import ResponseSettings
    from dspark.distill.review import FileReview

data = typer.Typer(
    help="Look at prompt files before a run is spent on them.",
    epilog="Example: `dspark data check mine.jsonl --strict`",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(data, name="data")

Files = Annotated[
    list[Path], typer.Argument(help="JSONL files with `prompt`, `turns` or `messages`.")
]
Thinking = Annotated[str, typer.Option(help="The template's thinking switch: off, on or both.")]
Template = Annotated[
    str | None, typer.Option(help="Chat template: a file or a shipped name; else the target's.")
]
MaxLength = Annotated[
    int | None, typer.Option(help="Longest row in tokens; without it, that of `dspark distill`.")
]


@data.command(epilog="Example: `dspark data check mine.jsonl --against test.jsonl --strict`")
def check(
    files: Files,
    target: Target = "nano",
    thinking: Thinking = "off",
    template: Template = None,
    max_length: MaxLength = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Files measured on: no question may be in both.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 2 if any line or row is bad.")
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Count lines and rows by what is wrong with them; show shares and lengths."""
    from dspark.distill.review import SCHEMA_VERSION, review_files
    from dspark.runtime.loading import load_tokenizer

    tokenizer, _ = load_tokenizer(target)
    settings = _settings(thinking, template, max_length)
    _, reviews = review_files(files, tokenizer, settings, against or ())
    bad = sum(review.bad for review in reviews)
    if as_json:
        found = [review.to_dict() for review in reviews]
        print_json({"schema_version": SCHEMA_VERSION, "target": target, "bad": bad, "files": found})
    else:
        for review in reviews:
            typer.echo(review.summary())
    if strict and bad:
        raise UserError(f"{bad} bad lines and rows; --strict accepts none")
    if not any(review.prompts.rows for review in reviews):
        raise UserError(f"{', '.join(map(str, files))}: no usable prompt")


@data.command(epilog="Example: `dspark data inspect mine.jsonl --rows 5`")
def inspect(
    files: Files,
    target: Target = "nano",
    rows: Annotated[int, typer.Option(min=1, help="Rows of each file, spread evenly.")] = 3,
    thinking: Thinking = "off",
    template: Template = None,
    max_length: MaxLength = None,
    as_json: PrintJson = False,
) -> None:
    """Show rows as the target sees them, supervised text in colour (between ⟦ and ⟧ in a pipe)."""
    from rich.console import Console

    from dspark.distill.review import SCHEMA_VERSION, inspected, review_files, sample
    from dspark.runtime.loading import load_tokenizer

    tokenizer, _ = load_tokenizer(target)
    settings = _settings(thinking, template, max_length)
    formats, reviews = review_files(files, tokenizer, settings)
    if as_json:
        shown = [inspected(review, formats[0], rows) for review in reviews]
        print_json({"schema_version": SCHEMA_VERSION, "target": target, "files": shown})
    else:
        console = Console()
        for review in reviews:
            _heading(console, review)
            for row in sample(review, rows):
                _show(console, formats[0], row)
    if not any(review.answered or review.asked for review in reviews):
        raise UserError(f"{', '.join(map(str, files))}: no row to show")


def _settings(thinking: str, template: str | None, max_length: int | None) -> ResponseSettings:
    """What `dspark distill` would do with answers that are given."""
    from dspark.distill.responses import ResponseSettings
    from dspark.distill.settings import DataSettings

    defaults = DataSettings()
    return ResponseSettings(
        max_length=defaults.max_length if max_length is None else max_length,
        min_supervised=defaults.min_supervised,
        responses="given",
        thinking=thinking,
        template=template,
    )


def _heading(console: Console, review: FileReview) -> None:
    report = review.prompts.report
    lost = sum(len(places) for places in review.dropped.values())
    console.print(
        f"{review.file}: {counted(len(review.answered), 'row')} with answers, "
        f"{counted(len(review.asked), 'prompt')}, "
        f"{counted(len(report.skipped), 'line')} skipped, {counted(lost, 'row')} dropped",
        style="bold", highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


def _show(console: Console, chat: ChatFormat, row: TrainingRow) -> None:
    from dspark.distill.review import anchor_count

    about = counted(len(row.ids), "token")
    if row.supervised:
        share = 100 * row.supervised / len(row.ids)
        about += (
            f", {row.supervised} supervised ({share:.0f} %), {counted(anchor_count(row), 'anchor')}"
        )
    else:
        about += ", for the target to answer"
    console.print(
        f"\n{row.file}:{row.line}  {about}", highlight=False, markup=False, soft_wrap=True
    )
    if console.is_terminal:
        console.print(chat.describe_row(row), highlight=False, soft_wrap=True)
    else:
        console.print(chat.marked_row(row), highlight=False, markup=False, soft_wrap=True)
