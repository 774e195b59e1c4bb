"""What must hold for every softmax backbone: training equals drafting, a context equals its own
recomputation however it was cut, and nothing at or after an anchor is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.draft import DraftConfig, DSparkDrafter
from dspark.draft.shapes import KDAShape
from tests.tiny_drafters import CASES, FULL, TAP_WIDTH, draft, make_drafter, train_blocks
from tests.tolerance import assert_close

G, D = FULL.block_size, FULL.hidden_size
every_case = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


@every_case
def test_training_pass_equals_incremental_drafting(config: DraftConfig) -> None:
    drafter = make_drafter(config)
    features = torch.randn(2, 40, TAP_WIDTH)
    # Anchors close together, at the start, inside and outside of a window, at the last position.
    anchors = [[0, 1, 6, 20, 39], [2, 5, 7, 31, 32]]
    embeds = torch.randn(2, 5, G, D)
    trained = train_blocks(drafter, features, embeds, anchors)
    for row, positions in enumerate(anchors):
        for block, anchor in enumerate(positions):
            drafted = draft(drafter, features[row : row + 1, :anchor], embeds[row : row + 1, block])
            assert_close(drafted[0], trained[row, block], limit=1e-5, what=f"anchor {anchor}")


@every_case
def test_both_passes_agree_in_float64_to_its_own_precision(config: DraftConfig) -> None:
    """What is left in float32 is rounding: it shrinks with the precision."""
    drafter = make_drafter(config).double()
    features = torch.randn(1, 24, TAP_WIDTH, dtype=torch.float64)
    embeds = torch.randn(1, 2, G, D, dtype=torch.float64)
    trained = train_blocks(drafter, features, embeds, [[3, 24 - 1]])
    for block, anchor in enumerate((3, 23)):
        drafted = draft(drafter, features[:, :anchor], embeds[:, block])
        assert_close(drafted, trained[:, block], limit=1e-12)


KDA = replace(
    FULL, backbone="kda", num_key_value_heads=FULL.num_attention_heads, kda=KDAShape(gate_rank=4)
)
COUNTS = st.lists(st.tuples(st.integers(0, G + 1), st.integers(0, G + 1)), min_size=1, max_size=9)


@every_case
@settings(max_examples=12, deadline=None)
@given(prefill=st.integers(0, 15), rounds=COUNTS)
def test_a_context_equals_its_recomputation_after_any_accept_counts(
    config: DraftConfig, prefill: int, rounds: list[tuple[int, int]]
) -> None:
    """Two rows that advance differently, with rejected rows behind the accepted ones."""
    drafter = _cached(config)
    generator = torch.Generator().manual_seed(prefill)
    features = torch.randn(2, 80, TAP_WIDTH, generator=generator)
    embeds = torch.randn(2, G, D, generator=generator)
    context = drafter.new_context(2, 72)
    if prefill:
        drafter.extend(context, features[:, :prefill])
    for counts in rounds:
        drafter.block_hidden(embeds.flip(0), context)  # what a draft leaves must not matter
        at = context.row_lengths
        rows = torch.stack([features[b, at[b] : at[b] + G + 1] for b in range(2)])
        for b, count in enumerate(counts):
            rows[b, count:] = torch.nan  # rejected: whatever the target left there
        drafter.extend(context, rows, torch.tensor(counts))
    drafted = drafter.block_hidden(embeds, context)
    for b in range(2):
        length = context.row_lengths[b]
        alone = draft(drafter, features[b : b + 1, :length], embeds[b : b + 1], 72)
        assert_close(drafted[b], alone[0], limit=1e-5, what=f"row {b} of length {length}")


@pytest.mark.parametrize("config", [*CASES.values(), KDA], ids=[*CASES, "kda"])
def test_a_rejected_row_that_is_not_finite_reaches_nothing(config: DraftConfig) -> None:
    """Its batch row is short, another fills the buffers: a mask alone would leave 0 * NaN."""
    drafter = make_drafter(config)
    features, embeds = torch.randn(2, 16, TAP_WIDTH), torch.randn(2, G, D)
    counts = torch.tensor([16, 2])
    clean, dirty = drafter.new_context(2, 16), drafter.new_context(2, 16)
    drafter.extend(clean, features, counts)
    features[1, 2:] = torch.nan
    drafter.extend(dirty, features, counts)
    drafted = drafter.block_hidden(embeds, dirty)
    assert drafted.isfinite().all()
    assert_close(drafted, drafter.block_hidden(embeds, clean), limit=1e-6)


@every_case
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 14), min_size=1, max_size=5))
def test_how_a_single_text_was_cut_does_not_matter(config: DraftConfig, cuts: list[int]) -> None:
    """One row takes the path of slices: pieces longer than a window, and ones that wrap."""
    drafter = _cached(config)
    generator = torch.Generator().manual_seed(len(cuts))
    features = torch.randn(1, sum(cuts), TAP_WIDTH, generator=generator)
    embeds = torch.randn(1, G, D, generator=generator)
    context = drafter.new_context(1, sum(cuts))
    start = 0
    for piece in cuts:
        drafter.block_hidden(embeds + 1, context)
        drafter.extend(context, features[:, start : start + piece])
        start += piece
    alone = draft(drafter, features, embeds, 200)
    assert_close(drafter.block_hidden(embeds, context), alone, limit=1e-5)


@every_case
def test_features_at_or_after_the_anchor_leave_a_block_bit_identical(config: DraftConfig) -> None:
    drafter = make_drafter(config)
    anchors, features = [[20, 23, 40]], torch.randn(1, 48, TAP_WIDTH)
    embeds = torch.randn(1, 3, G, D)
    before = train_blocks(drafter, features, embeds, anchors)
    for block, anchor in enumerate(anchors[0]):
        changed = features.clone()
        changed[:, anchor:] = 50 * torch.randn_like(changed[:, anchor:])
        after = train_blocks(drafter, changed, embeds, anchors)
        assert torch.equal(before[:, block], after[:, block])
        changed = features.clone()
        changed[:, anchor - 1] += 1.0  # the last position a block does see
        after = train_blocks(drafter, changed, embeds, anchors)
        assert not torch.equal(before[:, block], after[:, block])


@every_case
def test_blocks_do_not_see_each_other_even_within_one_group(config: DraftConfig) -> None:
    drafter = make_drafter(config)
    features, embeds = torch.randn(1, 32, TAP_WIDTH), torch.randn(1, 20, G, D)
    anchors = [list(range(5, 25))]  # more than one attention group
    before = train_blocks(drafter, features, embeds, anchors)
    embeds[:, 3] += 1.0
    after = train_blocks(drafter, features, embeds, anchors)
    same = (before == after).all(-1).all(-1)[0]
    assert same.tolist() == [block != 3 for block in range(20)]


@every_case
def test_padding_and_dummy_anchors_contribute_exactly_nothing(config: DraftConfig) -> None:
    drafter = make_drafter(config)
    features, embeds = torch.randn(3, 20, TAP_WIDTH), torch.randn(3, 3, G, D)
    valid = torch.ones(3, 20, dtype=torch.bool)
    valid[0, 12:], valid[2] = False, False
    anchors = torch.tensor([[3, 11, 0], [6, 19, 0], [0, 0, 0]])
    in_use = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]]).bool()
    poisoned = features.masked_fill(~valid[..., None], torch.nan)
    embeds.requires_grad_(True)
    hidden = drafter.train_hidden(poisoned, valid, embeds, anchors, in_use)
    assert torch.isfinite(hidden).all()
    assert (hidden[~in_use] == 0).all()
    hidden.sum().backward()
    assert (embeds.grad[~in_use] == 0).all()
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None)
    alone = train_blocks(drafter, features[:1, :12], embeds[:1, :2], [[3, 11]])
    assert_close(hidden[0, :2], alone[0], limit=1e-5)


@every_case
def test_every_weight_of_a_layer_is_trained_and_drafted_with(config: DraftConfig) -> None:
    """Each one gets a gradient, and a change to it in place reaches the next context's draft."""
    drafter = make_drafter(config)
    features, embeds = torch.randn(1, 12, TAP_WIDTH), torch.randn(1, 1, G, D)
    train_blocks(drafter, features, embeds, [[9]]).square().sum().backward()
    before = draft(drafter, features, embeds[0])
    for name, parameter in drafter.layers.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).float().mean() > 0.95, name
        with torch.no_grad():
            parameter.mul_(1.25)
        changed = draft(drafter, features, embeds[0])
        assert not torch.equal(before, changed), name
        before = changed


