"""What the timing of a training step times, and that its parts are the whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.distill import objective
from dspark.distill.ahead import Ahead
from dspark.distill.determinism import deterministic
from dspark.distill.loss import distill_loss
from dspark.distill.terms import slot_weights
from dspark_eval.train_step import StepSize, main, make_trainer, measure, settings
from dspark_eval.train_step_peer import plain_loss
from tests.headings import assert_headed

CPU = torch.device("cpu")
SIZE = StepSize(
    vocab=60, hidden=32, layers=1, heads=2, key_heads=1, head_dim=16, ffn=48, rank=8, taps=2,
    slots=4, length=24, anchors=5,
)  # fmt: skip


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_parts_add_up_to_the_step(moments: str) -> None:
    found = measure(SIZE, CPU, moments, steps=3)
    assert set(found["parts_ms"]) == {"forward", "loss", "backward", "update"}
    assert all(value > 0 for value in found["parts_ms"].values())
    assert sum(found["parts_ms"].values()) < 2 * found["slowest_ms"]
    assert found["peak_bytes"] is None  # nobody counts on a CPU
    assert objective.distill_loss is distill_loss  # put back


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_what_is_made_beside_an_update_changes_no_bit(moments: str) -> None:
    """Batches made ahead, while weights move, against none of that."""
    cuda, states = torch.device("cuda"), []
    size = replace(SIZE, vocab=5_000, hidden=256, head_dim=64, layers=2, length=512, anchors=64)
    for ahead in (True, False):
        trainer = make_trainer(size, cuda, moments, 6)
        if not ahead:
            trainer._ahead = Ahead(CPU)
        with deterministic(True):  # else two equal runs part by rounding
            for step in range(6):
                trainer.run_step(step)
                assert (trainer._ahead.batch(step + 1) is not None) == (ahead and step < 5)
        states.append(trainer.drafter.state_dict() | trainer.optimiser.state_tensors())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_the_recipe_is_deepspecs_in_half_precision() -> None:
    recipe = settings(StepSize(), "int8", 20)
    assert (recipe.precision, recipe.moments, recipe.anchors) == ("bf16", "int8", 512)
    assert (recipe.lr, recipe.ce, recipe.tv, recipe.optimizer) == (6e-4, 0.1, 0.9, "adamw")


def test_qwen3_has_the_parameters_that_the_notes_count() -> None:
    with torch.device("meta"):
        drafter = StepSize().drafter(torch.device("meta"))
    assert sum(p.numel() for p in drafter.parameters()) == pytest.approx(615e6, rel=0.01)


def test_the_published_form_has_the_same_loss() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 4, 30), torch.randn(6, 4, 30)
    labels, confidence = torch.randint(30, (6, 4)), torch.randn(6, 4)
    q, p = logits.double().softmax(-1), target.double().softmax(-1)
    ce = -q.gather(-1, labels[..., None])[..., 0].log()
    l1, sure = (p - q).abs().sum(-1), confidence.double().sigmoid()
    bce = -((1 - l1 / 2) * sure.log() + l1 / 2 * (1 - sure).log())
    weight = slot_weights(4, 4.0, q)
    expected = (weight * (0.1 * ce + 0.9 * l1 + bce)).sum() / (6 * weight.sum())
    found = plain_loss(logits, target, labels, confidence)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    sizes = [part for name, value in vars(SIZE).items() if name != "rows"
             for part in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
    asked = ["--device", "cpu", "--steps", "2", "--moments", "bf16", "--json", str(file)]
    assert main([*sizes, *asked]) == 0
    assert "bf16" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert_headed(written, "train_step", [*sizes, *asked], None, "bfloat16")
    assert written["size"]["vocab"] == 60
    assert [each["moments"] for each in written["steps"]] == ["bf16"]
    if not torch.cuda.is_available():
        assert main(["--device", "cuda"]) == 2
        assert "error:" in capsys.readouterr().err
