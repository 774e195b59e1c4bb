"""The drafter against an independent implementation, against itself, and against what must not
matter: features at or after the anchor, other blocks, padding, how a text was cut into rounds."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from dspark.draft import DraftConfig, DSparkDrafter, block_inputs, default_tap_ids
from dspark.draft.heads import ConfidenceHead
from tests import oracles
from tests.tiny_drafters import FULL, TAP_WIDTH
from tests.tolerance import assert_close

SMALL = replace(FULL, block_size=8)


def make_drafter(config: DraftConfig = SMALL) -> DSparkDrafter:
    """A drafter whose weights are large enough that every term shows in its output."""
    drafter = DSparkDrafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * noise)
    return drafter


def run_incrementally(
    drafter: DSparkDrafter, features: torch.Tensor, embeds: torch.Tensor, cuts: list[int]
) -> torch.Tensor:
    """Hidden states of one block [1, G, D] after a context that arrived in the given pieces."""
    context = drafter.new_context(1, 80)
    start = 0
    for piece in cuts:
        # The rows a verify pass rejected follow the accepted ones and must be ignored.
        rows = torch.cat((features[:, start : start + piece], torch.randn(1, 3, TAP_WIDTH)), 1)
        drafter.extend(context, rows, piece)
        start += piece
    assert context.row_lengths == [start]
    return drafter.block_hidden(embeds, context)


@pytest.mark.oracle
@pytest.mark.parametrize("anchors", [[0, 1, 20, 31], [5, 6, 7, 30]])
def test_hidden_states_logits_and_confidence_equal_speculators(
    anchors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = oracles.require("speculators.models.dspark.core")
    dflash = oracles.require("speculators.models.dflash.core")
    drafter = make_drafter()
    oracle = _speculators_twin(core, drafter)
    length, slots = 40, SMALL.block_size
    features, ids = torch.randn(1, length, TAP_WIDTH), torch.randint(120, (1, length))
    positions = torch.tensor([anchors])
    everywhere = torch.ones_like(positions, dtype=torch.bool)
    monkeypatch.setattr(
        dflash, "select_anchors", lambda *_, **__: (positions[0], everywhere[0]), raising=True
    )
    with torch.no_grad():
        hidden, logits, *_ = oracle._backbone_forward(
            features,
            ids,
            torch.ones(1, length),
            torch.randn(1, length, SMALL.hidden_size),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=len(anchors),
        )
        inputs = block_inputs(ids[:, anchors], slots, SMALL.mask_token_id)
        valid = torch.ones(1, length, dtype=torch.bool)
        ours = drafter.train_hidden(
            features, valid, oracle.embed_tokens(inputs), positions, everywhere
        )
        prev = torch.stack([ids[0, p : p + slots] for p in anchors])[None]
        confidence = oracle.confidence_head(
            torch.cat((ours[0], oracle.markov_head.prev_embeddings(prev[0])), -1)
        )
        bias = oracle.markov_head.block_bias(prev_token_ids=prev[0], hidden_states=ours[0])
        our_logits = oracle.lm_head(ours) + drafter.markov_head.bias(
            drafter.markov_head.embed(prev)
        )
        our_confidence = drafter.confidence_head(ours, drafter.markov_head.embed(prev))
    shape = (1, len(anchors), slots, -1)
    assert_close(ours, hidden.view(shape), limit=1e-5, what="hidden states")
    assert_close(our_logits, logits.view(shape) + bias, limit=1e-5, what="logits")
    assert_close(our_confidence[0], confidence, limit=1e-5, what="confidence")


def _speculators_twin(core, drafter: DSparkDrafter):
    """The same network as a speculators model: full attention, anchor slot predicts."""
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=SMALL.vocab_size,
        hidden_size=SMALL.hidden_size,
        intermediate_size=SMALL.intermediate_size,
        num_hidden_layers=SMALL.num_layers,
        num_attention_heads=SMALL.num_attention_heads,
        num_key_value_heads=SMALL.num_key_value_heads,
        head_dim=SMALL.head_dim,
        rms_norm_eps=SMALL.rms_norm_eps,
        rope_parameters={"rope_theta": SMALL.rope_theta, "rope_type": "default"},
        layer_types=["full_attention"] * SMALL.num_layers,
        attn_implementation="eager",
    )
    config = core.DSparkSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=SMALL.vocab_size,
        block_size=SMALL.block_size,
        # Its ids index hidden states from the embedding on, hence one more than ours.
        aux_hidden_state_layer_ids=[layer + 1 for layer in SMALL.target_layer_ids],
        mask_token_id=SMALL.mask_token_id,
        markov_rank=SMALL.markov_rank,
        sample_from_anchor=True,
    )
    model = core.DSparkDraftModel(config).float().eval()
    missing, unexpected = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    theirs = {"embed_tokens.weight", "lm_head.weight"}
    theirs |= {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert set(missing) == theirs
    for name in ("embed_tokens", "lm_head", "verifier_lm_head"):
        torch.nn.init.normal_(getattr(model, name).weight)
    return model


def test_training_pass_equals_incremental_drafting() -> None:
    drafter = make_drafter()
    length, slots = 40, SMALL.block_size
    features = torch.randn(2, length, TAP_WIDTH)
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, 33:] = False
    # Several anchors, close together, at the start, and the last legal ones of a padded row.
    anchors = torch.tensor([[0, 1, 20, 38, 39], [0, 4, 7, 31, 32]])
    embeds = torch.randn(2, 5, slots, SMALL.hidden_size)
    trained = drafter.train_hidden(
        features, valid, embeds, anchors, torch.ones_like(anchors, dtype=torch.bool)
    )
    for row in range(2):
        for block, anchor in enumerate(anchors[row].tolist()):
            for cuts in (
                [anchor],
                [anchor // 2, 1, anchor - anchor // 2 - 1] if anchor > 3 else [],
            ):
                if not cuts:
                    continue
                drafted = run_incrementally(
                    drafter, features[row : row + 1], embeds[row : row + 1, block], cuts
                )
                assert_close(drafted[0], trained[row, block], limit=1e-5)


def test_ragged_batches_equal_single_rows() -> None:
    drafter = make_drafter()
    features, embeds = torch.randn(3, 30, TAP_WIDTH), torch.randn(3, 8, SMALL.hidden_size)
    context = drafter.new_context(3, 40)
    steps = [torch.tensor([7, 1, 4]), torch.tensor([0, 5, 3]), torch.tensor([2, 2, 0]), 3]
    for counts in steps:
        at = context.row_lengths
        rows = torch.stack([features[b, at[b] : at[b] + 7] for b in range(3)])
        rows[:, 5:] += torch.nan if isinstance(counts, int) else 0.0  # rows nobody asked for
        drafter.extend(context, rows, counts)
        together = drafter.block_hidden(embeds, context)
        for b in range(3):
            cuts = [context.row_lengths[b]] if context.row_lengths[b] else []
            alone = run_incrementally(drafter, features[b : b + 1], embeds[b : b + 1], cuts)
            assert_close(together[b], alone[0], limit=1e-5)
    assert context.lengths.tolist() == [12, 11, 10]


def test_a_batch_of_equal_lengths_needs_no_mask_and_agrees() -> None:
    drafter = make_drafter()
    features, embeds = torch.randn(2, 9, TAP_WIDTH), torch.randn(2, 8, SMALL.hidden_size)
    context = drafter.new_context(2, 20)
    drafter.extend(context, features)
    assert context.common_length == 9
    for b in range(2):
        alone = run_incrementally(drafter, features[b : b + 1], embeds[b : b + 1], [9])
        assert_close(drafter.block_hidden(embeds, context)[b], alone[0], limit=1e-5)


def test_features_at_or_after_the_anchor_leave_a_block_bit_identical() -> None:
    """Anchors closer together than a block: visibility goes by position, not by block index."""
    drafter = make_drafter()
    length, anchors = 64, torch.tensor([[30, 33, 50]])
    features, embeds = torch.randn(1, length, TAP_WIDTH), torch.randn(1, 3, 8, SMALL.hidden_size)
    valid = torch.ones(1, length, dtype=torch.bool)
    in_use = torch.ones(1, 3, dtype=torch.bool)
    before = drafter.train_hidden(features, valid, embeds, anchors, in_use)
    for block, anchor in enumerate(anchors[0].tolist()):
        changed = features.clone()
        changed[:, anchor:] = 50 * torch.randn_like(changed[:, anchor:])
        after = drafter.train_hidden(changed, valid, embeds, anchors, in_use)
        assert torch.equal(before[:, block], after[:, block])
        changed = features.clone()
        changed[:, anchor - 1] += 1.0  # the last position a block does see
        after = drafter.train_hidden(changed, valid, embeds, anchors, in_use)
        assert not torch.equal(before[:, block], after[:, block])


def test_blocks_do_not_see_each_other_even_within_one_group() -> None:
    drafter = make_drafter()
    features, embeds = torch.randn(1, 32, TAP_WIDTH), torch.randn(1, 20, 8, SMALL.hidden_size)
    valid = torch.ones(1, 32, dtype=torch.bool)
    anchors = torch.arange(5, 25)[None]  # more than one attention group
    in_use = torch.ones(1, 20, dtype=torch.bool)
    before = drafter.train_hidden(features, valid, embeds, anchors, in_use)
    embeds = embeds.clone()
    embeds[:, 3] += 1.0
    after = drafter.train_hidden(features, valid, embeds, anchors, in_use)
    same = (before == after).all(-1).all(-1)[0]
    assert same.tolist() == [block != 3 for block in range(20)]


def test_padding_and_dummy_anchors_contribute_exactly_nothing() -> None:
    drafter = make_drafter()
    features, embeds = torch.randn(3, 20, TAP_WIDTH), torch.randn(3, 4, 8, SMALL.hidden_size)
    valid = torch.ones(3, 20, dtype=torch.bool)
    valid[0, 12:], valid[1, :5], valid[2] = False, False, False  # right, left, all padding
    anchors = torch.tensor([[0, 3, 11, 0], [6, 9, 0, 0], [0, 0, 0, 0]])
    in_use = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    poisoned = features.masked_fill(~valid[..., None], torch.nan)
    embeds.requires_grad_(True)
    hidden = drafter.train_hidden(poisoned, valid, embeds, anchors, in_use)
    assert torch.isfinite(hidden).all()
    assert (hidden[~in_use] == 0).all()
    hidden.sum().backward()
    assert (embeds.grad[~in_use] == 0).all()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert "fc.weight" in gradients

    # The same two live rows without the padded row and without dummies give the same gradients.
    again = copy.deepcopy(drafter)
    again.zero_grad()
    total = sum(
        again.train_hidden(
            features[b : b + 1],
            valid[b : b + 1],
            embeds[b : b + 1, : in_use[b].sum()],
            anchors[b : b + 1, : in_use[b].sum()],
            in_use[b : b + 1, : in_use[b].sum()],
        ).sum()
        for b in range(2)
    )
    total.backward()
    for name, parameter in again.named_parameters():
        if name in gradients:
            assert_close(gradients[name], parameter.grad, what=name)


def test_a_block_at_position_zero_sees_itself_alone() -> None:
    drafter = make_drafter()
    embeds = torch.randn(1, 1, 8, SMALL.hidden_size)
    zero = torch.zeros(1, 1, dtype=torch.long)
    args = (torch.ones(1, 6, dtype=torch.bool), embeds, zero, torch.ones(1, 1, dtype=torch.bool))
    first = drafter.train_hidden(torch.randn(1, 6, TAP_WIDTH), *args)
    second = drafter.train_hidden(torch.randn(1, 6, TAP_WIDTH), *args)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


def test_drafting_leaves_the_context_as_it_was() -> None:
    drafter = make_drafter()
    context = drafter.new_context(1, 20)
    drafter.extend(context, torch.randn(1, 6, TAP_WIDTH))
    embeds = torch.randn(1, 8, SMALL.hidden_size)[None].view(1, 8, -1)
    first = drafter.block_hidden(embeds, context)
    drafter.block_hidden(torch.randn_like(embeds), context)
    assert torch.equal(first, drafter.block_hidden(embeds, context))
    assert context.row_lengths == [6]


def test_far_positions_are_read_from_tables_made_for_them() -> None:
    """Beyond `max_position_embeddings`: right positions, no read out of bounds (start 5,000)."""
    drafter = make_drafter()
    assert SMALL.max_position_embeddings < 5000
    features, embeds = torch.randn(1, 5001, TAP_WIDTH), torch.randn(1, 1, 8, SMALL.hidden_size)
    context = drafter.new_context(1, 5001)
    drafter.extend(context, features)
    drafted = drafter.block_hidden(embeds[:, 0], context)
    trained = drafter.train_hidden(
        features,
        torch.ones(1, 5001, dtype=torch.bool),
        embeds,
        torch.tensor([[5001]]),
        torch.ones(1, 1, dtype=torch.bool),
    )
    assert_close(drafted, trained[:, 0], limit=1e-5)


def test_weights_changed_by_training_or_loading_are_used_at_once() -> None:
    drafter, other = make_drafter(), make_drafter()
    features, embeds = torch.randn(1, 6, TAP_WIDTH), torch.randn(1, 8, SMALL.hidden_size)

    def draft(model: DSparkDrafter) -> torch.Tensor:
        context = model.new_context(1, 10)
        model.extend(context, features)
        return model.block_hidden(embeds, context)

    before = draft(drafter)
    with torch.no_grad():
        drafter.layers[0].self_attn.v_proj.weight.mul_(1.5)
    assert not torch.equal(before, draft(drafter))
    drafter.load_state_dict(other.state_dict())
    assert torch.equal(draft(drafter), draft(other))
    drafter.double()
    assert draft(drafter).dtype == torch.float64


def test_one_precision_throughout_in_bfloat16() -> None:
    drafter = make_drafter()
    features, embeds = torch.randn(1, 12, TAP_WIDTH), torch.randn(1, 8, SMALL.hidden_size)
    context = drafter.new_context(1, 20)
    drafter.extend(context, features)
    reference = drafter.block_hidden(embeds, context)
    drafter.to(torch.bfloat16)
    context = drafter.new_context(1, 20)
    drafter.extend(context, features)
    drafted = drafter.block_hidden(embeds, context)
    assert drafted.dtype == torch.bfloat16
    # Two layers of bf16 products: a few units of 2^-8 relative to the largest value.
    assert (drafted.float() - reference).abs().max() < 0.05 * reference.abs().max()


def test_mixed_precision_training_moves_every_master_weight() -> None:
    """bf16 products over fp32 weights: outputs near fp32's, gradients in fp32 and finite."""
    drafter = make_drafter()
    arguments = (
        torch.randn(1, 12, TAP_WIDTH),
        torch.ones(1, 12, dtype=torch.bool),
        torch.randn(1, 2, 8, SMALL.hidden_size),
        torch.tensor([[4, 9]]),
        torch.ones(1, 2, dtype=torch.bool),
    )
    reference = drafter.train_hidden(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = drafter.train_hidden(*arguments)
    assert (hidden - reference).abs().max() < 0.05 * reference.abs().max()
    hidden.float().square().sum().backward()
    for name, parameter in drafter.named_parameters():
        if name.startswith(("markov_head", "confidence_head")):
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()
        assert (parameter.grad != 0).float().mean() > 0.99, name


def test_wrong_use_is_refused() -> None:
    drafter = make_drafter()
    context = drafter.new_context(1, 10)
    with pytest.raises(ValueError, match="cut a shorter draft"):
        drafter.block_hidden(torch.randn(1, 5, SMALL.hidden_size), context)
    with pytest.raises(ValueError, match="longer than the 10"):
        drafter.extend(context, torch.randn(1, 11, TAP_WIDTH))
    for counts in (4, -1, torch.tensor([5])):
        with pytest.raises(ValueError, match="counts"):
            drafter.extend(context, torch.randn(1, 3, TAP_WIDTH), counts)
    assert context.row_lengths == [0]


def test_context_reports_the_bytes_it_holds() -> None:
    context = make_drafter().new_context(2, 32)
    rows = 32 + SMALL.block_size
    keys = SMALL.num_layers * 2 * SMALL.num_key_value_heads * rows * SMALL.head_dim
    assert context.nbytes == 4 * 2 * keys


def test_confidence_reads_the_previous_token_or_not() -> None:
    hidden, embeds = torch.randn(4, 48), torch.randn(4, 12)
    with_token, without = ConfidenceHead(48, 12), ConfidenceHead(48, 0)
    assert not torch.equal(with_token(hidden, embeds), with_token(hidden, embeds + 1))
    assert torch.equal(without(hidden, embeds), without(hidden, embeds + 1))
    assert without.proj.weight.shape == (1, 48)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (2, (0,)),
        (4, (0, 1, 2)),
        (6, (0, 1, 2, 3, 4)),
        (36, (1, 9, 17, 25, 33)),  # DeepSpec's release for a 36-layer target
        (48, (1, 12, 23, 34, 45)),
    ],
)
def test_default_taps_are_spread_and_distinct(layers: int, expected: tuple[int, ...]) -> None:
    assert default_tap_ids(layers) == expected


def test_a_target_of_one_layer_cannot_be_tapped() -> None:
    with pytest.raises(ValueError, match="no layer below its last"):
        default_tap_ids(1)
