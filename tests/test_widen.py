"""Widened twins: the same function in more bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.draft import DSparkDrafter
from dspark.draft.shapes import KDAShape
from dspark.draft.widen import WideDraft, widen_drafter
from dspark.errors import UserError
from dspark.k3.widen import Wide, wide_config, widen
from dspark.runtime.loading import load_target
from tests.tiny_drafters import FULL

WIDE = Wide(
    hidden=768, kda_heads=9, kda_head=64, heads=7, q_rank=384, kv_rank=256, nope=128, rope=64,
    value=48, dense=640, experts=40, per_token=8, expert=80, latent=384,
)  # fmt: skip


@pytest.fixture(scope="module")
def nano():
    return load_target("nano").target.model


@pytest.fixture(scope="module")
def twin(nano):
    return widen(nano, WIDE, dtype=torch.float32, device="cpu")


def test_logits_are_those_of_the_model(nano, twin) -> None:
    """Factors of the widths are made up for, dead weights meet zeros. What is left is rounding, and
    the eps of head and latent norms: seen 4e-5 on logits of scale 3.4."""
    tokens = torch.randint(0, 2000, (2, 50))
    with torch.inference_mode():
        expected = nano.lm_head(nano(tokens)[0])
        found = twin.lm_head(twin(tokens)[0])
    assert expected.std() > 1
    assert (found - expected).abs().max() < 2e-4


def test_every_dead_weight_is_random_and_none_is_left_unwritten(nano, twin) -> None:
    small = dict(nano.named_parameters())
    for name, big in twin.named_parameters():
        assert torch.isfinite(big).all(), name
        if big.numel() > small[name].numel() and big.dim() > 1 and "embed" not in name:
            assert (big != 0).float().mean() > 0.3, name


def test_a_token_chooses_copies_of_the_experts_it_chose(nano, twin) -> None:
    x = torch.randn(5, nano.config.hidden_size)
    wide = torch.zeros(5, WIDE.hidden)
    wide[:, : x.shape[1]] = x
    weights, chosen = nano.model.layers[1].block_sparse_moe.gate(x)
    more, copies = twin.model.layers[1].block_sparse_moe.gate(wide)
    for row in range(5):
        for e, w in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            same = copies[row] % nano.config.num_experts == e
            assert same.sum() == 4
            assert more[row][same].sum().item() == pytest.approx(w, rel=1e-5)


def test_sizes_that_cannot_hold_the_model_are_refused(nano) -> None:
    with pytest.raises(UserError, match="hidden_size 100: the model itself has 192"):
        wide_config(nano.config, replace(WIDE, hidden=100))
    with pytest.raises(UserError, match="at least m times 8"):
        wide_config(nano.config, replace(WIDE, experts=24))
    with pytest.raises(UserError, match="expected a multiple m of 2"):
        wide_config(nano.config, replace(WIDE, per_token=7))


def kda_drafter() -> DSparkDrafter:
    """Small, with weights and norms that are not what they start as."""
    shape = KDAShape(order=1, conv_size=4, gate_rank=16, gate_lower_bound=-5.0, block_softmax=False)
    drafter = DSparkDrafter(replace(FULL, backbone="kda", num_key_value_heads=6, kda=shape)).eval()
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.dim() == 1))
    return drafter


DRAFT = WideDraft(hidden=WIDE.hidden, heads=7, head_dim=32, gate_rank=40, intermediate=500)


def test_a_wide_drafter_proposes_what_the_drafter_does() -> None:
    """Contexts of the taps of model and twin, then one block: hidden states and confidence."""
    small = kda_drafter()
    wide = widen_drafter(small, DRAFT, dtype=torch.float32, device="cpu")
    taps = torch.randn(2, 30, len(small.config.target_layer_ids), small.config.hidden_size)
    spread = torch.zeros(*taps.shape[:3], WIDE.hidden)
    spread[..., : taps.shape[3]] = taps
    embeds = torch.randn(2, small.config.block_size, small.config.hidden_size)
    wider = torch.zeros(*embeds.shape[:2], WIDE.hidden)
    wider[..., : embeds.shape[2]] = embeds
    prev = torch.randint(0, small.config.vocab_size, embeds.shape[:2])
    found = []
    for drafter, features, block in ((small, taps, embeds), (wide, spread, wider)):
        context = drafter.new_context(2, 64)
        drafter.extend(context, features.flatten(2), torch.tensor([30, 21]))
        hidden = drafter.block_hidden(block, context)
        found.append((hidden, drafter.confidence_head(hidden, drafter.markov_head.embed(prev))))
    (hidden, sure), (wide_hidden, wide_sure) = found
    assert (wide_hidden[..., : hidden.shape[-1]] - hidden).abs().max() < 1e-4
    assert (wide_hidden[..., hidden.shape[-1] :] == 0).all()
    assert (wide_sure - sure).abs().max() < 1e-4


def test_other_drafters_are_refused() -> None:
    drafter = kda_drafter()
    with pytest.raises(UserError, match="MLP width 3: the drafter itself has"):
        widen_drafter(drafter, replace(DRAFT, intermediate=3), dtype=torch.float32, device="cpu")
    attention = DSparkDrafter(replace(drafter.config, backbone="attention", kda=None))
    with pytest.raises(UserError, match="only kda drafters"):
        widen_drafter(attention, DRAFT, dtype=torch.float32, device="cpu")
