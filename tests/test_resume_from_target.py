"""A drafter that started from its target's layers goes on like any other: to the same bits."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from dspark.distill.config import load_config
from dspark.distill.run import run_distill

FINISHED = ("config.json", "model.safetensors", "golden.json", "training.json")


@pytest.mark.slow
def test_a_run_of_preset_kda_pruned_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """Its shape, too, comes from the target: a continuation must not build the settings' one."""
    settings = {
        "data.max_prompts": 24, "data.held_out": 4, "data.max_new_tokens": 40,
        "train.max_steps": 4, "train.rows_per_step": 4, "eval.prompts": 0,
        "eval.calibrate": False, "out.checkpoint_every": 2, "out.dir": str(tmp_path / "run"),
        "target.device": "cpu",
    }  # fmt: skip
    config = load_config(None, settings, preset="kda-pruned")
    console = Console(file=io.StringIO())
    folder = run_distill(config, console=console)
    unbroken = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    for name in FINISHED:
        (folder / name).unlink()
    run_distill(config, resume=True, console=console)
    assert (folder / "model.safetensors").read_bytes() == unbroken
