"""Named recipes: DeepSpec's, number by number, and drafters that start as its do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.distill.config import load_config
from dspark.distill.objective import objective
from dspark.distill.optim import learning_rate
from dspark.distill.presets import PRESETS, preset_names, preset_overrides
from dspark.distill.terms import Objective
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.start import initialise
from dspark.errors import UserError


def test_deepspec_is_deepspecs() -> None:
    config = load_config(None, preset_overrides("deepspec"))
    train, shape = config.train, config.drafter
    assert (shape.backbone, shape.head, shape.block_size) == ("attention", "vanilla", 7)
    assert shape.confidence_with_markov
    assert shape.init_scale == "normal"
    assert shape.sliding_window is None
    assert config.data.min_supervised == 14
    assert (train.anchors, train.anchor_choice) == (512, "uniform")
    assert objective(train) == Objective(ce=0.1, l1=0.9, confidence=1.0, decay=4.0)
    assert not train.confidence_detach
    assert (train.optimizer, train.weight_decay, train.clip, train.ema) == ("adamw", 0.0, 1.0, 0.0)
    assert (train.beta1, train.beta2, train.eps) == (0.9, 0.999, 1e-8)  # torch's defaults
    rates = [learning_rate(step, 1000, train) for step in range(1000)]
    assert max(rates) == 6e-4 == rates[40]  # after 4 % of the steps
    assert rates[519] == pytest.approx(3e-4, rel=0.01)  # half way down the cosine
    assert rates[-1] < 1e-8


def test_a_preset_is_whole_where_defaults_may_change() -> None:
    """Every option that decides what is minimised, and how, is stated, not left to a default."""
    stated = set(preset_overrides("deepspec"))
    size = {
        "epochs", "max_steps", "rows_per_step", "micro_rows", "precision", "keep_gib", "chunk",
        "seed", "sharded", "deterministic", "log_every", "muon_lr", "muon_momentum",
    }  # fmt: skip
    train = {f"train.{name}" for name in load_config().to_dict()["train"] if name not in size}
    assert train <= stated


def test_values_of_a_preset_may_be_changed_and_the_next_is_not() -> None:
    values = preset_overrides("deepspec") | {"train.lr": 1e-3}
    assert load_config(None, values).train.lr == 1e-3
    values["train.clip"] = 9.0
    assert preset_overrides("deepspec")["train.clip"] == 1.0


def test_an_unknown_preset_names_the_nearest() -> None:
    assert "deepspec" in preset_names()
    with pytest.raises(UserError, match="preset 'deep-spec' does not exist; did you mean deepspec"):
        preset_overrides("deep-spec")
    with pytest.raises(UserError, match="known: deepspec"):
        preset_overrides("zzz")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads(name: str) -> None:
    assert PRESETS[name].doc
    load_config(None, preset_overrides(name))


def test_normal_start_has_one_spread_for_all() -> None:
    config = DraftConfig(
        hidden_size=96, num_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
        intermediate_size=256, vocab_size=300, num_target_layers=9, target_layer_ids=(1, 4),
        target_tap_kind="residual", mask_token_id=7, block_size=5, markov_rank=16,
    )  # fmt: skip
    drafter = DSparkDrafter(config)
    initialise(drafter, torch.Generator().manual_seed(0), "normal")
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2 and parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(
                0.02, rel=5 * (2 * parameter.numel()) ** -0.5
            ), name
    assert drafter.markov_head.markov_w2.weight.any()
    assert all(bool((p == 1).all()) for n, p in drafter.named_parameters() if "norm" in n)


def test_a_preset_lies_below_the_file_and_the_file_below_the_options(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  lr: 0.001\n  clip: 2.0\n")
    config = load_config(path, {"train.clip": 3.0}, preset="deepspec")
    assert config.train.lr == 1e-3  # the file's
    assert config.train.clip == 3.0  # the option's
    assert config.train.ce == 0.1  # the preset's
    assert config.train.rows_per_step == load_config().train.rows_per_step
