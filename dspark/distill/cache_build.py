"""Make a cache of target states complete: check what is there, write what is not.

Size and free disk are known before the first byte is written. Shards are shared out among the
processes; each is written in one step, its receipt after it, so a kill costs one shard a process.
A shard that is missing, torn or edited is made again, and no other.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from dspark.distill.batches import make_batch
from dspark.distill.cache import (
    MANIFEST,
    CachedFeatures,
    CachePlan,
    Shard,
    plan_cache,
    shard_digest,
)
from dspark.distill.cache_codec import Codec
from dspark.distill.chat import TrainingRow
from dspark.distill.disk import clear_leftovers, writing
from dspark.distill.lock import locked
from dspark.distill.processes import Processes
from dspark.distill.progress import Reporter
from dspark.distill.settings import CacheSettings
from dspark.distill.state import sha256
from dspark.distill.taps import Features, target_features
from dspark.errors import UserError
from dspark.files import atomic_file, atomic_write_json
from dspark.runtime.target import Target
from dspark.taps import TapSet
from dspark.wording import counted

HEADROOM = 2 << 30
"""Bytes of the disk that a cache leaves free, besides a twentieth of its own size."""

PATIENCE = 3600.0
"""Seconds to wait for another run that is writing, or checking, the same states."""


def cached_features(
    root: Path,
    target: Target,
    taps: TapSet,
    rows: Sequence[TrainingRow],
    settings: CacheSettings,
    origin: Mapping[str, Any],
    processes: Processes,
    console: Console,
    keep: int = 0,
) -> CachedFeatures:
    """A source for these rows whose states lie under `root`, made now where they do not yet.

    `origin` names the target, template and length that the rows and weights come from; states that
    were read stay in memory while they fit into `keep` bytes. Raises
    UserError, on all processes: the cache would be larger than `settings.max_gib` or than the
    disk, another run writes it, or a state is not finite (BadFeatures).
    """
    codec = Codec(len(taps.layer_ids), target.hidden_size, settings.dtype, target.dtype)
    everything = {
        **origin,
        "tap_ids": list(taps.layer_ids),
        "tap_kind": taps.kind,
        "device": target.device.type,
        "rows_of_a_pass": settings.rows,
    }
    plan = plan_cache(root, [row.ids for row in rows], codec, everything)
    _check_size(plan, settings.max_gib, console)
    with _held(plan, processes, console):
        mine = plan.shards[processes.rank :: processes.world]
        missing = [shard for shard in mine if not _is_good(plan.folder, shard)]
        _check_disk(plan, missing, processes, console)
        with processes.together():
            if processes.is_main:
                _write_manifest(plan)
            _write_missing(plan, missing, target, taps, processes, console)
    return CachedFeatures(plan, target.device, keep)


@contextmanager
def _held(plan: CachePlan, processes: Processes, console: Console) -> Iterator[None]:
    """Hold the folder and tidy it; says whom it waits for."""
    with ExitStack() as stack:
        with processes.together():
            if processes.is_main:
                stack.enter_context(
                    locked(
                        plan.folder,
                        "wait until its states are written, or set cache.dir",
                        patience=PATIENCE,
                        waiting=lambda text: _say(console, text),
                    )
                )
                clear_leftovers(plan.folder)
        yield


def _check_size(plan: CachePlan, max_gib: float, console: Console) -> None:
    size = plan.bytes(plan.shards)
    _say(
        console,
        f"target states: {counted(len(plan.rows), 'row')}, {counted(plan.tokens, 'token')}, "
        f"{_gb(size)} as "
        f"{plan.codec.stored} in {plan.folder}",
    )
    others = sum(path.parent != plan.folder for path in plan.folder.parent.glob(f"*/{MANIFEST}"))
    if others:
        _say(console, f"  {others} more cache(s) of other states in {plan.folder.parent}")
    if size > max_gib * 2**30:
        raise UserError(
            f"{plan.folder}: the target states of {counted(plan.tokens, 'token')} take "
            f"{size / 2**30:.3g} GiB "
            f"as {plan.codec.stored}, more than cache.max_gib, {max_gib:g}; raise it, use a "
            "smaller cache.dtype or fewer rows, or cache.mode online"
        )


def _check_disk(
    plan: CachePlan, missing: Sequence[Shard], processes: Processes, console: Console
) -> None:
    """Refuse, on all processes, what the disk cannot take; what is there already needs no room."""
    counts = torch.tensor([len(missing), plan.bytes(missing)], dtype=torch.float64)
    shards, size = (int(v) for v in processes.sum(counts.to(processes.device)).tolist())
    free = shutil.disk_usage(plan.folder).free
    if not shards:
        _say(console, f"  complete and checked: {counted(len(plan.shards), 'shard')}")
        return
    _say(
        console,
        f"  {shards} of {counted(len(plan.shards), 'shard')} to write, {_gb(size)}; {_gb(free)} of "
        "disk free",
    )
    needed = math.ceil(size * 1.05) + HEADROOM
    with processes.together():
        if processes.is_main and needed > free:
            raise UserError(
                f"{plan.folder}: {_gb(size)} of target states and {_gb(needed - size)} to spare do "
                f"not fit into {_gb(free)} of free disk; free some, set cache.dir to a larger "
                "disk, use a smaller cache.dtype or fewer rows, or cache.mode online"
            )


def _is_good(folder: Path, shard: Shard) -> bool:
    promised = shard_digest(folder, shard)
    try:
        return promised is not None and sha256(folder / shard.file) == promised
    except OSError:
        return False


def _write_missing(
    plan: CachePlan,
    missing: Sequence[Shard],
    target: Target,
    taps: TapSet,
    processes: Processes,
    console: Console,
) -> None:
    total = sum(shard.tokens for shard in missing)
    with Reporter("target states", total, enabled=processes.is_main, console=console) as reporter:
        for shard in missing:
            tensors = _states(plan, shard, target, taps, reporter)
            with writing(plan.folder / shard.file):
                _write_shard(plan.folder, shard, tensors)


def _write_shard(folder: Path, shard: Shard, tensors: dict[str, Tensor]) -> None:
    """The shard, then its receipt: a receipt never speaks of a shard that is not there."""
    (folder / shard.receipt).unlink(missing_ok=True)
    with atomic_file(folder / shard.file) as fresh:
        save_file(tensors, fresh)
        receipt = {"bytes": fresh.stat().st_size, "sha256": sha256(fresh)}
    atomic_write_json(folder / shard.receipt, receipt)


def _states(
    plan: CachePlan, shard: Shard, target: Target, taps: TapSet, reporter: Reporter
) -> dict[str, Tensor]:
    """The tensors of a shard: its rows one after another.

    As many as the plan says go through the target together, rows of like length. Who goes with
    whom depends on the shard alone, so a shard that is made again has the same states.
    """
    made: dict[int, dict[str, Tensor]] = {}
    by_length = sorted(range(shard.first, shard.last), key=lambda at: (len(plan.rows[at]), at))
    for first in range(0, len(by_length), plan.key["rows_of_a_pass"]):
        group = by_length[first : first + plan.key["rows_of_a_pass"]]
        rows = [TrainingRow(plan.rows[at], (False,) * len(plan.rows[at])) for at in group]
        batch = make_batch(rows, range(len(rows)), anchors=1, seed=0, epoch=0).to(target.device)
        found = target_features(target, replace(batch, row_ids=tuple(group)), taps)
        for at, row, taken, hidden in zip(group, rows, found.taps, found.hidden, strict=True):
            size = len(row.ids)
            made[at] = plan.codec.encode(Features(taken[None, :size], hidden[None, :size]))
            reporter.advance(by=size)
    return {
        name: torch.cat([made[at][name] for at in range(shard.first, shard.last)])
        for name in plan.codec.names
    }


def _write_manifest(plan: CachePlan) -> None:
    manifest = {
        "key": dict(plan.key),
        "tokens": plan.tokens,
        "shards": {
            shard.file: {"rows": [shard.first, shard.last], "tokens": shard.tokens}
            for shard in plan.shards
        },
    }
    with writing(plan.folder):
        atomic_write_json(plan.folder / MANIFEST, manifest)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
