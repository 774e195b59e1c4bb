"""One drafter, trained for a number of seconds.

    OUT/ARM/            the drafter's folder
    OUT/ARM/trained.json    what it is, its steps, seconds and loss as it went

The cosine needs to know its end. So the number of steps is estimated from the pace of a few trial
steps on another drafter (which also compile the kernels), and again from the pace so far every
`REVISE` steps; the learning rate follows the estimate and reaches zero with the last second. The
target's states are computed before the clock starts, alike for every drafter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark import ops
from dspark.distill.batches import make_batch
from dspark.distill.chat import TrainingRow
from dspark.distill.config import DistillConfig
from dspark.distill.fresh import new_drafter
from dspark.distill.objective import batch_sums, objective, report, zero_sums
from dspark.distill.processes import Processes
from dspark.distill.trainer import Trainer
from dspark.draft.checkpoint import save_drafter
from dspark.draft.model import DSparkDrafter
from dspark.files import atomic_write_json
from dspark.runtime.loading import LoadedTarget
from dspark_eval.environment import describe_environment
from dspark_eval.real_text.reuse import ASKED
from dspark_eval.real_text.start import start_from_layers
from dspark_eval.real_text.states import HeldStates, StatesOnce

TRIAL, REVISE = 16, 50
"""Steps of the trial, the second half of which count; steps between two estimates."""
LOG_EVERY = 100
WARM = 4
"""Steps that compile every kernel there is."""
TRAINED, READY = "trained.json", "ready"
PATIENCE = 75.0
"""Seconds that a run waits for those beside it."""


def train_for(
    loaded: LoadedTarget,
    held: StatesOnce,
    held_out: Sequence[TrainingRow],
    config: DistillConfig,
    seconds: float,
    folder: Path,
    *,
    asked: Mapping[str, Any],
    from_target: bool = False,
    beside: Sequence[Path] = (),
) -> dict[str, Any]:
    """Train a drafter of `config` on rows for `seconds` and write its folder; returns its record.

    `held`: the rows, and their states once one drafter has needed them; `asked` is what decided the
    run, for those that would repeat it; `held_out` rows are only looked at, under teacher forcing,
    when it is done; `from_target`: its layers start as the target's; `beside`: folders of runs to
    start with, at the same moment.

    Raises UserError for a configuration that cannot be built, NonFinite where training breaks.
    """
    device = loaded.target.device
    started = time.perf_counter()
    (folder / READY).unlink(missing_ok=True)
    drafter = _fresh(config, loaded)
    if from_target:
        start_from_layers(drafter, loaded.target)
    rows, states = held.rows, held.states(drafter.taps)
    prepared = time.perf_counter() - started
    print(f"states of {len(rows)} rows after {prepared:.1f} s", flush=True)
    ops.forget()
    pace = _pace(_trainer(_fresh(config, loaded), config, loaded, rows, states, TRIAL))
    trainer = _trainer(drafter, config, loaded, rows, states, max(2, round(seconds / pace)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    print(f"{1 / pace:.1f} steps/s, ready {time.perf_counter() - started:.1f} s", flush=True)
    _start_with(folder, beside)
    history, spent = _run(trainer, config, seconds)
    trainer.optimiser.settle()
    seen = _teacher_forced(trainer, config, held_out)
    record = {
        ASKED: dict(asked),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "rows": len(rows),
        "answer_tokens": sum(row.supervised for row in rows),
        "steps": trainer.schedule.total_steps,
        "seconds": spent,
        "seconds_asked": seconds,
        "steps_per_second": trainer.schedule.total_steps / spent,
        "epochs": trainer.schedule.total_steps / trainer.schedule.steps_per_epoch,
        "states_seconds": prepared,
        "states_bytes": states.nbytes,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "ops": ops.ran(),
        "held_out": seen,
        "history": history,
        "config": {"drafter": config.to_dict()["drafter"], "train": config.to_dict()["train"]},
        "environment": describe_environment(device, loaded.target.dtype),
    }
    save_drafter(folder, drafter.eval(), dtype=torch.float32, golden=False)
    atomic_write_json(folder / TRAINED, record)
    return record


def warm(loaded: LoadedTarget, configs: Sequence[DistillConfig]) -> None:
    """A few steps of each configuration on rows of noise: kernels are compiled and cached."""
    generator = torch.Generator().manual_seed(0)
    for config in configs:
        shape = (config.train.rows_per_step, config.data.max_length)
        ids = torch.randint(3, loaded.target.vocab_size, shape, generator=generator).tolist()
        mask = (False,) * (shape[1] // 4) + (True,) * (shape[1] - shape[1] // 4)
        rows = [TrainingRow(tuple(row), mask) for row in ids]
        drafter = _fresh(config, loaded)
        states = HeldStates(loaded.target, drafter.taps, rows)
        pace = _pace(_trainer(drafter, config, loaded, rows, states, WARM))
        print(f"warm: {1 / pace:.1f} steps/s", flush=True)


def _start_with(folder: Path, beside: Sequence[Path]) -> None:
    """Wait until the runs beside this one are ready too, or `PATIENCE` is over."""
    if not beside:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / READY).touch()
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not all((other / READY).is_file() for other in beside):
        time.sleep(0.2)


def _fresh(config: DistillConfig, loaded: LoadedTarget) -> DSparkDrafter:
    return new_drafter(config, loaded.target, loaded.tokenizer).to(loaded.target.device)


def _trainer(
    drafter: DSparkDrafter,
    config: DistillConfig,
    loaded: LoadedTarget,
    rows: Sequence[TrainingRow],
    states: HeldStates,
    steps: int,
) -> Trainer:
    settings = replace(config.train, max_steps=steps)
    return Trainer(loaded.target, drafter, rows, settings, Processes(loaded.target.device), states)


def _pace(trainer: Trainer) -> float:
    """Seconds of a step, over the second half of the trainer's steps."""
    total = trainer.schedule.total_steps
    middle = total // 2
    started = time.perf_counter()
    for step in range(total):
        if step == middle:
            _wait(trainer)
            started = time.perf_counter()
        trainer.run_step(step)
    _wait(trainer)
    return (time.perf_counter() - started) / (total - middle)


