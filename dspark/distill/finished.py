"""The end of a run: what decided its weights, and the drafter's folder, complete or absent."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.distill.answers import RunRows, first_format
from dspark.distill.card import Provenance, model_card
from dspark.distill.config import DistillConfig
from dspark.distill.disk import writing
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.distill.settings import DrafterSettings
from dspark.distill.state import Progress
from dspark.distill.trainer import Trainer
from dspark.draft.calibration import CALIBRATION_FILE, Fitted, measured
from dspark.draft.checkpoint import save_drafter
from dspark.draft.folder import CONFIG_FILE, WEIGHTS_FILE
from dspark.draft.golden_file import GOLDEN_FILE
from dspark.draft.model import DSparkDrafter
from dspark.files import json_text
from dspark.machine import describe_environment

if TYPE_CHECKING:
    from dspark.runtime.loading import LoadedTarget
    from dspark.runtime.target import Target


def provenance(
    config: DistillConfig,
    loaded: LoadedTarget,
    target_digest: str,
    files: Sequence[Path],
    rows: RunRows,
    trainer: Trainer,
    progress: Progress,
) -> Provenance:
    """What decided the weights of the run in `config`, once its steps are done."""
    return Provenance(
        target=config.target.name,
        target_digest=target_digest,
        tokenizer_hash=tokenizer_fingerprint(loaded.tokenizer),
        template_hash=first_format(config.data, loaded.tokenizer).fingerprint,
        prompt_files=[(path.name, _file_digest(path)) for path in files],
        rows_digest=rows.digest,
        training_rows=len(rows.training),
        supervised_tokens=sum(row.supervised for row in rows.training),
        held_out_rows=len(rows.held_out),
        parameters=sum(p.numel() for p in trainer.drafter.parameters()),
        steps=progress.step,
        epochs=config.train.epochs,
        seed=config.train.seed,
        processes=trainer.processes.world,
        started_with=_started_with(config.drafter),
    )


def _started_with(settings: DrafterSettings) -> str:
    if settings.init_from:
        return f"the weights of `{settings.init_from}`"
    return "layers of the target" if settings.init == "target" else "fresh weights"


def write_drafter_folder(
    out: Path,
    drafter: DSparkDrafter,
    history: Sequence[dict[str, Any]],
    provenance: Provenance,
    tokenizer: Mapping[str, str],
    fitted: Sequence[Fitted] = (),
    target: Target | None = None,
) -> None:
    """Put the finished drafter into the run folder, `config.json` last: with it, all is there."""
    evaluated = [record["held_out"] for record in history if record.get("held_out")]
    drafter.calibration = measured(
        evaluated[-1] if evaluated else None, drafter.config, provenance.held_out_rows
    ).with_fitted(*fitted)
    with writing(out):
        fresh = out / ".finished"
        texts = {
            "training.json": json_text(_with_origin(history, target)),
            "README.md": model_card(provenance, history),
            **tokenizer,
        }
        save_drafter(fresh, drafter, texts=texts, target=target)
        for name in (*texts, CALIBRATION_FILE, GOLDEN_FILE, WEIGHTS_FILE, CONFIG_FILE):
            os.replace(fresh / name, out / name)
        shutil.rmtree(fresh)


def _with_origin(history: Sequence[dict[str, Any]], target: Target | None) -> list[dict[str, Any]]:
    """The records, the last one with the machine, versions and revision that finished the run."""
    if not history or target is None:
        return list(history)
    origin = describe_environment(target.device, target.dtype)
    return [*history[:-1], {**history[-1], "environment": origin}]


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
