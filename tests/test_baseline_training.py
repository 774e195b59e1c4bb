"""Training of baselines: the same rows as a run, losses in closed form, folders that open again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.distill.answers import RunRows
from dspark.distill.batches import Batch, Schedule, make_batch
from dspark.draft.anchors import blocks
from dspark.errors import UserError
from dspark.files import atomic_write_json
from dspark.runtime.loading import LoadedTarget
from dspark_eval.baselines import __main__ as command
from dspark_eval.baselines import training
from dspark_eval.baselines.__main__ import main
from dspark_eval.baselines.dflash import DFlash, NoHead, without_head
from dspark_eval.baselines.eagle import EagleConfig, EagleModel
from dspark_eval.baselines.folders import (
    BASELINE_FILE,
    kind_of,
    load_eagle,
    open_baseline,
    save_dflash,
    save_eagle,
)
from dspark_eval.baselines.rows import RunData, read_run
from dspark_eval.equal_size import matched_width
from tests import distill_setup
from tests.toy_target import ToyTarget


def run_data(tmp_path: Path) -> RunData:
    """The toy's rows and settings, without a tokenizer, which only answering would need."""
    target = ToyTarget()
    loaded = LoadedTarget(target, None, tmp_path)  # type: ignore[arg-type]
    config = distill_setup.config(tmp_path, drafter__num_heads=4, drafter__num_kv_heads=2)
    rows = RunRows(tuple(distill_setup.rows(target)), (), "toy")
    return RunData(config, loaded, rows, distill_setup.ALONE)


def first_batch(data: RunData) -> Batch:
    settings = data.config.train
    return make_batch(
        data.rows.training, [0, 3, 5], anchors=settings.anchors, seed=settings.seed, epoch=0
    )


def target_logits(data: RunData, batch: Batch) -> Tensor:
    """[B, S, V] float64 of a plain pass."""
    target = data.loaded.target
    cache = target.new_cache(*batch.ids.shape)
    out = target.forward(batch.ids, cache, valid=batch.valid, commit=True)
    return target.logits(out.hidden).double()


def entropy(logits: Tensor) -> Tensor:
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def eagle(data: RunData) -> EagleModel:
    target, shape = data.loaded.target, data.config.drafter
    torch.manual_seed(0)
    return EagleModel(
        EagleConfig(
            hidden_size=target.hidden_size,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=48,
            vocab_size=target.vocab_size,
            target_layer_ids=(0, 2),
            target_tap_kind="residual",
            block_size=shape.block_size,
        )
    )


def test_eagle_loss_is_the_divergence_weighted_by_powers_of_0_8(tmp_path: Path) -> None:
    # states of zero make q uniform: KL(p || q) = log V - H(p)
    data = run_data(tmp_path)
    model, batch = eagle(data), first_batch(data)
    torch.nn.init.zeros_(model.norm.weight)
    summed, weight = training.EagleLoss(data, model)(batch)
    block = blocks(batch.ids, batch.loss_mask, batch.anchors, model.config.block_size)
    each = math.log(data.loaded.target.vocab_size) - entropy(target_logits(data, batch))
    at = each.gather(1, block.rows.flatten(1)).view(block.rows.shape)
    powers = 0.8 ** torch.arange(model.config.block_size)
    on = block.supervised.double()
    assert weight == pytest.approx(float((on * powers).sum()), rel=1e-6)
    assert float(summed.detach()) == pytest.approx(float((on * powers * at).sum()), rel=1e-5)


def test_ar_loss_is_the_divergence_where_the_target_wrote(tmp_path: Path) -> None:
    data = run_data(tmp_path)
    model, _ = training.train_ar(data, None)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # and with it the tied table: q is uniform
    batch = first_batch(data)
    summed, weight = training.ArLoss(data, model)(batch)
    written = batch.loss_mask[:, 1:]
    each = math.log(data.loaded.target.vocab_size) - entropy(target_logits(data, batch))
    assert weight == int(written.sum())
    assert float(summed.detach()) == pytest.approx(float(each[:, :-1][written].sum()), rel=1e-5)


def test_fit_takes_the_rows_that_the_run_took(tmp_path: Path) -> None:
    data = run_data(tmp_path)
    settings = data.config.train
    seen: list[tuple[int, ...]] = []
    module = torch.nn.Linear(1, 1, bias=False)

    def loss(batch: Batch) -> tuple[Tensor, float]:
        seen.append(batch.row_ids)
        return module.weight.sum() * 0 + 1.0, 1.0

    trained = training.fit(module, data, settings, loss)
    schedule = Schedule(
        len(data.rows.training), settings.rows_per_step, settings.epochs, settings.max_steps, 11
    )
    assert trained.steps == schedule.total_steps == 12
    assert [sorted(ids) for ids in seen] == [sorted(schedule.step_rows(s)[1]) for s in range(12)]