@every_case
def test_one_precision_throughout_in_bfloat16(config: DraftConfig) -> None:
    drafter = make_drafter(config)
    features, embeds = torch.randn(1, 14, TAP_WIDTH), torch.randn(1, G, D)
    reference = draft(drafter, features, embeds)
    drafter.to(torch.bfloat16)
    drafted = draft(drafter, features, embeds)
    assert drafted.dtype == torch.bfloat16
    # Two layers of bf16 products: a few units of 2^-8 relative to the largest value.
    assert (drafted.float() - reference).abs().max() < 0.08 * reference.abs().max()


@every_case
def test_far_positions_work_beyond_any_configured_maximum(config: DraftConfig) -> None:
    drafter = make_drafter(config)
    assert config.max_position_embeddings < 5000
    features, embeds = torch.randn(1, 5001, TAP_WIDTH), torch.randn(1, 1, G, D)
    trained = train_blocks(drafter, features, embeds, [[5001]])
    assert_close(draft(drafter, features, embeds[:, 0], 5001), trained[:, 0], limit=1e-5)


_DRAFTERS: dict[DraftConfig, DSparkDrafter] = {}


def _cached(config: DraftConfig) -> DSparkDrafter:
    """hypothesis runs a test many times; its drafter never changes."""
    if config not in _DRAFTERS:
        _DRAFTERS[config] = make_drafter(config)
    return _DRAFTERS[config]


def test_an_order_that_its_block_does_not_have_is_refused() -> None:
    assert replace(KDA, kda=KDAShape(order=G - 1)).kda == KDAShape(order=G - 1)
    with pytest.raises(ValueError, match=r"^kda\.order: "):
        replace(KDA, kda=KDAShape(order=G))
