"""Sizes of the widened twins, and that a small one decodes the text of k3-nano."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.draft.config import DraftConfig
from dspark.draft.shapes import KDAShape
from dspark.draft.widen import wide_draft_config
from dspark.errors import UserError
from dspark.k3.cost import pass_bytes
from dspark.runtime.loading import load_target
from dspark_eval.twins import DRAFT_SHARE, TWINS, _draft_bytes, draft_shape, twin_config
from tests.tiny_drafters import FULL


@pytest.fixture(scope="module")
def nano():
    return load_target("nano").target.model.config


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("1gb", 1), ("8gb", 8), ("30gb", 30), ("k3-like", 8)]
)
def test_bytes_of_a_token_are_what_the_name_says(nano, name: str, gigabytes: float) -> None:
    read = pass_bytes(twin_config(name, nano), 1, 0, torch.bfloat16).total
    assert read == pytest.approx(gigabytes * 1e9, rel=0.15)


def test_the_k3_like_twin_has_the_experts_of_k3(nano) -> None:
    """16 of 896, and the share of bytes that they are in Kimi K3 with packed experts: 25.5 of 137
    GB (16 of 896 experts of 3 x 3072 x 3584 at 17/32 bytes in 91 layers)."""
    config = twin_config("k3-like", nano)
    assert (config.num_experts_per_token, config.num_experts) == (16, 896)
    found = pass_bytes(config, 1, 0, torch.bfloat16)
    of_k3 = 16 * 3 * 3072 * 3584 * (17 / 32) * 91 / 137.0e9
    assert found.experts / found.total == pytest.approx(of_k3, rel=0.1)


def test_drafters_read_a_twentieth_of_their_target(nano) -> None:
    shape = KDAShape(order=1, conv_size=4, gate_rank=32, gate_lower_bound=-5.0, block_softmax=False)
    config = replace(
        FULL, backbone="kda", num_key_value_heads=6, hidden_size=192, head_dim=32, kda=shape
    )
    assert isinstance(config, DraftConfig)
    for name in TWINS:
        least = DRAFT_SHARE * pass_bytes(twin_config(name, nano), 1, 0, torch.bfloat16).total
        found = _draft_bytes(wide_draft_config(config, draft_shape(config, least)))
        assert least <= found < 1.5 * least + 1e8, name
    broad = replace(config, num_attention_heads=12, num_key_value_heads=12, intermediate_size=640)
    held = draft_shape(broad, 0)
    assert (held.heads, held.intermediate) == (16, 1024), "the next step that holds the drafter"


def test_an_unknown_twin_is_refused(nano) -> None:
    with pytest.raises(UserError, match="expected one of 1gb, 8gb, 30gb, k3-like"):
        twin_config("9gb", nano)
