"""The target's own answers to the training prompts, drawn once for all drafters.

OUT/rows.SHARD.jsonl     answers of every SHARDS-th prompt, ids and loss mask as everywhere
OUT/rows.SHARD.json      how many, how long it took, what was left out
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dspark.distill.chat import ChatFormat, TrainingRow
from dspark.distill.prompts import PromptRow
from dspark.distill.responses import ResponseSettings, build_rows
from dspark.distill.rows import RowSet, prompts_digest, rows_from_jsonl, rows_to_jsonl
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.runtime.loading import LoadedTarget
from dspark.wording import counted
from dspark_eval.real_text.prompts import Unseen, refuse_seen, test_files, training_prompts

MAX_LENGTH = 384
"""Tokens of a training row at most, as in the recipe that is compared with."""
MIN_SUPERVISED = 14
HELD_OUT = "held_out.jsonl"


def rows_path(out: Path, shard: int) -> Path:
    """The file of a shard's rows."""
    return out / f"rows.{shard}.jsonl"


def answer(
    loaded: LoadedTarget,
    prompts: Path,
    out: Path,
    *,
    samples: int,
    generated: int,
    max_new_tokens: int,
    batch: int,
    shard: int,
    shards: int,
) -> dict[str, Any]:
    """Answer one shard of the training prompts at temperature 1 and write its rows."""
    chosen = training_prompts(prompts, samples, generated)
    asked = chosen.training[shard::shards]
    settings = ResponseSettings(
        temperature=1.0,
        max_new_tokens=max_new_tokens,
        max_length=MAX_LENGTH,
        min_supervised=MIN_SUPERVISED,
        seed=shard,
        batch_size=batch,
    )
    started = time.perf_counter()
    kept = chosen.held_out if shard == 0 else ()
    found = build_rows(loaded.target, loaded.tokenizer, [*kept, *asked], settings, _progress)
    seconds = time.perf_counter() - started
    places = {(row.file, row.line) for row in kept}
    aside = RowSet(tuple(r for r in found.rows if (r.file, r.line) in places), {})
    rows = RowSet(tuple(r for r in found.rows if (r.file, r.line) not in places), found.dropped)
    if shard == 0:
        rows_to_jsonl(out / HELD_OUT, aside, {"prompts": prompts_digest(kept)})
    rows_to_jsonl(rows_path(out, shard), rows, {"prompts": prompts_digest(asked)})
    report = {
        "prompts": len(asked),
        "rows": len(rows.rows),
        "answer_tokens": sum(row.supervised for row in rows.rows),
        "ended": found.ended,
        "seconds": seconds,
        "near_copies_left_out": chosen.dropped,
        "held_out_prompts": len(chosen.held_out),
        "settings": {"max_new_tokens": max_new_tokens, "samples": samples, "generated": generated},
    }
    atomic_write_json(out / f"rows.{shard}.json", report)
    return report


def _progress(done: int, asked: int, tokens: int) -> None:
    print(f"answered {done} of {counted(asked, 'prompt')}, {tokens} tokens", flush=True)


def read_rows(out: Path, prompts: Path) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """The rows of all shards, and those held out.

    Raises UserError for a prompt that is a test prompt after all, and where nothing was answered.
    """
    reports = sorted(out.glob("rows.*.json"))
    if not reports:
        raise UserError(f"{out}: the prompts were not answered yet; run the step answer")
    settings = read_json(reports[0])["settings"]
    chosen = training_prompts(prompts, settings["samples"], settings["generated"])
    refuse_seen(chosen.training, Unseen(test_files(prompts)))
    rows: list[TrainingRow] = []
    for shard in range(len(reports)):
        asked = chosen.training[shard :: len(reports)]
        found = rows_from_jsonl(rows_path(out, shard), {"prompts": prompts_digest(asked)})
        rows += found.rows
    key = {"prompts": prompts_digest(chosen.held_out)}
    return rows, list(rows_from_jsonl(out / HELD_OUT, key).rows)


def prompt_ids(rows: tuple[PromptRow, ...], chat: ChatFormat) -> list[list[int]]:
    """What the target is shown for each prompt."""
    return [chat.prompt_ids(row.prompt) for row in rows]
