"""A run killed at any moment and resumed gives the weights of one that was not: the very bits."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark.distill.optim import learning_rate
from dspark.distill.processes import Processes
from dspark.distill.state import (
    MANIFEST,
    OPTIMISER,
    TRAINER,
    Progress,
    manifest_fault,
    newest_checkpoint,
    save_checkpoint,
    write_manifest,
)
from dspark.distill.trainer import Trainer
from dspark.errors import UserError
from tests.distill_setup import config, run, same, trainer, weights


def stop_at(number: int) -> Any:
    """Ask for a stop during step `number`, as Ctrl-C does."""

    def on_step(made: Trainer, step: int) -> None:
        if step == number:
            os.kill(os.getpid(), signal.SIGINT)

    return on_step


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def losses(progress: Any) -> list[float]:
    return [record["loss"] for record in progress.history]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[float]]:
    """Folder, weights and losses of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("straight")
    made, progress, _ = run(config(out))
    assert progress.step == 12
    return out, weights(made), losses(progress)


@pytest.mark.parametrize("step", [0, 4, 5, 10])
def test_ctrl_c_then_resume_is_bit_equal(tmp_path: Path, straight: Any, step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=stop_at(step))
    assert checkpoints(tmp_path)[-1] == f"step-{step + 1:06d}"
    made, progress, text = run(config(tmp_path))
    assert f"continuing after step {step + 1}" in text
    assert same(weights(made), straight[1])
    assert losses(progress) == straight[2]  # the same rows and the same anchors, step by step


def test_resume_restores_moments_and_update_counts_in_float32(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path, train__precision="bf16"), on_step=stop_at(7))
    saved = load_file(tmp_path / "checkpoints" / "step-000008" / OPTIMISER)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert {float(value) for name, value in saved.items() if name.endswith(".step")} == {8.0}
    again, _, _ = run(config(tmp_path, train__precision="bf16"))
    shutil.rmtree(tmp_path / "checkpoints")
    whole, _, _ = run(config(tmp_path, train__precision="bf16"))
    assert same(weights(again), weights(whole))
    assert same(again.optimiser.state_tensors(), whole.optimiser.state_tensors())


@pytest.mark.parametrize("step", [8, 9, 10])
def test_the_learning_rate_goes_on_where_it_was(tmp_path: Path, step: int) -> None:
    settings = config(tmp_path, train__warmup=0.75)  # hands over at step 9 of 12
    with pytest.raises(KeyboardInterrupt):
        run(settings, on_step=stop_at(step))
    _, progress, _ = run(settings)
    rates = [record["lr"] for record in progress.history]
    assert rates == [learning_rate(s, 12, settings.train) for s in range(12)]
    assert max(rates) <= settings.train.lr


def test_a_finished_run_resumes_to_itself(straight: Any) -> None:
    out, expected, history = straight
    made, progress, _ = run(config(out))
    assert same(weights(made), expected)
    assert losses(progress) == history


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=stop_at(4))
    changed = {"train__clip": 0.5, "train__precision": "bf16", "data__temperature": 0.7}
    with pytest.raises(UserError) as caught:
        run(config(tmp_path, **changed))
    message = str(caught.value)
    assert "train.clip was 1.0, now 0.5" in message
    assert "train.precision was 'fp32', now 'bf16'" in message
    assert "data.temperature was 1.0, now 0.7" in message
    # What does not touch the weights may change.
    run(config(tmp_path, out__keep=1, out__checkpoint_every=5, eval__every=7))


def test_other_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=stop_at(4))
    with pytest.raises(UserError, match="trained on other rows"):
        run(config(tmp_path), rows_digest="changed")


# --- broken checkpoints --------------------------------------------------------------------------


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (OPTIMISER, cut, "bytes, expected"),
        ("model/model.safetensors", flip, "does not match its checksum"),
        (TRAINER, Path.unlink, "is missing"),
        (MANIFEST, cut, "no readable manifest.json"),
        (MANIFEST, Path.unlink, "no readable manifest.json"),
    ],
)
def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, straight: Any, name: str, damage: Any, words: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=stop_at(7))
    assert checkpoints(tmp_path) == ["step-000006", "step-000008"]
    damage(tmp_path / "checkpoints" / "step-000008" / name)
    made, _, text = run(config(tmp_path))
    assert "step-000008: incomplete checkpoint skipped" in text
    assert words in text
    assert "continuing after step 6" in text
    assert same(weights(made), straight[1])


def test_pruning_never_counts_a_broken_newer_checkpoint(tmp_path: Path) -> None:
    # Resumed behind a broken step 8 with keep=1: saving step 6 again must not be the one removed.
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=stop_at(7))
    cut(tmp_path / "checkpoints" / "step-000008" / OPTIMISER)
    shutil.rmtree(tmp_path / "checkpoints" / "step-000006")
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path, out__keep=1), on_step=stop_at(4))
    found = newest_checkpoint(tmp_path / "checkpoints", lambda text: None)
    assert found is not None
    assert found.folder.name == "step-000005"


