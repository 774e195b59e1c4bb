"""`dspark distill`: from a configuration to a drafter folder.

    target + prompts -> rows (answers.py) -> steps (trainer.py) -> evaluation (evaluate.py)
                        states (cache.py)                       -> checkpoints (state.py)
    OUT/run.yaml  rows/  states/  checkpoints/   while it runs
    OUT/config.json  model.safetensors  calibration.json  golden.json   when it is done
        training.json  README.md (finished.py)

A second start in the same folder needs `resume`, and then the same settings; a run that was killed
at any moment continues to the same weights.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from dspark.assets import asset
from dspark.distill.answers import (
    RunRows,
    answer_prompts,
    choose_prompts,
    first_format,
    folder_digest,
    hold_out,
    response_settings,
)
from dspark.distill.cache_build import cached_features
from dspark.distill.calibrate import calibrate_held_out
from dspark.distill.config import DistillConfig, load_config
from dspark.distill.determinism import deterministic
from dspark.distill.disk import clear_leftovers, writing
from dspark.distill.evaluate import decode_held_out, decoding_prompts, disagreement
from dspark.distill.fingerprint import tokenizer_files, tokenizer_fingerprint
from dspark.distill.finished import provenance, write_drafter_folder
from dspark.distill.fresh import choose_vocabulary, new_drafter
from dspark.distill.from_target import start_from_target
from dspark.distill.lock import locked
from dspark.distill.loop import CHECKPOINTS, FREE_SETTINGS, Evaluate, find_checkpoint, train
from dspark.distill.processes import Processes
from dspark.distill.prompts import read_prompts
from dspark.distill.state import MODEL, check_same_settings
from dspark.distill.taps import FeatureSource
from dspark.distill.tensorboard import require_tensorboard
from dspark.distill.trainer import Trainer
from dspark.distill.warm import warm_start
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.files import atomic_write_text
from dspark.runtime.loading import LoadedTarget, load_target

if TYPE_CHECKING:
    from dspark.runtime.target import Target

RUN_FILE, ROWS, STATES = "run.yaml", "rows", "states"
SHIPPED_PROMPTS = "prompts/train.jsonl"


def run_distill(
    config: DistillConfig, resume: bool = False, console: Console | None = None
) -> Path:
    """Train a drafter; returns its folder.

    Raises UserError for wrong input, a folder that holds another run or is in use by one, a full
    disk or a training that turned non-finite; KeyboardInterrupt after saving a resumable state.
    """
    if config.out.tensorboard:
        require_tensorboard()
    console = console or Console(stderr=True)
    processes = Processes.start(config.target.device)
    if not processes.is_main:
        console = Console(quiet=True)
    out = Path(config.out.dir)
    _check_writable(out)
    with ExitStack() as stack:
        stack.enter_context(deterministic(config.train.deterministic))
        with processes.together():
            if processes.is_main:
                stack.enter_context(locked(out, "wait for it to end, or choose another --out"))
                _check_folder(out, config, resume)
                clear_leftovers(out)
                clear_leftovers(out / ROWS)
        return _run(config, processes, console)


def _run(config: DistillConfig, processes: Processes, console: Console) -> Path:
    """The run itself, in a folder that is ours."""
    out = Path(config.out.dir)
    checkpoint = find_checkpoint(config, processes, console)
    dtype = getattr(torch, config.target.dtype)
    loaded = load_target(config.target.name, dtype=dtype, device=processes.device)
    target_digest = processes.from_main(folder_digest(loaded.path) if processes.is_main else "")
    files = prompt_files(config)
    prompts = read_prompts(files, strict=config.data.strict)
    console.print(prompts.report.summary(), highlight=False, markup=False, soft_wrap=True)
    drafter = new_drafter(config, loaded.target, loaded.tokenizer).to(processes.device)
    if config.drafter.init_from:  # only once: a run that goes on has a shape and weights of its own
        start = checkpoint.folder / MODEL if checkpoint else Path(config.drafter.init_from)
        drafter = warm_start(drafter, start, config.drafter, loaded.target)
    processes.same_weights(drafter)
    with processes.together(), writing(out / RUN_FILE):
        if processes.is_main:  # what the user wrote has been checked: from here on it is a run
            atomic_write_text(out / RUN_FILE, config.to_yaml())
    answered = answer_prompts(
        out / ROWS,
        loaded.target,
        loaded.tokenizer,
        choose_prompts(prompts.rows, config.data.max_prompts),
        response_settings(config.data, config.data_seed),
        greedy=config.data.greedy,
        target_digest=target_digest,
        processes=processes,
        console=console,
    )
    console.print(answered.summary(), highlight=False, markup=False, soft_wrap=True)
    rows = hold_out(answered, config.data.held_out, config.data_seed)
    if config.drafter.init == "target" and checkpoint is None:
        layers, seed = config.drafter.init_layers, config.train.seed
        drafter, copied = start_from_target(drafter, loaded.target, rows.training, layers, seed)
        processes.same_weights(drafter)
        console.print(copied.summary(), highlight=False, markup=False, soft_wrap=True)
    if drafter.draft_ids is not None and not config.drafter.init_from:
        text = choose_vocabulary(drafter, rows.training, rows.held_out, loaded.target)
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    source = _cached(config, loaded, drafter, rows, target_digest, processes, console)
    trainer = Trainer(loaded.target, drafter, rows.training, config.train, processes, source)
    progress = train(
        trainer,
        config,
        rows_digest=rows.digest,
        evaluate=evaluation(config, loaded.target, drafter, rows, trainer),
        checkpoint=checkpoint,
        console=console,
    )
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    fitted = calibrate_held_out(config, loaded.target, drafter, rows.held_out, processes, say)
    with processes.together():
        if processes.is_main:
            facts = provenance(config, loaded, target_digest, files, rows, trainer, progress)
            template = first_format(config.data, loaded.tokenizer).template
            kept = tokenizer_files(loaded.tokenizer, template)
            write_drafter_folder(out, drafter, progress.history, facts, kept, fitted, loaded.target)
    console.print(f"drafter written to {out}", highlight=False, markup=False, soft_wrap=True)
    return out


def _cached(
    config: DistillConfig,
    loaded: LoadedTarget,
    drafter: DSparkDrafter,
    rows: RunRows,
    target_digest: str,
    processes: Processes,
    console: Console,
) -> FeatureSource | None:
    """Target states on disk, if the configuration wants them there."""
    if config.cache.mode == "online":
        return None
    return cached_features(
        Path(config.cache.dir or Path(config.out.dir) / STATES),
        loaded.target,
        drafter.taps,
        [*rows.training, *rows.held_out],
        config.cache,
        {
            "target": target_digest,
            "tokenizer": tokenizer_fingerprint(loaded.tokenizer),
            "template": first_format(config.data, loaded.tokenizer).fingerprint,
            "max_length": config.data.max_length,
        },
        processes,
        console,
        int(config.train.keep_gib * 2**30),
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


def _check_writable(out: Path) -> None:
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"{out}: {existing} is no folder that can be written; choose another --out")


def _check_folder(out: Path, config: DistillConfig, resume: bool) -> None:
    """Refuse a folder that holds another run, or none to resume. Answers alone are no run."""
    path = out / RUN_FILE
    if resume:
        if not path.is_file():
            raise UserError(f"{path}: no run to resume here; start one without --resume")
        stored = load_config(path)
        check_same_settings(path, stored.to_dict(), config.to_dict(), FREE_SETTINGS)
    elif any((out / CHECKPOINTS).glob("step-*")) or (out / "config.json").exists():
        raise UserError(
            f"{out}: a run lives here; continue it with --resume, or choose another --out"
        )
