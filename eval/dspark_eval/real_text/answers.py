"""The target's own answers to the training prompts, drawn once for all drafters.

OUT/written.jsonl     prompts by the target itself (`writing.py`)
OUT/rows.PART.jsonl   answers of every PARTS-th prompt, ids and loss mask as everywhere
OUT/rows.PART.json    how many, how long it took, what was left out
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from dspark.distill.chat import ChatFormat, TrainingRow
from dspark.distill.prompts import PromptRow
from dspark.distill.responses import ResponseSettings, build_rows
from dspark.distill.rows import RowSet, prompts_digest, rows_from_jsonl, rows_to_jsonl
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.runtime.loading import LoadedTarget
from dspark.wording import counted
from dspark_eval.environment import describe_environment
from dspark_eval.real_text.prompts import (
    TrainingPrompts,
    Unseen,
    refuse_seen,
    test_files,
    training_prompts,
)
from dspark_eval.real_text.wide import generate_wide
from dspark_eval.real_text.writing import WRITTEN, read_written, write_prompts

MAX_LENGTH = 384
"""Tokens of a training row at most, as in the recipe that is compared with."""
MIN_SUPERVISED = 14
HELD_OUT_SAMPLES = 4
"""Answers to each prompt that is kept aside."""
HELD_OUT = "held_out.jsonl"


@dataclass(frozen=True)
class Asked:
    """What decides the rows of a study.

    samples answers to each public prompt; `generated` problems; `written` prompts by the target;
    answers of at most `max_new_tokens`; in so many `parts`, each a file.
    """

    max_new_tokens: int
    samples: int
    generated: int
    written: int
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise UserError(f"--parts {self.parts}: expected 1 or more")
        counts = (self.samples, self.generated, self.written)
        if min(counts) < 0 or not sum(counts):
            raise UserError("--samples, --generated, --written: expected 0 or more, and not 0 all")

    def training(self, out: Path, prompts: Path) -> TrainingPrompts:
        """All prompts, those written included, which must be there by now."""
        written = read_written(out, self.written) if self.written else ()
        return training_prompts(prompts, self.samples, self.generated, written)


def rows_path(out: Path, part: int) -> Path:
    """The file of a part's rows."""
    return out / f"rows.{part}.jsonl"


def answer(loaded: LoadedTarget, prompts: Path, out: Path, asked: Asked, batch: int) -> None:
    """Have prompts written, and all answered at temperature 1, part by part, where they are not.

    Raises UserError for a folder whose rows were asked for otherwise.
    """
    check_asked(out, asked)
    if asked.written and not (out / WRITTEN).is_file():
        started = time.perf_counter()
        kept = write_prompts(loaded, prompts, out, asked.written)
        print(f"{kept} prompts written in {time.perf_counter() - started:.1f} s", flush=True)
    chosen = asked.training(out, prompts)
    for part in range(asked.parts):
        if not report_path(out, part).is_file():  # a part that was lost is all that is repeated
            _answer_part(loaded, chosen, out, asked, part, batch)


def report_path(out: Path, part: int) -> Path:
    """The record of a part, which is written last: a part without one is not done."""
    return out / f"rows.{part}.json"


def is_answered(out: Path, asked: Asked) -> bool:
    """Whether every part is done."""
    return all(report_path(out, part).is_file() for part in range(asked.parts))


def check_asked(out: Path, asked: Asked) -> None:
    """Raise UserError if a part was answered with other settings."""
    for path in sorted(out.glob("rows.*.json")):
        if (known := read_json(path)["settings"]) != asdict(asked):
            raise UserError(
                f"{path}: answered with {known}, not {asdict(asked)}; choose another folder"
            )


def _answer_part(
    loaded: LoadedTarget, chosen: TrainingPrompts, out: Path, asked: Asked, part: int, batch: int
) -> None:
    own = chosen.training[part :: asked.parts]
    settings = ResponseSettings(
        temperature=1.0,
        max_new_tokens=asked.max_new_tokens,
        max_length=MAX_LENGTH,
        min_supervised=MIN_SUPERVISED,
        seed=part,
        batch_size=batch,
    )
    started = time.perf_counter()
    kept = _held_out(chosen) if part == 0 else ()
    found = build_rows(
        loaded.target, loaded.tokenizer, [*kept, *own], settings, _progress, generate_wide
    )
    seconds = time.perf_counter() - started
    places = {(row.file, row.line) for row in kept}
    aside = RowSet(tuple(r for r in found.rows if (r.file, r.line) in places), {})
    rows = RowSet(tuple(r for r in found.rows if (r.file, r.line) not in places), found.dropped)
    if part == 0:
        rows_to_jsonl(out / HELD_OUT, aside, {"prompts": prompts_digest(kept)})
    rows_to_jsonl(rows_path(out, part), rows, {"prompts": prompts_digest(own)})
    report = {
        "prompts": len(own),
        "different_prompts": len({row.messages[0]["content"] for row in own}),
        "rows": len(rows.rows),
        "tokens": sum(len(row.ids) for row in rows.rows),
        "answer_tokens": sum(row.supervised for row in rows.rows),
        "ended": found.ended,
        "seconds": seconds,
        "near_copies_left_out": chosen.dropped,
        "held_out_prompts": len(chosen.held_out),
        "settings": asdict(asked),
        "environment": describe_environment(loaded.target.device, loaded.target.dtype),
    }
    atomic_write_json(report_path(out, part), report)
    print(f"part {part}: {report['rows']} rows in {seconds:.1f} s", flush=True)


def _progress(done: int, asked: int, tokens: int) -> None:
    print(f"answered {done} of {counted(asked, 'prompt')}, {tokens} tokens", flush=True)


def read_rows(out: Path, prompts: Path) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """The rows of all parts, and those held out.

    Raises UserError for a prompt that is a test prompt after all, and where some are not answered.
    """
    first = report_path(out, 0)
    asked = Asked(**read_json(first)["settings"]) if first.is_file() else None
    if asked is None or not is_answered(out, asked):
        raise UserError(f"{out}: the prompts were not answered yet; run the step answer")
    chosen = asked.training(out, prompts)
    different = {row.messages[0]["content"]: row for row in chosen.training}
    refuse_seen(different.values(), Unseen(test_files(prompts)))
    rows: list[TrainingRow] = []
    for part in range(asked.parts):
        own = chosen.training[part :: asked.parts]
        rows += rows_from_jsonl(rows_path(out, part), {"prompts": prompts_digest(own)}).rows
    key = {"prompts": prompts_digest(_held_out(chosen))}
    return rows, list(rows_from_jsonl(out / HELD_OUT, key).rows)


def _held_out(chosen: TrainingPrompts) -> tuple[PromptRow, ...]:
    return chosen.held_out * HELD_OUT_SAMPLES


def prompt_ids(rows: tuple[PromptRow, ...], chat: ChatFormat) -> list[list[int]]:
    """What the target is shown for each prompt."""
    return [chat.prompt_ids(row.prompt) for row in rows]
