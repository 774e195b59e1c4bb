"""Target states kept in memory: the numbers of the online path, computed once, within a budget."""

from __future__ import annotations

import pytest
import torch

from dspark.distill.batches import Batch, make_batch
from dspark.distill.chat import TrainingRow
from dspark.distill.taps import BadFeatures, KeptFeatures, target_features
from dspark.runtime.k3_target import K3Target
from dspark.taps import TapSet
from tests.distill_setup import same, trainer, weights
from tests.k3_tiny import tiny_model
from tests.tolerance import assert_close

TAPS = TapSet((0, 2), "attn_res_mixture")
LENGTHS = (9, 30, 17)


@pytest.fixture(scope="module")
def target() -> K3Target:
    return K3Target(tiny_model(), "tiny", (1,))


def training_rows(target: K3Target) -> list[TrainingRow]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        ids = torch.randint(0, target.vocab_size, (length,), generator=generator).tolist()
        made.append(TrainingRow(tuple(ids), (False,) * 4 + (True,) * (length - 4)))
    return made


def batch_of(target: K3Target, row_ids: list[int]) -> Batch:
    return make_batch(training_rows(target), row_ids, anchors=3, seed=0, epoch=0)


def counting(target: K3Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of the passes that the target is asked for from now on."""
    seen: list[int] = []
    forward = target.forward

    def spy(tokens: torch.Tensor, *args: object, **kwargs: object) -> object:
        seen.append(tokens.shape[1])
        return forward(tokens, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "forward", spy)
    return seen


def test_kept_states_are_those_of_the_padded_pass(target: K3Target) -> None:
    batch = batch_of(target, [0, 1, 2])
    kept = KeptFeatures(target, TAPS, 2**30)(batch)
    online = target_features(target, batch, TAPS)
    assert_close(kept.taps, online.taps)
    assert_close(kept.hidden, online.hidden)
    assert not kept.taps[~batch.valid].any()


def test_a_row_is_computed_once_whatever_batch_it_comes_in(
    target: K3Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counting(target, monkeypatch)
    source = KeptFeatures(target, TAPS, 2**30)
    first = source(batch_of(target, [0, 1]))
    again = source(batch_of(target, [2, 0]))
    assert seen == [9, 30, 17]
    assert torch.equal(first.taps[0, :9], again.taps[1, :9])


def test_beyond_the_budget_rows_are_computed_again_to_the_same_bits(
    target: K3Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    # room for row 1 alone, but row 0 comes first and takes a part of it
    budget = LENGTHS[1] * (len(TAPS.layer_ids) + 1) * target.hidden_size * 4
    seen = counting(target, monkeypatch)
    source = KeptFeatures(target, TAPS, budget)
    first, second = source(batch_of(target, [0, 1])), source(batch_of(target, [1, 0]))
    assert seen == [9, 30, 30]  # row 0 is kept, row 1 no longer fits
    assert torch.equal(first.taps[1], second.taps[0])


def test_a_micro_batch_without_rows_and_a_bad_state(target: K3Target) -> None:
    empty = KeptFeatures(target, TAPS, 2**30)(batch_of(target, []))
    assert not empty.taps.any()
    weight = target.model.model.embed_tokens.weight
    batch = batch_of(target, [1])
    token = int(batch.ids[0, 5])
    kept, weight[token] = weight[token].clone(), torch.inf
    try:
        with pytest.raises(BadFeatures, match="row 1 at position"):
            KeptFeatures(target, TAPS, 2**30)(batch)
    finally:
        weight[token] = kept


def test_training_with_kept_states_does_not_depend_on_the_micro_batch_size() -> None:
    """Two epochs: the second one reads what the first one kept."""
    made = [trainer(epochs=2, micro_rows=size, keep_gib=1.0) for size in (4, 1)]
    for one in made:
        for step in range(one.schedule.total_steps):
            one.run_step(step)
    online = trainer(epochs=2, keep_gib=0)
    for step in range(online.schedule.total_steps):
        online.run_step(step)
    for name, value in weights(made[0]).items():
        assert_close(value, weights(made[1])[name])
        assert_close(value, weights(online)[name])
    assert not same(weights(made[0]), weights(trainer(epochs=2)))  # it did train
