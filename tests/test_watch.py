"""Around the steps: the mean of the weights is evaluated and kept, records go to Tensorboard."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from dspark.distill import tensorboard
from dspark.distill.loop import find_checkpoint, train
from dspark.distill.run import run_distill
from dspark.distill.state import restore_checkpoint
from dspark.distill.tensorboard import scalar_log, scalars
from dspark.errors import UserError
from tests.distill_setup import ALONE, config, run, same, trainer, weights


def test_the_mean_is_evaluated_and_left_behind(tmp_path: Path) -> None:
    settings = config(tmp_path, train__ema=0.9, eval__every=4)
    made, seen = trainer(settings.train), []
    quiet = Console(quiet=True)

    def evaluate() -> dict[str, Any]:
        seen.append(weights(made))
        return {}

    train(
        made, settings, rows_digest="toy", evaluate=evaluate,
        checkpoint=find_checkpoint(settings, ALONE, quiet), console=quiet,
    )  # fmt: skip
    assert len(seen) == 3
    plain, _, _ = run(config(tmp_path / "plain"))
    assert same(seen[-1], weights(made))
    assert not same(weights(made), weights(plain))
    # The checkpoint goes on from the weights themselves, which the mean never touched.
    last = find_checkpoint(settings, ALONE, quiet)
    assert last is not None
    again = trainer(settings.train)
    restore_checkpoint(last, again.drafter, again.optimiser)
    assert same(weights(again), weights(plain))
    with again.optimiser.averaged():
        assert same(weights(again), weights(made))


def test_a_run_with_a_mean_resumes_to_the_bit(tmp_path: Path) -> None:
    whole, _, _ = run(config(tmp_path / "whole", train__ema=0.95))

    def stop(made: Any, step: int) -> None:
        made.stop_requested = step == 6

    halted = config(tmp_path / "halted", train__ema=0.95)
    with pytest.raises(KeyboardInterrupt):
        run(halted, on_step=stop)
    resumed, _, text = run(halted)
    assert "continuing after step 7" in text
    assert same(weights(resumed), weights(whole))
    finished, _, _ = run(halted)  # nothing left to do: still the mean
    assert same(weights(finished), weights(whole))


RECORD = {
    "step": 30, "loss": 1.5, "tokens_per_s": None, "acceptance": [0.5, None, 0.25],
    "warning": "a text", "held_out": {"loss": 2}, "decoded": [{"temperature": 1.0}],
}  # fmt: skip
SCALARS = [
    ("loss", 1.5), ("acceptance/0", 0.5), ("acceptance/2", 0.25), ("held_out/loss", 2.0),
    ("decoded/0/temperature", 1.0),
]  # fmt: skip


def test_numbers_of_a_record_by_path() -> None:
    assert list(scalars(RECORD)) == SCALARS


class FakeWriter:
    made: ClassVar[list[FakeWriter]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.events = folder, purge_step, []
        self.closed = False
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.events.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWriter]:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: object())
    monkeypatch.setattr(FakeWriter, "made", [])
    return FakeWriter.made


def test_a_run_writes_what_its_history_holds(tmp_path: Path, writers: list[FakeWriter]) -> None:
    _, progress, _ = run(config(tmp_path, out__tensorboard=True))
    [writer] = writers
    assert writer.folder == str(tmp_path / "tensorboard")
    assert writer.purge_step == 1
    assert writer.closed
    losses = [(value, step) for name, value, step in writer.events if name == "loss"]
    assert losses == [(record["loss"], record["step"]) for record in progress.history]
    assert len(losses) == 12


def test_going_on_drops_events_of_steps_that_come_again(
    tmp_path: Path, writers: list[FakeWriter]
) -> None:
    def die(made: Any, step: int) -> None:
        if step == 7:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(config(tmp_path, out__tensorboard=True), on_step=die)
    assert writers[0].closed
    run(config(tmp_path, out__tensorboard=True))
    assert writers[1].purge_step == 7  # a checkpoint every 3 steps: step 7 is done a second time
    assert {step for *_, step in writers[1].events} == set(range(7, 13))


def test_without_the_wish_nothing_is_written(tmp_path: Path, writers: list[FakeWriter]) -> None:
    run(config(tmp_path))
    assert not writers


def test_a_missing_package_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="tensorboard is not installed; `pip install tensorboard`"):
        run_distill(config(tmp_path / "run", out__tensorboard=True))
    assert not (tmp_path / "run").exists()
    with scalar_log(tmp_path, 0, False) as log:
        log(RECORD)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_reads_back_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with scalar_log(tmp_path, 0, True) as log:
        log(RECORD)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    read = [(name, events.Scalars(name)[0]) for name, _ in SCALARS]
    assert [(name, event.value) for name, event in read] == SCALARS
    assert all(event.step == 30 for _, event in read)
