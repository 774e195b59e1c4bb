"""Resumable state of a run: complete or absent, and only tensors and JSON.

    OUT/checkpoints/step-000200/
        model/                  the drafter (config.json, model.safetensors)
        optimizer.safetensors   AdamW moments, float32
        trainer.json            step, settings, digest of the rows, world size, history
        manifest.json           size and SHA-256 of every file above

The folder appears under its name in one rename, after everything in it was flushed. The manifest
finds what a rename cannot prevent: a disk that loses or cuts a file later. A resume takes the
newest folder that checks out and names those it passed over. There is no random state to save: row
order and anchors are pure functions of the seed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.distill.disk import writing
from dspark.distill.optim import Optimiser
from dspark.distill.sharding import ShardedOptimiser
from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.files import atomic_folder, atomic_write_json, read_json

MODEL, OPTIMISER, TRAINER, MANIFEST = (
    "model", "optimizer.safetensors", "trainer.json", "manifest.json",
)  # fmt: skip


@dataclass
class Progress:
    """How far a run is. `step` optimiser steps are done; `history` holds what was recorded."""

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder and its parsed `trainer.json`."""

    folder: Path
    trainer: dict[str, Any]

    @property
    def progress(self) -> Progress:
        """Step and history as of this checkpoint."""
        return Progress(self.trainer["step"], list(self.trainer["history"]))


def save_checkpoint(
    root: Path,
    drafter: DSparkDrafter,
    moments: Mapping[str, Tensor],
    progress: Progress,
    *,
    settings: dict[str, Any],
    rows_digest: str,
    world_size: int,
    keep: int,
) -> Path:
    """Write `step-NNNNNN` under `root`, then drop all but the newest `keep`.

    `moments` are the optimiser's `state_tensors()`: whole, however many processes share them.
    Raises UserError when the disk is full; earlier checkpoints are untouched then.
    """
    final = root / f"step-{progress.step:06d}"
    with writing(final), atomic_folder(final) as folder:
        save_drafter(folder / MODEL, drafter, golden=False)
        save_file(dict(moments), folder / OPTIMISER)
        trainer = {
            "step": progress.step,
            "settings": settings,
            "rows_digest": rows_digest,
            "world_size": world_size,
            "history": progress.history,
        }
        atomic_write_json(folder / TRAINER, trainer)
        write_manifest(folder)
    _prune(root, final, keep)
    return final


def restore_checkpoint(
    checkpoint: Checkpoint, drafter: DSparkDrafter, optimiser: Optimiser | ShardedOptimiser
) -> Progress:
    """Load weights and moments of `checkpoint` into a freshly built drafter and optimiser."""
    saved = load_drafter(checkpoint.folder / MODEL)
    if saved.config != drafter.config:
        raise UserError(f"{checkpoint.folder}: holds a drafter of another shape than this run's")
    drafter.load_state_dict(saved.state_dict())
    optimiser.load_state_tensors(load_file(checkpoint.folder / OPTIMISER))
    return checkpoint.progress


def newest_checkpoint(root: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that matches its manifest; broken ones are named to `warn`."""
    for folder in _newest_first(root):
        fault = manifest_fault(folder)
        if fault is None:
            return Checkpoint(folder, read_json(folder / TRAINER))
        warn(f"{folder}: incomplete checkpoint skipped ({fault})")
    return None


def check_same_settings(
    where: Path, stored: dict[str, Any], settings: dict[str, Any], free: tuple[str, ...]
) -> None:
    """Refuse to continue the run at `where` under other settings than `stored`.

    Both are nested as `DistillConfig.to_dict` gives them; sections and
    `section.key`s named in `free` may differ.
    """
    changed = [
        f"{section}.{key} was {before!r}, now {now!r}"
        for section in settings.keys() | stored.keys()
        if section not in free
        for key, before, now in _differences(stored.get(section, {}), settings.get(section, {}))
        if f"{section}.{key}" not in free
    ]
    if changed:
        raise UserError(
            f"{where}: made with other settings: {'; '.join(sorted(changed))}. "
            "Resume with the same ones, or start a new run in another --out"
        )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    keys = before.keys() | now.keys()
    return [(k, before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)]


def write_manifest(folder: Path) -> None:
    """Record size and SHA-256 of every file in `folder`, recursively."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    atomic_write_json(folder / MANIFEST, {"files": files})


def manifest_fault(folder: Path) -> str | None:
    """What is wrong with a folder that `write_manifest` described; None if nothing is."""
    try:
        files = read_json(folder / MANIFEST)["files"]
    except (UserError, KeyError, TypeError):
        return f"no readable {MANIFEST}"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
        try:
            if sha256(path) != expected["sha256"]:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _prune(root: Path, current: Path, keep: int) -> None:
    """Remove checkpoints older than `current`, except the newest `keep - 1` of them.

    Only called once `current` is in place. Newer folders are left alone: a run that resumed behind
    a broken checkpoint has not reached that step again yet.
    """
    older = [folder for folder in _newest_first(root) if _step(folder) < _step(current)]
    for folder in older[keep - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


def _newest_first(root: Path) -> list[Path]:
    """Checkpoint folders by step: as text, step-1000000 would come before step-999999."""
    return sorted((f for f in root.glob("step-*") if _step(f) >= 0), key=_step, reverse=True)


def _step(folder: Path) -> int:
    """The step in a checkpoint's name; -1 for a folder of another name."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