def _run(
    trainer: Trainer, config: DistillConfig, seconds: float
) -> tuple[list[dict[str, Any]], float]:
    """All steps, as many as fit; returns records and the seconds they took."""
    history: list[dict[str, Any]] = []
    step, started = 0, time.perf_counter()
    while step < trainer.schedule.total_steps:
        result = trainer.run_step(step)
        step += 1
        total = trainer.schedule.total_steps
        if step % REVISE == 0 and step < total:
            spent = time.perf_counter() - started
            fitting = max(step + 1, round(seconds * step / spent))
            trainer.schedule = replace(trainer.schedule, max_steps=fitting)
        if step % LOG_EVERY == 0 or step == total:
            numbers = report(result.sums, objective(config.train))
            spent = time.perf_counter() - started
            kept = {key: numbers[key] for key in ("loss", "tv", "accepted_length")}
            history.append({"step": step, "seconds": spent, "lr": result.lr, **kept})
            print(f"step {step} of {total}, {spent:.0f} s, {kept}", flush=True)
    _wait(trainer)
    return history, time.perf_counter() - started


@torch.no_grad()
def _teacher_forced(
    trainer: Trainer, config: DistillConfig, rows: Sequence[TrainingRow]
) -> dict[str, Any]:
    """Loss and acceptance on rows that were not trained on."""
    target, drafter = trainer.target, trainer.drafter.eval()
    sums = zero_sums(drafter.config.block_size, target.device)
    size = config.train.micro_rows
    for start in range(0, len(rows), size):
        ids = range(start, min(start + size, len(rows)))
        batch = make_batch(rows, ids, anchors=config.train.anchors, seed=0, epoch=0)
        sums = sums + batch_sums(target, drafter, batch, config.train)
    numbers = report(sums, objective(config.train))
    return {key: numbers[key] for key in ("loss", "tv", "accepted_length", "acceptance")}


def _wait(trainer: Trainer) -> None:
    if trainer.processes.device.type == "cuda":
        torch.cuda.synchronize()
