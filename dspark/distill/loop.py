"""The loop around the steps: records, evaluation, checkpoints, and stopping without loss.

Nothing in here touches the weights, but where a mean of them is kept they become it at the end
(evaluation borrows it before). Ctrl-C (or SIGTERM) ends the step that is running, saves, and
raises KeyboardInterrupt; a second one leaves at once, with the last checkpoint to go on from.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from dspark.distill.config import DistillConfig
from dspark.distill.disk import clear_leftovers
from dspark.distill.objective import objective, report
from dspark.distill.processes import Processes
from dspark.distill.progress import Reporter
from dspark.distill.state import (
    Checkpoint,
    Progress,
    check_same_settings,
    newest_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from dspark.distill.tensorboard import scalar_log
from dspark.distill.trainer import StepResult, Trainer
from dspark.errors import UserError
from dspark.wording import counted

Evaluate = Callable[[], dict[str, Any]]
"""Fields to add to a record: `held_out`, `decoded`, and `warning` if there is one."""

CHECKPOINTS = "checkpoints"
FREE_SETTINGS = ("out", "eval", "cache.dir", "cache.max_gib", "train.sharded")
"""What may change between a run and its continuation: sections and keys that leave the same steps.

The weights are the same then, to the bit; up to rounding where gradients are shared out otherwise.
"""

_STEPS_BEFORE_ESTIMATE = 5


@dataclass
class _Window:
    """Tokens and training seconds since the last record."""

    tokens: int = 0
    seconds: float = 0.0

    def rate(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


@dataclass
class _Loop:
    trainer: Trainer
    config: DistillConfig
    rows_digest: str
    evaluate: Evaluate
    reporter: Reporter
    progress: Progress
    log: Callable[[dict[str, Any]], None]
    window: _Window = field(default_factory=_Window)
    saved: int = -1

    @property
    def total(self) -> int:
        return self.trainer.schedule.total_steps

    def step(self) -> None:
        """One optimiser step and whatever is due after it."""
        started = time.perf_counter()
        result = self.trainer.run_step(self.progress.step)
        self.window.tokens += result.tokens
        self.window.seconds += time.perf_counter() - started
        self.progress.step += 1
        self._record(result)
        if self._due(self.config.out.checkpoint_every) or result.stop:
            self.save()
        if result.stop:
            self.reporter.line(f"stopped after step {self.progress.step}; its state is saved")
            raise KeyboardInterrupt

    def save(self) -> None:
        """Checkpoint this step, once, by the main process."""
        if self.saved == self.progress.step:
            return
        self.saved = self.progress.step
        processes = self.trainer.processes
        moments = self.trainer.optimiser.state_tensors()  # from all processes, if they share them
        with processes.together():
            if not processes.is_main:
                return
            save_checkpoint(
                Path(self.config.out.dir) / CHECKPOINTS,
                self.trainer.drafter,
                moments,
                self.progress,
                settings=self.config.to_dict(),
                rows_digest=self.rows_digest,
                world_size=processes.world,
                keep=self.config.out.keep,
            )

    def _due(self, every: int) -> bool:
        return self.progress.step % every == 0 or self.progress.step == self.total

    def _seconds(self) -> float:
        """Seconds in steps since the run began, over all its continuations."""
        history = self.progress.history
        return (history[-1].get("train_s", 0.0) if history else 0.0) + self.window.seconds

    def _record(self, result: StepResult) -> None:
        numbers = report(result.sums, objective(self.config.train))
        rate = self.window.rate()
        self.reporter.advance(_detail(numbers, rate))
        evaluating = self._due(self.config.eval.every)
        if not (evaluating or self._due(self.config.train.log_every)):
            return
        record = {
            "step": self.progress.step,
            "epoch": result.epoch,
            **numbers,
            "tokens_per_s": rate,
            "train_s": self._seconds(),
            "lr": result.lr,
            "grad_norm": result.grad_norm,
        }
        if evaluating:
            with self.trainer.optimiser.averaged():
                record |= self.evaluate()
            self.reporter.line(_evaluation_line(record, self.total))
            if record.get("warning"):
                self.reporter.line(f"warning: {record['warning']}")
        self.progress.history.append(record)
        self.log(record)
        self.window = _Window()


def train(
    trainer: Trainer,
    config: DistillConfig,
    *,
    rows_digest: str,
    evaluate: Evaluate,
    checkpoint: Checkpoint | None,
    console: Console,
) -> Progress:
    """Run all steps, or those after `checkpoint` (see `find_checkpoint`).

    Raises UserError (other rows than the checkpoint's, full disk, NonFinite) and
    KeyboardInterrupt, the latter with everything saved.
    """
    progress = Progress()
    if checkpoint is not None:
        _check_same_rows(checkpoint, rows_digest)
        progress = restore_checkpoint(checkpoint, trainer.drafter, trainer.optimiser)
        _say(console, f"continuing after step {progress.step}")
    total = trainer.schedule.total_steps
    _say(console, _plan(trainer))
    with (
        Reporter("distilling", total, done=progress.step, console=console) as reporter,
        _stop_on_signal(trainer, reporter),
        scalar_log(
            Path(config.out.dir),
            progress.step,
            config.out.tensorboard and trainer.processes.is_main,
        ) as log,
    ):
        loop = _Loop(trainer, config, rows_digest, evaluate, reporter, progress, log)
        first, started = progress.step, time.perf_counter()
        while progress.step < total:
            loop.step()
            if progress.step == first + _STEPS_BEFORE_ESTIMATE < total:
                pace = (time.perf_counter() - started) / _STEPS_BEFORE_ESTIMATE
                left = pace * (total - progress.step)
                reporter.line(f"{pace:.2f} s a step, about {_duration(left)} left")
        loop.save()
    trainer.optimiser.settle()
    return progress


def find_checkpoint(
    config: DistillConfig, processes: Processes, console: Console
) -> Checkpoint | None:
    """The newest complete checkpoint of the run folder, if there is one.

    Raises UserError if it was made with other settings.
    """
    root = Path(config.out.dir) / CHECKPOINTS
    if processes.is_main:
        clear_leftovers(root)
    processes.wait()

    def warn(text: str) -> None:
        _say(console, f"warning: {text}")

    checkpoint = newest_checkpoint(root, warn)
    if checkpoint is None:
        return None
    check_same_settings(
        checkpoint.folder, checkpoint.trainer["settings"], config.to_dict(), FREE_SETTINGS
    )
    before = checkpoint.trainer["world_size"], checkpoint.trainer["settings"]["train"]["sharded"]
    if before != (processes.world, config.train.sharded):
        warn(
            f"{checkpoint.folder}: saved by {_way(*before)}, now "
            f"{_way(processes.world, config.train.sharded)}: the same rows and anchors, weights "
            "equal up to rounding"
        )
    return checkpoint


def _way(world: int, sharded: bool) -> str:
    return f"{world} process{'es' if world > 1 else ''}" + (", sharded" if sharded else "")


def _check_same_rows(checkpoint: Checkpoint, rows_digest: str) -> None:
    if checkpoint.trainer["rows_digest"] != rows_digest:
        raise UserError(
            f"{checkpoint.folder}: trained on other rows than those in the run folder; restore "
            "the prompt files and the target, or start a new run in another --out"
        )


@contextmanager
def _stop_on_signal(trainer: Trainer, reporter: Reporter) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a request to stop after the step."""
    # Python lets only the main thread install handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if trainer.stop_requested:
            raise KeyboardInterrupt
        trainer.stop_requested = True
        reporter.line("stopping after this step; again to leave at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _plan(trainer: Trainer) -> str:
    rows = trainer.rows
    schedule = trainer.schedule
    parameters = sum(p.numel() for p in trainer.drafter.parameters())
    supervised = sum(row.supervised for row in rows)
    return (
        f"training on {counted(len(rows), 'row')} with {counted(supervised, 'supervised token')}: "
        f"{counted(schedule.total_steps, 'step')}{schedule.shortfall} of "
        f"{counted(schedule.rows_per_step, 'row')}, "
        f"{parameters / 1e6:.2f} M parameters, {trainer.processes.world} process(es) on "
        f"{trainer.processes.device.type}"
    )


def _detail(numbers: dict[str, Any], rate: float | None) -> str:
    parts = [f"loss {_text(numbers['loss'])}", f"accepted {_text(numbers['accepted_length'])}"]
    if rate is not None:
        parts.append(f"{rate:.0f} tok/s")
    return "  ".join(parts)


def _evaluation_line(record: dict[str, Any], total: int) -> str:
    parts = [f"step {record['step']}/{total}", _detail(record, record["tokens_per_s"])]
    if record.get("held_out"):
        parts.append(f"held out {_text(record['held_out']['accepted_length'])}")
    for result in record.get("decoded", ()):
        parts.append(f"decoded T={result['temperature']:g} {_text(result['accepted_length'])}")
    return "  ".join(parts)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