@pytest.mark.parametrize("kind", ["eagle3", "ar"])
def test_training_lowers_the_loss_and_a_seed_repeats(kind: str, tmp_path: Path) -> None:
    data = run_data(tmp_path)
    train = {"eagle3": training.train_eagle, "ar": training.train_ar}[kind]
    longer = RunData(
        data.changed({"train.epochs": 25, "train.lr": 3e-3}), data.loaded, data.rows, data.processes
    )
    one, short = train(data, None)
    two, again = train(data, None)
    assert short.loss == again.loss
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    _, long = train(longer, None)
    assert long.loss < 0.8 * short.loss


def test_a_head_of_nothing_stays_nothing() -> None:
    made = distill_setup.trainer(confidence=0.0)
    drafter = without_head(made.drafter)
    made = distill_setup.trainer(confidence=0.0)
    made.drafter.load_state_dict(drafter.state_dict())
    made.drafter.markov_head = drafter.markov_head
    before = made.drafter.layers[0].mlp.up_proj.weight.clone()
    for step in range(3):
        made.run_step(step)
    assert isinstance(made.drafter.markov_head, NoHead)
    assert not any(bool(table.any()) for table in made.drafter.markov_head.parameters())
    assert not torch.equal(before, made.drafter.layers[0].mlp.up_proj.weight)


def test_widths_are_matched_to_the_nearest_eight() -> None:
    # 1,000 + 30 w: 100,000 is nearest at w = 3,300 = 8 x 412.5
    assert matched_width(lambda w: 1000 + 30 * w, 100_000) in (3296, 3304)
    assert matched_width(lambda w: 1000 + 30 * w, 1000 + 30 * 64) == 64
    assert matched_width(lambda w: 1000 + 30 * w, 0) == 8


def test_folders_open_as_what_they_are(tmp_path: Path) -> None:
    data = run_data(tmp_path)
    target, model = data.loaded.target, eagle(data)
    save_eagle(tmp_path / "e", model, {"steps": 3})
    assert kind_of(tmp_path / "e") == "eagle3"
    loaded = load_eagle(tmp_path / "e", target)
    assert loaded.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True)
    )
    save_dflash(tmp_path / "d", without_head(distill_setup.drafter(target)), {})
    assert isinstance(open_baseline(tmp_path / "d", "dflash", target, None), DFlash)
    assert kind_of(tmp_path) is None


def test_what_does_not_fit_is_refused_in_a_line(tmp_path: Path) -> None:
    data = run_data(tmp_path)
    target, model = data.loaded.target, eagle(data)
    save_eagle(tmp_path / "e", model, {})
    atomic_write_json(tmp_path / "e" / BASELINE_FILE, {"kind": "medusa"})
    with pytest.raises(UserError, match="kind is 'medusa'; expected one of dflash, eagle3, ar"):
        kind_of(tmp_path / "e")
    (tmp_path / "e" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: missing"):
        load_eagle(tmp_path / "e", target)
    other = ToyTarget()
    other.vocab_size += 1
    with pytest.raises(UserError, match=r"vocab_size is .*use the drafter with the target"):
        load_eagle(tmp_path / "e", other)
    with pytest.raises(UserError, match="no run here"):
        read_run(tmp_path / "e")


def test_what_a_run_has_done_already_is_no_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are read back, not made: a change to them would be taken and do nothing."""
    words = ["train", str(tmp_path), "--kind", "eagle3", "--out", str(tmp_path / "out")]
    assert main([*words, "--set", "data.max_prompts=10"]) == 2
    assert "--set data.max_prompts: the run's target and rows" in capsys.readouterr().err
    assert main([*words, "--set", "train.lr=1e-3"]) == 2
    assert "no run here" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_repeats_to_the_bit_is_asked_for_as_distill_is(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    monkeypatch.setattr(command, "read_run", lambda run, device: run_data(tmp_path))
    monkeypatch.setattr(
        command,
        "train_baseline",
        lambda *given, **how: found.append(torch.are_deterministic_algorithms_enabled()),
    )
    words = ["train", str(tmp_path), "--kind", "ar", "--out", str(tmp_path / "out")]
    assert main([*words, "--set", f"train.deterministic={str(asked).lower()}"]) == 0
    assert found == [asked]
    assert not torch.are_deterministic_algorithms_enabled()
