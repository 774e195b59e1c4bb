"""Fresh weights: sizes by fan-in, a sequential head that starts silent, and the seed alone."""

from __future__ import annotations

import pytest
import torch

from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.start import initialise


def fresh(seed: int = 0) -> DSparkDrafter:
    config = DraftConfig(
        hidden_size=96, num_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
        intermediate_size=256, vocab_size=300, num_target_layers=9, target_layer_ids=(1, 4, 6),
        target_tap_kind="residual", mask_token_id=7, block_size=5, markov_rank=16,
    )  # fmt: skip
    drafter = DSparkDrafter(config)
    initialise(drafter, torch.Generator().manual_seed(seed))
    return drafter


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fc", 288**-0.5),
        ("layers.0.self_attn.q_proj", 96**-0.5),
        ("layers.1.self_attn.o_proj", 0.5 * 96**-0.5),
        ("layers.1.mlp.down_proj", 0.5 * 256**-0.5),
        ("markov_head.markov_w1", 1.0),
    ],
)
def test_spread_by_fan_in(name: str, expected: float) -> None:
    weight = fresh().get_submodule(name).weight
    # the standard deviation of n normal draws is known to 1 / sqrt(2 n); five of those
    assert weight.std().item() == pytest.approx(expected, rel=5 * (2 * weight.numel()) ** -0.5)


def test_the_sequential_head_starts_silent_and_norms_start_at_one() -> None:
    drafter = fresh()
    assert not drafter.markov_head.bias(drafter.markov_head.embed(torch.arange(300))).any()
    assert drafter.confidence_head is not None
    assert not drafter.confidence_head.proj.bias.any()
    assert all(bool((p == 1).all()) for n, p in drafter.named_parameters() if "norm" in n)


def test_the_seed_decides_everything() -> None:
    torch.manual_seed(1)
    one = fresh(4).state_dict()
    torch.manual_seed(2)
    two = fresh(4).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["fc.weight"], fresh(5).state_dict()["fc.weight"])
