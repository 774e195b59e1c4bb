"""`drafter.init_from`: the weights of another drafter, if they mean the same here."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.distill.run import run_distill
from dspark.distill.settings import DrafterSettings
from dspark.distill.warm import _completed
from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.record import TargetRecord
from dspark.draft.shapes import KDAShape, MLAShape, Yarn
from dspark.draft.start import initialise
from dspark.errors import UserError
from tests.distill_setup import same
from tests.test_distill_run import distill, prompt_file, settings, target_folder  # noqa: F401


@pytest.fixture(scope="module")
def runs(
    target_folder: Path,  # noqa: F811
    prompt_file: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """`make(name, **changes)`: the configuration of a run in its own folder."""
    root = tmp_path_factory.mktemp("runs")

    def make(name: str, **changes: Any) -> Any:
        return settings(target_folder, prompt_file, root / name, **changes)

    return make


@pytest.fixture(scope="module")
def donor(runs: Any) -> Path:
    """A drafter trained for a step, then given what no setting names: other rotary bases."""
    config = runs("donor", train__max_steps=1, train__seed=9)
    run_distill(config)
    trained = load_drafter(Path(config.out.dir))
    changed = replace(
        trained.config,
        rope_theta=50_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=131_072,
        target=TargetRecord("somewhere/else"),
    )
    drafter = DSparkDrafter(changed)
    drafter.load_state_dict(trained.state_dict())
    folder = Path(config.out.dir).parent / "given"
    save_drafter(folder, drafter)
    return folder


# Adam moves every weight by about the rate: with this one, not at all.
STILL = {"train__max_steps": 1, "train__lr": 1e-30}


def test_training_starts_with_the_weights_that_are_given(runs: Any, donor: Path) -> None:
    config = runs("still", drafter__init_from=str(donor), **STILL)
    distill(config)
    ours, theirs = load_drafter(Path(config.out.dir)), load_drafter(donor)
    assert same(ours.state_dict(), theirs.state_dict())
    assert ours.config.rope_theta == 50_000.0
    assert ours.config.rms_norm_eps == 1e-6
    assert ours.config.max_position_embeddings == 131_072
    assert ours.config.target is not None
    assert ours.config.target.name == config.target.name  # this run's, not the donor's
    fresh = runs("fresh", **STILL)
    distill(fresh)
    assert not same(load_drafter(Path(fresh.out.dir)).state_dict(), theirs.state_dict())


def test_a_shorter_block_may_start_from_a_longer_one(runs: Any, donor: Path) -> None:
    config = runs(
        "short", drafter__init_from=str(donor), drafter__block_size=2, eval__draft_length=2, **STILL
    )
    distill(config)
    assert load_drafter(Path(config.out.dir)).config.block_size == 2


def test_a_resumed_run_does_not_read_it_again(
    runs: Any, donor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    shutil.copytree(donor, given)
    whole = runs("whole", drafter__init_from=str(given))
    distill(whole)
    cut = runs("cut", drafter__init_from=str(given))
    from dspark.distill.trainer import Trainer

    step = Trainer.run_step

    def stop(trainer: Trainer, number: int) -> Any:
        trainer.stop_requested = number == 3
        return step(trainer, number)

    monkeypatch.setattr(Trainer, "run_step", stop)
    with pytest.raises(KeyboardInterrupt):
        distill(cut)
    monkeypatch.undo()
    shutil.rmtree(given)
    distill(cut, resume=True)
    ours, theirs = (load_drafter(Path(c.out.dir)) for c in (cut, whole))
    assert same(ours.state_dict(), theirs.state_dict())
    assert ours.config == theirs.config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter__num_layers": 2}, "num_layers is 1 there, 2 here"),
        (
            {"drafter__markov_rank": 16, "drafter__intermediate_size": 64},
            "intermediate_size is 32 there, 64 here; markov_rank is 8 there, 16 here. Set the",
        ),
        # The same tensors, cut into other heads.
        (
            {"drafter__num_heads": 4, "drafter__num_kv_heads": 2, "drafter__head_dim": 8},
            "num_attention_heads is 2 there, 4 here; num_key_value_heads is 1 there, 2 here; head",
        ),
        ({"drafter__tap_ids": [0, 1]}, "target_layer_ids is"),
        ({"train__confidence": 0.0}, "enable_confidence_head is True there, False here"),
        ({"drafter__yarn_factor": 4.0}, "yarn is None there, Yarn(factor=4.0"),
    ],
)
def test_another_shape_is_refused_by_its_keys(
    runs: Any, donor: Path, changes: dict[str, Any], message: str
) -> None:
    config = runs("refused", drafter__init_from=str(donor), **changes)
    with pytest.raises(UserError) as caught:
        distill(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path(config.out.dir).exists()


def test_what_the_loader_refuses_is_refused(runs: Any, donor: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        distill(runs("refused", drafter__init_from=str(tmp_path / "absent")))
    other = tmp_path / "other"
    shutil.copytree(donor, other)
    content = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(content | {"num_target_layers": 99}))
    with pytest.raises(UserError, match="num_target_layers is 99, the target"):
        distill(runs("refused", drafter__init_from=str(other)))


def test_null_leaves_the_choice_to_the_folder(runs: Any, donor: Path, tmp_path: Path) -> None:
    config = replace(load_drafter(donor).config, target_layer_ids=(0, 1), mask_token_id=3)
    drafter = DSparkDrafter(config)
    initialise(drafter, torch.Generator().manual_seed(1))
    save_drafter(tmp_path / "given", drafter)
    run = runs("null", drafter__init_from=str(tmp_path / "given"), **STILL)
    distill(run)
    made = load_drafter(Path(run.out.dir)).config
    assert (made.target_layer_ids, made.mask_token_id) == ((0, 1), 3)


def test_what_no_key_names_comes_from_the_folder(runs: Any, donor: Path, tmp_path: Path) -> None:
    config = replace(load_drafter(donor).config, block_causal="all", yarn=Yarn(2.0, 64))
    drafter = DSparkDrafter(config)
    initialise(drafter, torch.Generator().manual_seed(1))
    save_drafter(tmp_path / "given", drafter)
    run = runs("causal", drafter__init_from=str(tmp_path / "given"), **STILL)
    distill(run)
    made = load_drafter(Path(run.out.dir)).config
    assert (made.block_causal, made.yarn) == ("all", Yarn(2.0, 64))
    card = (Path(run.out.dir) / "README.md").read_text()
    assert f"| started with | the weights of `{tmp_path / 'given'}` |" in card


def _as_saved(config: DraftConfig, **changes: Any) -> DraftConfig:
    """What a run whose own shape is `config` starts as, from a folder that says `changes`."""
    return _completed(config, replace(config, **changes), DrafterSettings())


def test_parts_of_a_backbone_that_no_key_names_come_along() -> None:
    mla = DraftConfig(
        hidden_size=16, num_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, vocab_size=20, num_target_layers=4, target_layer_ids=(0,),
        target_tap_kind="residual", mask_token_id=1, backbone="mla", mla=MLAShape(4, 4, 8, 4, 8),
    )  # fmt: skip
    gated = replace(mla.mla, rope=False, output_gate=True)
    assert _as_saved(mla, mla=gated).mla == gated
    assert _as_saved(mla, mla=replace(gated, q_lora_rank=9)).mla == gated  # that has a key
    kda = replace(mla, backbone="kda", mla=None, kda=KDAShape())
    assert _as_saved(kda, kda=KDAShape(gate_lower_bound=-2.0)).kda.gate_lower_bound == -2.0
