"""Anchors by entropy: how often each is drawn, and that nothing but the row decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.distill.batches import Batch, make_batch
from dspark.distill.chat import TrainingRow
from dspark.distill.hardness import FLOOR, entropy, hard_anchors
from dspark.distill.objective import batch_sums
from dspark.draft.anchors import Anchors
from tests.distill_setup import SETTINGS, drafter, rows, same, trainer, weights
from tests.test_trainer import gradient_of_a_step
from tests.tolerance import assert_close
from tests.toy_target import ToyTarget

LOGITS = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)) * 3
MASK = (False, False, True, True, True, False, True, True, True)
CANDIDATES = [2, 3, 6, 7]


def draw(choice: str, epoch: int, count: int = 1) -> Anchors:
    """Anchors of a row whose state at position p is one-hot at p, so that LOGITS are its logits."""
    batch = make_batch(
        [TrainingRow(tuple(range(9)), MASK)], [0], anchors=count, seed=1, epoch=epoch, noise=True
    )
    return hard_anchors(batch, torch.eye(9)[None], lambda states: states @ LOGITS, choice, 2)


@pytest.mark.parametrize(("choice", "shift"), [("entropy", 0), ("after_entropy", -1)])
def test_candidates_are_drawn_in_proportion_to_their_entropy(choice: str, shift: int) -> None:
    draws = 1500
    counts = torch.zeros(9)
    for epoch in range(draws):
        anchors = draw(choice, epoch)
        assert anchors.valid.all()
        counts[anchors.positions[0, 0]] += 1
    p = LOGITS.double().softmax(-1)
    nats = -(p * p.log()).sum(-1)
    share = torch.stack([nats[c + shift] + FLOOR for c in CANDIDATES])
    share = share / share.sum()
    found = counts[CANDIDATES] / draws
    assert counts.sum() == counts[CANDIDATES].sum()
    # Five standard deviations of a binomial share.
    assert ((found - share).abs() < 5 * (share * (1 - share) / draws).sqrt()).all()
    assert (share.max() / share.min()) > 2


def test_all_candidates_when_there_are_no_more() -> None:
    anchors = draw("entropy", 0, count=6)
    assert anchors.positions.tolist() == [[2, 3, 6, 7]]
    assert anchors.valid.all()


def test_entropy_in_nats() -> None:
    logits = torch.stack((torch.zeros(8), torch.tensor([50.0] + [0.0] * 7)))
    expected = torch.tensor([8.0]).log()
    assert_close(entropy(logits)[:1], expected, limit=1e-6)
    assert entropy(logits)[1].item() == pytest.approx(0, abs=1e-6)
    assert entropy(logits.bfloat16()).dtype == torch.float32


def test_choice_depends_on_the_row_alone_and_is_another_each_epoch() -> None:
    target = ToyTarget()
    data = rows(target, 4)

    def positions(row_ids: list[int], epoch: int) -> dict[int, list[int]]:
        batch = make_batch(data, row_ids, anchors=4, seed=0, epoch=epoch, noise=True)
        hidden = trainer(target=target, training_rows=data).source(batch).hidden  # type: ignore[misc]
        anchors = hard_anchors(batch, hidden, target.logits, "entropy", 100)
        return dict(zip(row_ids, anchors.positions.tolist(), strict=True))

    assert positions([2, 0, 3], 1)[0] == positions([0], 1)[0]
    assert positions([0], 1) != positions([0], 2)


@pytest.mark.parametrize("choice", ["entropy", "after_entropy"])
def test_training_uses_it_whatever_the_micro_batch(choice: str) -> None:
    made = [
        trainer(rows_per_step=8, micro_rows=size, anchor_choice=choice, anchors=3)
        for size in (8, 3)
    ]
    first, second = [gradient_of_a_step(one) for one in made]
    assert_close(second, first, limit=1e-5)
    uniform = gradient_of_a_step(trainer(rows_per_step=8, micro_rows=8, anchors=3))
    assert (uniform - first).norm() > 0.01 * first.norm()


def test_held_out_rows_are_measured_at_uniform_anchors() -> None:
    plain, hard = trainer(anchors=3), trainer(anchors=3, anchor_choice="entropy")
    held_out = rows(ToyTarget(), 24)[16:]
    assert plain.measure(held_out) == hard.measure(held_out)
    for made in (plain, hard):
        made.run_step(0)
    assert not same(weights(plain), weights(hard))


def test_rows_without_an_anchor_stay_without() -> None:
    target = ToyTarget()
    settings = replace(SETTINGS, anchor_choice="entropy")
    silent = [TrainingRow((4, 5, 6), (False, False, True))]
    for data, ids in ((silent, [0]), ([], [])):
        batch: Batch = make_batch(data, ids, anchors=3, seed=0, epoch=0, noise=True)
        sums = batch_sums(target, drafter(target), batch, settings)
        assert sums.objective.item() == 0
        assert sums.blocks == 0
        noise: Tensor | None = batch.noise
        assert noise is not None
        assert noise.shape == batch.ids.shape
