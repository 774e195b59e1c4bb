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
from dspark.distill.chat import ChatFormat, TrainingRow, chat_formats
from dspark.distill.disk import writing
from dspark.distill.processes import Processes
from dspark.distill.progress import Reporter
from dspark.distill.prompts import PromptRow
from dspark.distill.responses import Progress, ResponseSettings, build_rows, cache_key
from dspark.distill.rows import RowSet, rows_from_jsonl, rows_to_jsonl
from dspark.distill.settings import DataSettings
from dspark.errors import UserError
from dspark.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dspark.runtime.target import Target

PART = 256
"""Prompts answered between two files, or as many as are answered at once if those are more."""


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
        template=data.template,
        strict=data.strict,
    )


def first_format(data: DataSettings, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """How prompts are asked; without thinking, if they are asked both ways."""
    return chat_formats(tokenizer, data.thinking, data.template)[0]


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
    greedy: float,
    target_digest: str,
    processes: Processes,
    console: Console,
) -> RowSet:
    """Every process answers its share of the missing parts; all read all parts.

    The share `greedy` of the parts is answered at temperature 0.
    """
    parts = math.ceil(len(prompts) / max(PART, settings.batch_size))
    jobs = []
    for index in range(parts):
        share = prompts[index::parts]
        own = replace(settings, seed=derived_seed(settings.seed, "answers", index))
        if int((index + 1) * greedy) > int(index * greedy):
            own = replace(own, temperature=0.0)
        path = folder / f"part-{index:03d}-of-{parts:03d}.jsonl"
        jobs.append((path, share, own, cache_key(target_digest, tokenizer, share, own)))
    mine = jobs[processes.rank :: processes.world]
    total = sum(len(share) for _, share, _, _ in mine)
    bar = Reporter("answering", total, enabled=processes.is_main, console=console)
    with processes.together(), bar as reporter:
        for path, share, own, key in mine:
            if path.exists():
                reporter.advance(by=len(share))
                continue
            rows = build_rows(target, tokenizer, share, own, _advance(reporter))
            with writing(path):
                rows_to_jsonl(path, rows, key)
    if greedy and processes.is_main:
        shares = [(share, own) for _, share, own, _ in jobs]
        console.print(_greedy_share(greedy, shares), highlight=False, markup=False, soft_wrap=True)
    return _merge([rows_from_jsonl(path, key) for path, _, _, key in jobs])


def _greedy_share(
    asked: float, parts: Sequence[tuple[Sequence[PromptRow], ResponseSettings]]
) -> str:
    """What became of the share: it goes by whole parts, so that few prompts may have none."""
    count = sum(len(share) for share, own in parts if own.temperature == 0)
    total = sum(len(share) for share, _ in parts)
    return f"answered at temperature 0: {count} of {total} prompts (data.greedy {asked:g})"


def hold_out(rows: RowSet, count: int, seed: int) -> RunRows:
    """Set `count` rows aside, chosen by the seed; a prompt's rows stay together.

    Rows are the same prompt's if they come from one line (both ways of thinking, several turns) or
    if the target was shown the same ids: what is held out has never been trained on, even if a
    question stands in the files twice. Where prompts have several rows, `count` is an upper bound.

    Raises UserError if no row would be left to train on.
    """
    total = len(rows.rows)
    if count >= total:
        raise UserError(
            f"data.held_out is {count}, but only {total} rows are left; give more prompts or hold "
            "out fewer"
        )
    groups = _groups(rows.rows)
    order = torch.randperm(total, generator=derived_generator(seed, "held out")).tolist()
    aside: set[int] = set()
    for place in order:
        group = groups[place]
        if place not in aside and len(aside) + len(group) <= count:
            aside.update(group)
    if count and not aside:
        raise UserError(
            f"data.held_out is {count}, but every prompt has more rows than that; hold out more, "
            "or give prompts that differ"
        )
    digest = hashlib.sha256()
    for row in rows.rows:
        digest.update(repr((row.ids, row.loss_mask)).encode())
    return RunRows(
        tuple(row for i, row in enumerate(rows.rows) if i not in aside),
        tuple(rows.rows[i] for i in sorted(aside)),
        digest.hexdigest(),
    )


def _groups(rows: Sequence[TrainingRow]) -> list[list[int]]:
    """For every row, the places of all rows that belong to its prompt, itself included."""
    parent = list(range(len(rows)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    first: dict[object, int] = {}
    for place, row in enumerate(rows):
        shown = row.ids[: row.loss_mask.index(True)] if any(row.loss_mask) else row.ids
        keys: list[object] = [shown, *([(row.file, row.line)] if row.file else [])]
        for key in keys:
            parent[root(place)] = root(first.setdefault(key, place))
    members: dict[int, list[int]] = {}
    for place in range(len(rows)):
        members.setdefault(root(place), []).append(place)
    return [members[root(place)] for place in range(len(rows))]


def folder_digest(folder: Path) -> str:
    """SHA-256 that names a checkpoint's weights, read to the last byte.

    A fine-tuned copy may differ in its last layers only, and answers and states of the one would be
    wrong for the other. It takes as long as loading the checkpoint does.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _advance(reporter: Reporter) -> Progress:
    """Turn running totals into steps of the bar."""
    seen = 0

    def on_progress(answered: int, _asked: int, emitted: int) -> None:
        nonlocal seen
        reporter.advance(counted(emitted, "token"), by=answered - seen)
        seen = answered

    return on_progress


def _merge(parts: Sequence[RowSet]) -> RowSet:
    dropped: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for reason, places in part.dropped.items():
            dropped[reason] = (*dropped.get(reason, ()), *places)
    rows = tuple(row for part in parts for row in part.rows)
    return RowSet(rows, dropped, sum(part.ended for part in parts), sum(part.cut for part in parts))
