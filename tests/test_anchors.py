"""Anchors and labels against plain loops over positions, and against reported mistakes: a slot
trained on the turn separator, labels off by one, reads past the end of a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dspark.draft import Anchors, block_inputs, blocks, sample_anchors
from tests import oracles


def at(*positions: int) -> Anchors:
    """One row of valid anchors at these positions."""
    found = torch.tensor([positions])
    return Anchors(found, torch.ones_like(found, dtype=torch.bool))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_slots_past_the_end_of_a_turn_are_not_trained() -> None:
    """Assistant tokens 5..20, block 5, anchor 18: only the slots that predict 19 and 20."""
    ids = torch.arange(40)[None]
    mask = (ids >= 5) & (ids <= 20)
    found = blocks(ids, mask, at(18), 5)
    assert found.supervised[0, 0].tolist() == [True, True, False, False, False]
    assert found.labels[0, 0].tolist() == [19, 20, 21, 22, 23]
    assert found.labels[found.supervised].tolist() == [19, 20]
    assert found.prev[0, 0].tolist() == [18, 19, 20, 21, 22]


def test_positions_and_labels_around_anchors_up_to_the_end_of_a_row() -> None:
    """40 tokens, block 8, anchors 0, 20 and the last three legal ones."""
    ids = torch.arange(100, 140)[None]
    mask = torch.ones(1, 40, dtype=torch.bool)
    anchors = [0, 20, 36, 37, 38]
    found = blocks(ids, mask, at(*anchors), 8)
    for block, anchor in enumerate(anchors):
        slots = range(8)
        inside = [anchor + 1 + k < 40 for k in slots]
        assert found.supervised[0, block].tolist() == inside
        for k in slots:
            if inside[k]:
                assert found.labels[0, block, k] == 100 + anchor + 1 + k
                assert found.prev[0, block, k] == 100 + anchor + k
                assert found.rows[0, block, k] == anchor + k
    for values in (found.rows, found.labels - 100, found.prev - 100):
        assert (values >= 0).all()
        assert (values < 40).all()


def test_a_gap_in_the_mask_ends_a_block_for_good() -> None:
    ids = torch.arange(10)[None]
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1]])
    assert blocks(ids, mask, at(1), 6).supervised[0, 0].tolist() == [True, True, *[False] * 4]


def test_dummy_anchors_supervise_nothing() -> None:
    mask = torch.ones(1, 10, dtype=torch.bool)
    dummy = Anchors(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.bool))
    assert not blocks(torch.arange(10)[None], mask, dummy, 4).supervised.any()


@settings(max_examples=100, deadline=None)
@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=30),
    count=st.integers(1, 12),
    block=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_every_anchor_and_every_slot_obeys_the_rule(
    mask: list[bool], count: int, block: int, seed: int
) -> None:
    row = torch.tensor([mask])
    ids = torch.arange(len(mask))[None] + 50
    anchors = sample_anchors(row, count, generator(seed))
    legal = [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]
    chosen = anchors.positions[anchors.valid].tolist()
    assert anchors.positions.shape == (1, count)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(legal)
    assert len(chosen) == min(count, len(legal))
    assert anchors.valid[0].tolist() == [i < len(chosen) for i in range(count)]
    found = blocks(ids, row, anchors, block)
    for index, p in enumerate(chosen):
        for k in range(block):
            labels = range(p + 1, p + 2 + k)
            wanted = all(q < len(mask) and mask[q] for q in labels)
            assert found.supervised[0, index, k].item() == wanted
            if wanted:
                assert found.labels[0, index, k] == 50 + p + 1 + k
        assert found.supervised[0, index, 0]  # an anchor always has something to teach
    assert not found.supervised[~anchors.valid].any()


def test_the_first_generated_token_is_an_anchor_and_the_last_prompt_token_is_not() -> None:
    """At run time a response's first anchor is its first token, at position len(prompt)."""
    prompt, length = 6, 20
    mask = torch.arange(length)[None] >= prompt
    anchors = sample_anchors(mask, length, generator())
    assert anchors.positions[anchors.valid].tolist() == list(range(prompt, length - 1))


def test_rows_with_nothing_to_learn_get_dummies_only() -> None:
    mask = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1]])
    anchors = sample_anchors(mask, 3, generator())
    assert anchors.valid.tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    assert anchors.positions.tolist() == [[0, 0, 0], [0, 0, 0], [2, 0, 0]]


def test_anchors_are_uniform_without_replacement() -> None:
    """3 of 8 candidates in 4,000 rows: inclusion counts against 3/8, and all 56 subsets alike."""
    rows = 4000
    mask = torch.zeros(rows, 12, dtype=torch.bool)
    mask[:, 2:11] = True
    anchors = sample_anchors(mask, 3, generator(7))
    assert anchors.valid.all()
    code = (1 << anchors.positions).sum(1)
    _, seen = code.unique(return_counts=True)
    assert len(seen) == 56
    assert stats.chisquare(seen.numpy()).pvalue > 1e-4


def test_the_draw_depends_on_the_generator_alone() -> None:
    mask = torch.ones(2, 50, dtype=torch.bool)
    first = sample_anchors(mask, 8, generator(3))
    torch.manual_seed(99)
    assert torch.equal(first.positions, sample_anchors(mask, 8, generator(3)).positions)
    assert not torch.equal(first.positions, sample_anchors(mask, 8, generator(4)).positions)


def test_block_inputs_are_the_anchor_then_masks() -> None:
    assert block_inputs(torch.tensor([[3], [4]]), 4, 9).tolist() == [[[3, 9, 9, 9]], [[4, 9, 9, 9]]]


@pytest.mark.oracle
def test_supervision_equals_nemo_on_random_masks() -> None:
    common = oracles.require("nemo_automodel.components.speculative.dspark.common")
    mask = (torch.rand(6, 40, generator=generator(1)) < 0.8).long()
    ids = torch.randint(500, mask.shape, generator=generator(2))
    anchors = sample_anchors(mask, 12, generator(5))
    found = blocks(ids, mask, anchors, 7)
    label_rows = anchors.positions[..., None] + 1 + torch.arange(7)
    theirs = common.build_eval_mask(
        seq_len=40,
        loss_mask=mask,
        label_indices=label_rows,
        safe_label_indices=label_rows.clamp(max=39),
        block_keep_mask=anchors.valid,
    )
    assert torch.equal(found.supervised, theirs)
    legal = common.build_anchor_candidate_mask(seq_len=40, loss_mask=mask)
    everything = sample_anchors(mask, 40, generator(6))
    ours = torch.zeros(6, 40, dtype=torch.bool).scatter(1, everything.positions, everything.valid)
    ours[:, 0] = ((everything.positions == 0) & everything.valid).any(1)  # dummies sit at 0
    assert torch.equal(ours[:, :39], legal)
