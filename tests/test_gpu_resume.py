"""A run on a GPU with deterministic kernels, killed and resumed, gives the very same weights.

Each run is a process of its own: cuBLAS reads its workspace once, at its first use.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distill_setup import same

pytestmark = pytest.mark.gpu

STEPS = 60
SETTINGS = (
    "target.device=cuda", "train.deterministic=true", "data.max_prompts=96", "data.held_out=8",
    "train.epochs=100", f"train.max_steps={STEPS}", "eval.prompts=2", "eval.every=1000",
    "eval.calibrate=false", "out.checkpoint_every=5",
)  # fmt: skip
DRAFTERS = {
    "attention": ("drafter.backbone=attention", "drafter.head=vanilla"),
    "kda": ("drafter.backbone=kda", "drafter.kda_order=1", "drafter.head=rnn"),
    "mla, bf16": ("drafter.backbone=mla", "train.precision=bf16", "train.moments=bf16"),
}


def start(out: Path, *more: str) -> subprocess.Popen[bytes]:
    settings = [part for item in (*SETTINGS, *more) for part in ("--set", item)]
    command = [sys.executable, "-m", "dspark", "distill", "--out", str(out), *settings]
    if (out / "run.yaml").is_file():
        command.append("--resume")
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(out: Path, *more: str) -> dict[str, torch.Tensor]:
    process = start(out, *more)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-2000:]
    return load_file(out / "model.safetensors")


def kill_after(out: Path, checkpoint: str, *more: str) -> None:
    """SIGKILL once a checkpoint is on disk; the run must not be over by then."""
    process = start(out, *more)
    deadline = time.monotonic() + 300
    while not (out / "checkpoints" / checkpoint / "manifest.json").is_file():
        assert process.poll() is None, process.stderr and process.stderr.read().decode()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "model.safetensors").exists()


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_killed_and_resumed_is_bit_equal(tmp_path: Path, drafter: tuple[str, ...]) -> None:
    straight = finish(tmp_path / "straight", *drafter)
    kill_after(tmp_path / "killed", "step-000020", *drafter)
    assert same(finish(tmp_path / "killed", *drafter), straight)