def test_past_a_million_steps_the_newest_is_the_last_and_not_the_first_by_text(
    tmp_path: Path,
) -> None:
    made, root = trainer(), tmp_path / "checkpoints"
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        save_checkpoint(
            root, made.drafter, made.optimiser.state_tensors(), Progress(step),
            settings={}, rows_digest="toy", world_size=1, keep=2,
        )  # fmt: skip
    assert checkpoints(tmp_path) == ["step-1000000", "step-1000001"]
    found = newest_checkpoint(root, lambda text: None)
    assert found is not None
    assert found.progress.step == 1_000_001
    shutil.copytree(root / "step-1000000", root / "step-999999")
    (root / "step-notes").mkdir()  # not ours: neither read nor removed
    found = newest_checkpoint(root, lambda text: None)
    assert found is not None
    assert found.folder.name == "step-1000001"


def test_leftovers_of_a_kill_inside_a_save_are_tidied(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=stop_at(4))
    root = tmp_path / "checkpoints"
    # Killed between the two renames that replace a folder, and while writing a fresh one.
    (root / "step-000005").rename(root / ".step-000005.old")
    (root / ".step-000006.abcd.tmp").mkdir()
    _, _, text = run(config(tmp_path))
    assert "continuing after step 5" in text
    assert not list(root.glob(".step-*"))


def test_nothing_but_tensors_and_json_is_written_or_read(straight: Any) -> None:
    files = [path for path in (straight[0] / "checkpoints").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())


def test_another_number_of_processes_is_said(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=stop_at(4))
    path = tmp_path / "checkpoints" / "step-000005" / TRAINER
    path.write_text(path.read_text().replace('"world_size": 1', '"world_size": 4'))
    (tmp_path / "checkpoints" / "step-000005" / MANIFEST).unlink()
    write_manifest(tmp_path / "checkpoints" / "step-000005")
    _, _, text = run(config(tmp_path))
    assert "saved by 4 processes, now 1" in text


# --- in other processes: SIGKILL and a full disk -------------------------------------------------


def child_run(out: str, pipe: Any, file_limit: int | None) -> None:
    """Entry point of a child: run, telling the parent when each step begins."""
    torch.set_num_threads(1)
    if file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    try:
        run(config(Path(out)), on_step=lambda _, step: pipe.send(step))
        pipe.send("done")
    except UserError as error:
        pipe.send(str(error))


def start_child(out: Path, file_limit: int | None = None) -> tuple[Any, Any]:
    context = multiprocessing.get_context("forkserver")
    # The server imports once what takes seconds (AdamW needs dynamo) and never computes.
    context.set_forkserver_preload(["tests.distill_setup", "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=child_run, args=(str(out), sender, file_limit))
    child.start()
    sender.close()
    return child, receiver


def kill_at_random(out: Path, rng: random.Random) -> bool:
    """Start or continue a run, kill it some time after a random step; True if it got to the end."""
    child, receiver = start_child(out)
    last = rng.randrange(12)
    try:
        while True:
            message = receiver.recv()
            if message == "done":
                return True
            if message >= last:
                time.sleep(rng.uniform(0, 0.15))  # a step with its save takes about 0.1 s
                return False
    except EOFError:
        return False
    finally:
        child.kill()
        child.join()


def check_kills(tmp_path: Path, expected: dict[str, Any], runs: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(runs):
        out = tmp_path / f"run-{number}"
        for _ in range(3):
            if kill_at_random(out, rng):
                break
        made, progress, _ = run(config(out))
        assert progress.step == 12
        assert same(weights(made), expected), f"run {number} of seed {seed}"
        shutil.rmtree(out)


def test_sigkill_then_resume_is_bit_equal(tmp_path: Path, straight: Any) -> None:
    check_kills(tmp_path, straight[1], runs=1, seed=1)


@pytest.mark.slow
def test_sigkill_at_many_moments_then_resume_is_bit_equal(tmp_path: Path, straight: Any) -> None:
    check_kills(tmp_path, straight[1], runs=15, seed=2)


def test_a_full_disk_ends_in_one_clear_line_and_keeps_the_good_checkpoint(
    tmp_path: Path, straight: Any
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path), on_step=stop_at(4))
    # No file may grow beyond 20 kB: the model no longer fits.
    child, receiver = start_child(tmp_path, file_limit=20_000)
    messages = []
    while not messages or isinstance(messages[-1], int):
        messages.append(receiver.recv())
    child.join()
    assert "step-000006: no space left to write it" in messages[-1]
    assert "--resume" in messages[-1]
    assert checkpoints(tmp_path)[-1] == "step-000005"
    assert manifest_fault(tmp_path / "checkpoints" / "step-000005") is None
    made, _, _ = run(config(tmp_path))
    assert same(weights(made), straight[1])


def test_a_moment_tensor_of_another_shape_is_refused() -> None:
    made = trainer()
    made.run_step(0)
    state = made.optimiser.state_tensors()
    with pytest.raises(KeyError, match="does not fit"):
        trainer().optimiser.load_state_tensors(dict(list(state.items())[1:]))
    name = next(name for name in state if name.endswith("exp_avg"))
    with pytest.raises(ValueError, match=name):
        trainer().optimiser.load_state_tensors(state | {name: torch.zeros(3)})


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Processes.start("cpu") == Processes(torch.device("cpu"))
