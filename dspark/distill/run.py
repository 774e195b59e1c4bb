"""`dspark distill`: from a configuration to a drafter folder.

    target + prompts -> rows (answers.py) -> steps (trainer.py) -> evaluation (evaluate.py)
                                                               -> checkpoints (state.py)
    OUT/run.yaml  rows/  checkpoints/          while it runs
    OUT/config.json  model.safetensors  calibration.json             when it is done
        training.json  README.md

A second start in the same folder needs `resume`, and then the same settings; a run that was killed
at any moment continues to the same weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from dspark.assets import asset
from dspark.distill.answers import (
    RunRows,
    answer_prompts,
    choose_prompts,
    folder_digest,
    hold_out,
    response_settings,
)
from dspark.distill.card import Provenance, model_card
from dspark.distill.chat import ChatFormat
from dspark.distill.config import DistillConfig, load_config
from dspark.distill.evaluate import decode_held_out, decoding_prompts, disagreement
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.distill.fresh import new_drafter
from dspark.distill.loop import CHECKPOINTS, FREE_SECTIONS, Evaluate, train
from dspark.distill.processes import Processes
from dspark.distill.prompts import read_prompts
from dspark.distill.state import Progress, check_same_settings, explain_full_disk
from dspark.distill.trainer import Trainer
from dspark.draft.calibration import CALIBRATION_FILE, measured
from dspark.draft.checkpoint import CONFIG_FILE, WEIGHTS_FILE, save_drafter
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.files import atomic_write_text, json_text
from dspark.runtime.k3_target import LoadedTarget, load_target

if TYPE_CHECKING:
    from dspark.runtime.target import Target

RUN_FILE = "run.yaml"
SHIPPED_PROMPTS = "prompts/train.jsonl"


def run_distill(
    config: DistillConfig, resume: bool = False, console: Console | None = None
) -> Path:
    """Train a drafter; returns its folder.

    Raises UserError for wrong input, a folder that holds another run, a full disk or a training
    that turned non-finite; KeyboardInterrupt after saving a resumable state.
    """
    console = console or Console(stderr=True)
    processes = Processes.start(config.target.device)
    if not processes.is_main:
        console = Console(quiet=True)
    out = Path(config.out.dir)
    _check_folder(out, config, resume)
    dtype = getattr(torch, config.target.dtype)
    loaded = load_target(config.target.name, dtype=dtype, device=processes.device)
    target_digest = folder_digest(loaded.path)
    files = prompt_files(config)
    prompts = read_prompts(files, strict=config.data.strict)
    console.print(prompts.report.summary(), highlight=False, markup=False, soft_wrap=True)
    drafter = new_drafter(config, loaded.target, loaded.tokenizer).to(processes.device)
    processes.same_weights(drafter)
    if processes.is_main:  # everything the user wrote has been checked: from here on it is a run
        with explain_full_disk(out):
            atomic_write_text(out / RUN_FILE, config.to_yaml())
    answered = answer_prompts(
        out / "rows",
        loaded.target,
        loaded.tokenizer,
        choose_prompts(prompts.rows, config.data.max_prompts),
        response_settings(config.data, config.train.seed),
        target_digest=target_digest,
        processes=processes,
        console=console,
    )
    console.print(answered.summary(), highlight=False, markup=False, soft_wrap=True)
    rows = hold_out(answered, config.data.held_out, config.train.seed)

    trainer = Trainer(loaded.target, drafter, rows.training, config.train, processes)
    progress = train(
        trainer,
        config,
        rows_digest=rows.digest,
        evaluate=evaluation(config, loaded.target, drafter, rows, trainer),
        console=console,
    )
    if processes.is_main:
        provenance = _provenance(config, loaded, target_digest, files, rows, trainer, progress)
        write_drafter_folder(out, drafter, progress.history, provenance)
        console.print(f"drafter written to {out}", highlight=False, markup=False, soft_wrap=True)
    processes.wait()
    return out


def _provenance(
    config: DistillConfig,
    loaded: LoadedTarget,
    target_digest: str,
    files: Sequence[Path],
    rows: RunRows,
    trainer: Trainer,
    progress: Progress,
) -> Provenance:
    return Provenance(
        target=config.target.name,
        target_digest=target_digest,
        tokenizer_hash=tokenizer_fingerprint(loaded.tokenizer),
        template_hash=ChatFormat(loaded.tokenizer, thinking=config.data.thinking).fingerprint,
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
    )


def prompt_files(config: DistillConfig) -> list[Path]:
    """The prompt files of a configuration; none given means those that ship."""
    return [Path(name) for name in config.data.prompts] or [asset(SHIPPED_PROMPTS)]


def evaluation(
    config: DistillConfig,
    target: Target,
    drafter: DSparkDrafter,
    rows: RunRows,
    trainer: Trainer,
) -> Evaluate:
    """What every evaluation of the run does: teacher-forced numbers beside real rounds."""
    prompts = decoding_prompts(rows.held_out, config.eval.prompts)

    def evaluate() -> dict[str, Any]:
        if not rows.held_out:
            return {}
        held_out = trainer.measure(rows.held_out)
        decoded = decode_held_out(
            target,
            drafter,
            prompts,
            config.eval,
            seed=config.train.seed,
            processes=trainer.processes,
        )
        record: dict[str, Any] = {
            "held_out": held_out,
            "decoded": [result.record() for result in decoded],
        }
        warning = disagreement(decoded, held_out["accepted_length"])
        return record | ({"warning": warning} if warning else {})

    return evaluate


def write_drafter_folder(
    out: Path, drafter: DSparkDrafter, history: Sequence[dict[str, Any]], provenance: Provenance
) -> None:
    """Put the finished drafter into the run folder, `config.json` last: with it, all is there."""
    evaluated = [record["held_out"] for record in history if record.get("held_out")]
    drafter.calibration = measured(
        evaluated[-1] if evaluated else None, drafter.config, provenance.held_out_rows
    )
    with explain_full_disk(out):
        fresh = out / ".finished"
        texts = {
            "training.json": json_text(list(history)),
            "README.md": model_card(provenance, history),
        }
        save_drafter(fresh, drafter, texts=texts)
        for name in (*texts, CALIBRATION_FILE, WEIGHTS_FILE, CONFIG_FILE):
            os.replace(fresh / name, out / name)
        shutil.rmtree(fresh)


def _check_folder(out: Path, config: DistillConfig, resume: bool) -> None:
    """Refuse a folder that holds another run, or none to resume. Answers alone are no run."""
    path = out / RUN_FILE
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"{out}: {existing} is no folder that can be written; choose another --out")
    if resume:
        if not path.is_file():
            raise UserError(f"{path}: no run to resume here; start one without --resume")
        stored = load_config(path)
        check_same_settings(path, stored.to_dict(), config.to_dict(), FREE_SECTIONS)
    elif any((out / CHECKPOINTS).glob("step-*")) or (out / "config.json").exists():
        raise UserError(
            f"{out}: a run lives here; continue it with --resume, or choose another --out"
        )


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
