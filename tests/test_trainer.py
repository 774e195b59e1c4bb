"""One optimiser step: what it divides by, what it refuses, and that it learns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.distill import trainer as trainer_module
from dspark.distill.batches import Batch, Schedule, deal, make_batch
from dspark.distill.chat import TrainingRow
from dspark.distill.evaluate import Decoded, count_rounds, decode_held_out, disagreement
from dspark.distill.loss import LossSums
from dspark.distill.objective import batch_sums, objective, report, zero_sums
from dspark.distill.optim import Optimiser, learning_rate
from dspark.distill.settings import EvalSettings
from dspark.distill.taps import BadFeatures, target_features
from dspark.distill.train_settings import TrainSettings
from dspark.distill.trainer import NonFinite, Trainer
from dspark.draft.anchors import blocks
from dspark.runtime.records import RoundRecord
from dspark.taps import TapSet
from tests.distill_setup import ALONE, SETTINGS, drafter, rows, same, trainer, weights
from tests.tolerance import assert_close
from tests.toy_target import ToyTarget


def gradient_of_a_step(made: Trainer, step: int = 0) -> Tensor:
    """The normalised gradient, before the optimiser uses it."""
    seen: list[Tensor] = []
    made.optimiser.step = lambda lr: seen.append(made.optimiser.gradients.buffer.clone())  # type: ignore[method-assign]
    made.run_step(step)
    return seen[0]


# --- learning -----------------------------------------------------------------------------------


def test_loss_falls_and_acceptance_rises_towards_a_learnable_target() -> None:
    # The toy's next token depends on the last one only (reach 1), which the markov head can hold.
    target = ToyTarget(vocab_size=24, reach=1)
    made = trainer(
        target=target, training_rows=rows(target, 32), epochs=16, rows_per_step=8, micro_rows=8,
        lr=2e-2, anchors=16,
    )  # fmt: skip
    held_out = rows(target, 40)[32:]
    before = made.measure(held_out)
    for step in range(made.schedule.total_steps):
        made.run_step(step)
    after = made.measure(held_out)
    assert after["loss"] < 0.75 * before["loss"]
    assert after["accepted_length"] > before["accepted_length"] + 0.5
    assert after["acceptance"][0] > before["acceptance"][0] + 0.2

    # What was learned is what decoding gets: same prompts, real rounds at temperature 1.
    settings = EvalSettings(temperatures=(1.0,), draft_length=4, max_new_tokens=40)
    prompts = [list(row.ids[:8]) for row in held_out]
    [decoded] = decode_held_out(target, made.drafter, prompts, settings, seed=0, processes=ALONE)
    assert decoded.rounds > 30
    assert decoded.accepted_length == pytest.approx(after["accepted_length"], rel=0.2)
    assert disagreement([decoded], after["accepted_length"]) is None


def test_losing_acceptance_in_real_decoding_is_called_out() -> None:
    target = ToyTarget(vocab_size=24, reach=1)
    settings = EvalSettings(temperatures=(1.0,), draft_length=4, max_new_tokens=12)
    [decoded] = decode_held_out(
        target, drafter(target), [[3, 4, 5, 6]], settings, seed=0, processes=ALONE
    )
    assert decoded.accepted_length is not None
    warning = disagreement([decoded], 2 * decoded.accepted_length)
    assert warning is not None
    for cause in ("loss mask", "layer ids", "slot layout"):
        assert cause in warning


def test_what_was_not_measured_disagrees_with_nothing() -> None:
    """Held-out rows too short for an anchor have no teacher-forced length; no prompt, no rounds."""
    assert disagreement([Decoded(1.0, 9, 1.2, (0.2,))], None) is None
    assert disagreement([Decoded(1.0, 0, None, (None,))], 3.0) is None


def test_round_counts_give_the_published_definitions() -> None:
    def entry(verified: int, accepted: int, emitted: int) -> RoundRecord:
        return RoundRecord(verified, verified, accepted, emitted, 0, 0.0, 0.0, 0.0, (), ())

    # Accepted 2 of 3; 3 of 3; 0 of 3; an accepted end token after 1 (verified is cut there).
    rounds = [entry(3, 2, 3), entry(3, 3, 4), entry(3, 0, 1), entry(1, 1, 1)]
    seen, passed = count_rounds(rounds, 3).tolist()
    assert passed[0] / seen[0] == (3 + 4 + 1 + 1) / 4
    # C_1 = 3 of 4 rounds; C_2 of the two that got there and drafted on: 2 of 2; C_3: 1 of 2.
    assert (passed[1:], seen[1:]) == ([3, 2, 1], [4, 2, 2])


# --- the normaliser ------------------------------------------------------------------------------


def prescribed(per_token: Callable[[int], float]) -> Callable[..., LossSums]:
    """A loss of `per_token(row length)` for every supervised token, times a weight that is 1."""

    def sums(_target: Any, made: Any, batch: Batch, _settings: TrainSettings, *_: Any) -> LossSums:
        one = made.norm.weight.mean()
        total = zero_sums(made.config.block_size, torch.device("cpu"))
        ce, weight = torch.zeros_like(total.ce), torch.zeros_like(total.weight)
        for row, mask in zip(batch.valid, batch.loss_mask, strict=True):
            ce[0] += per_token(int(row.sum())) * int(mask.sum())
            weight[0] += int(mask.sum())
        return replace(total, objective=(ce * one).sum(), normaliser=weight.sum(), weight=weight)

    return sums


def uneven_rows() -> list[TrainingRow]:
    """1 and 9 supervised tokens, in rows of 4 and 12."""
    return [
        TrainingRow((5,) * 4, (False,) * 3 + (True,)),
        TrainingRow((6,) * 12, (False,) * 3 + (True,) * 9),
    ]


@pytest.mark.parametrize("micro_rows", [1, 2])
def test_a_token_counts_the_same_in_a_short_and_in_a_long_row(
    monkeypatch: pytest.MonkeyPatch, micro_rows: int
) -> None:
    monkeypatch.setattr(trainer_module, "batch_sums", prescribed({4: 2.0, 12: 1.0}.__getitem__))
    made = trainer(training_rows=uneven_rows(), rows_per_step=2, micro_rows=micro_rows, ce=1.0)
    gradient = gradient_of_a_step(made)
    [result] = [made.run_step(0)]
    logged = report(result.sums, objective(made.settings))["loss"]
    assert logged == pytest.approx((1 * 2.0 + 9 * 1.0) / 10)  # 1.1, the token mean; not 1.5
    # d(1.1 * mean(norm.weight)) / d(each of D entries)
    assert gradient.sum().item() == pytest.approx(1.1, rel=1e-6)


def test_gradients_do_not_depend_on_the_micro_batch_size() -> None:
    made = [trainer(rows_per_step=10, micro_rows=size) for size in (10, 4, 1)]
    whole, *parts = [gradient_of_a_step(one) for one in made]
    for part in parts:
        assert_close(part, whole, limit=1e-5, what="accumulated gradient")


def test_the_last_partial_window_has_its_own_denominator() -> None:
    # 10 rows in windows of 4: the third step holds 2 rows and is divided by their weight alone.
    target = ToyTarget()
    ten = rows(target, 10)
    made = trainer(target=target, training_rows=ten, rows_per_step=4)
    assert made.schedule.steps_per_epoch == 3
    _, last = made.schedule.step_rows(2)
    assert len(last) == 2
    batch = make_batch(ten, last, anchors=SETTINGS.anchors, seed=SETTINGS.seed, epoch=0)
    sums = batch_sums(target, made.drafter, batch, SETTINGS)
    sums.loss().backward()
    expected = made.optimiser.gradients.buffer.clone()
    expected *= min(1.0, SETTINGS.clip / float(expected.norm()))
    assert_close(gradient_of_a_step(made, 2), expected, limit=1e-5)


def test_a_window_with_nothing_to_learn_changes_nothing() -> None:
    silent = [TrainingRow((4, 5, 6), (False, False, True))] * 4  # one supervised token: no anchor
    made = trainer(training_rows=silent)
    before = weights(made)
    result = made.run_step(0)
    assert float(result.sums.weight.sum()) == 0
    assert report(result.sums, objective(made.settings))["loss"] is None
    assert result.grad_norm == 0
    assert same(weights(made), before)
    assert not made.optimiser.state_tensors()


@pytest.mark.parametrize("detach", [True, False])
def test_the_confidence_gradient_reaches_the_backbone_only_where_it_may(detach: bool) -> None:
    def backbone(**changes: Any) -> dict[str, Tensor]:
        made = trainer(clip=1e9, **changes)
        gradient_of_a_step(made)
        named = made.drafter.named_parameters()
        return {n: p.grad.clone() for n, p in named if "confidence" not in n}  # type: ignore[union-attr]

    with_head = backbone(confidence=1.0, confidence_detach=detach)
    assert same(with_head, backbone(confidence=0.0)) is detach


# --- precision, faults ---------------------------------------------------------------------------


def test_bf16_compute_moves_norm_weights_because_masters_are_float32() -> None:
    made = trainer(epochs=50, lr=1e-3, precision="bf16", rows_per_step=4, anchors=2)
    for step in range(200):
        made.run_step(step)
    moved, total = 0, 0
    for name, parameter in made.drafter.named_parameters():
        assert parameter.dtype == torch.float32
        if "norm" in name:
            moved += int((parameter != 1.0).sum())
            total += parameter.numel()
    assert moved > 0.95 * total
    for name, tensor in made.optimiser.state_tensors().items():
        assert tensor.dtype == torch.float32, name


def test_half_precision_masters_are_refused() -> None:
    # 1,000 updates of 0.001 leave a bfloat16 weight of 1.0 where it was.
    weight = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(1000):
        weight += 0.001
    assert weight == 1.0
    with pytest.raises(TypeError, match="master weights must be float32"):
        Optimiser(drafter(ToyTarget()).bfloat16(), SETTINGS)


class Inject(ToyTarget):
    """A target whose states turn bad for rows that contain a given token sequence start."""

    def poison(self, ids: tuple[int, ...], name: str, value: float) -> None:
        self.bad, self.where, self.value = torch.tensor(ids), name, value

    def forward(self, tokens: Tensor, cache: Any, **options: Any) -> Any:
        output = super().forward(tokens, cache, **options)
        for b, row in enumerate(tokens):
            if torch.equal(row[: len(self.bad)], self.bad):
                getattr(output, self.where)[b, 3, 1] = self.value
        return output


@pytest.mark.parametrize("name", ["taps", "hidden"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_bad_target_state_stops_the_run_before_the_weights_change(
    name: str, value: float
) -> None:
    target = Inject()
    made = trainer(target=target)
    target.poison(made.rows[5].ids, name, value)
    for step in range(made.schedule.steps_per_epoch):
        before = weights(made)
        if 5 in made.schedule.step_rows(step)[1]:
            break
        made.run_step(step)
    with pytest.raises(NonFinite, match=rf"step {step + 1}: target {name} not finite in row 5 at "):
        made.run_step(step)
    assert same(weights(made), before)


def test_a_bad_parameter_and_a_bad_gradient_are_named() -> None:
    made = trainer()
    with torch.no_grad():
        made.drafter.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFinite, match=r"layers\.0\.mlp\.up_proj\.weight not finite; rows \["):
        made.run_step(0)

    made = trainer()
    before = weights(made)
    made.drafter.fc.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFinite, match=r"gradient of fc\.weight not finite; rows \["):
        made.run_step(0)
    assert same(weights(made), before)


def test_padding_of_the_target_never_reaches_the_drafter() -> None:
    class Dirty(ToyTarget):
        def forward(self, tokens: Tensor, cache: Any, **options: Any) -> Any:
            output = super().forward(tokens, cache, **options)
            if options["valid"] is not None:
                output.hidden[~options["valid"]] = math.nan
                output.taps[~options["valid"]] = math.nan
            return output

    mixed = [replace_length(row, 12 + i) for i, row in enumerate(rows(ToyTarget(), 4))]
    clean = gradient_of_a_step(trainer(training_rows=mixed, keep_gib=0))
    dirty = gradient_of_a_step(trainer(target=Dirty(), training_rows=mixed, keep_gib=0))
    assert torch.equal(clean, dirty)


def replace_length(row: TrainingRow, length: int) -> TrainingRow:
    return TrainingRow(row.ids[:length], row.loss_mask[:length])


def test_states_of_real_tokens_are_checked_by_name_and_place() -> None:
    target = Inject()
    data = rows(target, 3)
    target.poison(data[2].ids, "hidden", math.inf)
    batch = make_batch(data, [0, 2], anchors=4, seed=0, epoch=0)
    with pytest.raises(BadFeatures, match="hidden not finite in row 2 at position 3, channel 1"):
        target_features(target, batch, TapSet((0, 1), "residual"))


# --- schedules -----------------------------------------------------------------------------------


def test_learning_rate_is_continuous_and_never_above_its_peak() -> None:
    settings = TrainSettings(lr=6e-4, warmup=0.1)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert max(rates) == 6e-4
    assert rates.index(max(rates)) == 10  # where the cosine takes over
    steps = [abs(b - a) for a, b in itertools.pairwise(rates)]
    assert max(steps[:10]) == pytest.approx(6e-4 / 11)
    assert max(steps[10:]) < 6e-4 * math.pi / 2 / 90 * 1.001  # steepest slope of the cosine
    assert rates[0] > 0
    assert rates[-1] < 6e-4 * 1e-3
    assert learning_rate(100, 100, settings) == 0.0


def test_learning_rate_without_warm_up_starts_at_the_peak() -> None:
    settings = TrainSettings(lr=1.0, warmup=0.0)
    assert [learning_rate(step, 2, settings) for step in (0, 1)] == [1.0, 0.5]


def test_each_epoch_sees_every_row_once_in_an_order_of_its_own() -> None:
    schedule = Schedule(rows=10, rows_per_step=4, epochs=3, max_steps=None, seed=5)
    assert schedule.total_steps == 9
    orders = []
    for epoch in range(3):
        seen = []
        for step in range(3 * epoch, 3 * epoch + 3):
            at, chosen = schedule.step_rows(step)
            assert at == epoch
            seen += chosen
        assert sorted(seen) == list(range(10))
        orders.append(tuple(seen))
    assert len(set(orders)) == 3
    assert replace(schedule, max_steps=4).total_steps == 4


def test_steps_that_the_epochs_cannot_give_are_said() -> None:
    schedule = Schedule(rows=10, rows_per_step=4, epochs=3, max_steps=10, seed=5)
    assert schedule.total_steps == 9
    assert "not 10: 3 epochs" in schedule.shortfall
    assert [replace(schedule, max_steps=n).shortfall for n in (None, 4, 9)] == ["", "", ""]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("micro_rows", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_dealing_gives_every_process_equally_many_micro_batches(
    world: int, micro_rows: int, count: int
) -> None:
    lengths = {row: 10 + 7 * row % 5 for row in range(count)}
    dealt = [deal(range(count), lengths, micro_rows, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in dealt}) == 1
    flat = [row for batches in dealt for batch in batches for row in batch]
    assert sorted(flat) == list(range(count))
    assert all(len(batch) <= micro_rows for batches in dealt for batch in batches)


def test_anchors_depend_on_seed_epoch_and_row_only() -> None:
    data = rows(ToyTarget(), 6)

    def anchors(row_ids: list[int], epoch: int, seed: int = 0) -> dict[int, list[int]]:
        batch = make_batch(data, row_ids, anchors=4, seed=seed, epoch=epoch)
        return {
            row: positions.tolist()
            for row, positions in zip(batch.row_ids, batch.anchors.positions, strict=True)
        }

    together, alone = anchors([4, 1, 2], 3), anchors([2], 3)
    assert together[2] == alone[2]
    assert anchors([2], 3) != anchors([2], 4)
    assert anchors([2], 3) != anchors([2], 3, seed=1)


def test_a_batch_has_the_blocks_of_its_longest_row_and_no_more() -> None:
    data = [TrainingRow(tuple(range(n)), (False, *[True] * (n - 1))) for n in (4, 7, 9)]

    def anchors(row_ids: list[int], count: int) -> tuple[list[list[int]], list[list[bool]]]:
        found = make_batch(data, row_ids, anchors=count, seed=0, epoch=0).anchors
        return found.positions.tolist(), found.valid.tolist()

    # Of n tokens, all but the first are supervised, and all of those but the last are candidates.
    assert anchors([0, 1], 512) == (
        [[1, 2, 0, 0, 0], [1, 2, 3, 4, 5]],
        [[True, True, False, False, False], [True] * 5],
    )
    positions, valid = anchors([0, 2], 3)
    assert valid == [[True, True, False], [True] * 3]
    assert positions[0] == [1, 2, 0]


def test_a_batch_without_rows_has_nothing_to_learn() -> None:
    target = ToyTarget()
    made = trainer(target=target)
    batch = make_batch([], [], anchors=3, seed=0, epoch=0)
    assert not batch.anchors.valid.any()
    assert not blocks(batch.ids, batch.loss_mask, batch.anchors, 4).supervised.any()
    made.optimiser.gradients.zero()
    sums = batch_sums(target, made.drafter, batch, SETTINGS)
    loss = sums.objective
    assert loss.item() == 0
    assert loss.requires_grad
    loss.backward()
    assert made.optimiser.gradients.buffer.abs().max() == 0
