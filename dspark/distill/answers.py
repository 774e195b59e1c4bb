"""The rows of a run, answered once and kept in its folder.

    OUT/rows/part-000-of-005.jsonl

Prompts are cut into parts that depend on nothing but their number; a part is one atomic file with a
key that names everything it was made from. A run that is killed while the target answers loses one
part per process at most, and a resumed run reads the very rows it trained on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from dspark.distill.batches import derived_generator, derived_seed
from dspark.distill.chat import TrainingRow
from dspark.distill.processes import Processes
from dspark.distill.progress import Reporter
from dspark.distill.prompts import PromptRow
from dspark.distill.responses import Progress, ResponseSettings, build_rows, cache_key
from dspark.distill.rows import RowSet, rows_from_jsonl, rows_to_jsonl
from dspark.distill.settings import DataSettings
from dspark.distill.state import explain_full_disk
from dspark.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dspark.runtime.target import Target

PART = 256
"""Prompts answered between two files."""

_HASHED_WHOLE = 64 << 20


@dataclass(frozen=True)
class RunRows:
    """training and held_out rows, and a digest that changes if any of them does."""

    training: tuple[TrainingRow, ...]
    held_out: tuple[TrainingRow, ...]
    digest: str


def response_settings(data: DataSettings, seed: int) -> ResponseSettings:
    """The answering part of a configuration."""
    return ResponseSettings(
        temperature=data.temperature,
        top_p=data.top_p,
        top_k=data.top_k,
        max_new_tokens=data.max_new_tokens,
        max_length=data.max_length,
        min_supervised=data.min_supervised,
        seed=seed,
        batch_size=data.batch_size,
        responses=data.responses,
        thinking=data.thinking,
    )


def choose_prompts(rows: Sequence[PromptRow], count: int | None) -> list[PromptRow]:
    """`count` of the prompts, spread evenly over the files."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def answer_prompts(
    folder: Path,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    settings: ResponseSettings,
    *,
    target_digest: str,
    processes: Processes,
    console: Console,
) -> RowSet:
    """Every process answers its share of the missing parts; all read all parts."""
    parts = math.ceil(len(prompts) / PART)
    jobs = []
    for index in range(parts):
        share = prompts[index::parts]
        own = replace(settings, seed=derived_seed(settings.seed, "answers", index))
        path = folder / f"part-{index:03d}-of-{parts:03d}.jsonl"
        jobs.append((path, share, own, cache_key(target_digest, tokenizer, share, own)))
    mine = jobs[processes.rank :: processes.world]
    total = sum(len(share) for _, share, _, _ in mine)
    with Reporter("answering", total, enabled=processes.is_main, console=console) as reporter:
        for path, share, own, key in mine:
            if path.exists():
                reporter.advance(by=len(share))
                continue
            rows = build_rows(target, tokenizer, share, own, _advance(reporter))
            with explain_full_disk(path):
                rows_to_jsonl(path, rows, key)
    processes.wait()
    return _merge([rows_from_jsonl(path, key) for path, _, _, key in jobs])


def hold_out(rows: RowSet, count: int, seed: int) -> RunRows:
    """Set `count` rows aside, chosen by the seed. Raises UserError if none would be left."""
    total = len(rows.rows)
    if count >= total:
        raise UserError(
            f"data.held_out is {count}, but only {total} rows are left; give more prompts or hold "
            "out fewer"
        )
    order = torch.randperm(total, generator=derived_generator(seed, "held out")).tolist()
    aside = set(order[:count])
    digest = hashlib.sha256()
    for row in rows.rows:
        digest.update(repr((row.ids, row.loss_mask)).encode())
    return RunRows(
        tuple(row for i, row in enumerate(rows.rows) if i not in aside),
        tuple(rows.rows[i] for i in sorted(aside)),
        digest.hexdigest(),
    )


def folder_digest(folder: Path) -> str:
    """SHA-256 that names a checkpoint's weights.

    Small checkpoints are hashed whole. Of larger files only the first 64 MiB are read, which holds
    the safetensors header and the first tensors: enough to tell two models apart.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_HASHED_WHOLE))
    return digest.hexdigest()


def _advance(reporter: Reporter) -> Progress:
    """Turn running totals into steps of the bar."""
    seen = 0

    def on_progress(answered: int, _asked: int, emitted: int) -> None:
        nonlocal seen
        reporter.advance(f"{emitted} tokens", by=answered - seen)
        seen = answered

    return on_progress


def _merge(parts: Sequence[RowSet]) -> RowSet:
    dropped: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for reason, places in part.dropped.items():
            dropped[reason] = (*dropped.get(reason, ()), *places)
    rows = tuple(row for part in parts for row in part.rows)
    return RowSet(rows, dropped, sum(part.ended for part in parts))
