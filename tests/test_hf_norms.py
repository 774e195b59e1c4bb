"""RMS norms of transformers' models in one operation, where that says what they say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dspark.runtime.hf_norms import FusedNorms
from dspark.runtime.hf_static import HFStatic
from dspark.runtime.hf_static_check import wrong_logits
from tests.hf_tiny import tiny_hf
from tests.test_hf_static import row_target
from tests.tolerance import assert_close

LAYERS = 4


def stirred(name: str, dtype: torch.dtype) -> nn.Module:
    """Norm weights away from one, so that leaving them out would show."""
    model = tiny_hf(name)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama", 2 * LAYERS + 1),
        ("qwen3", 4 * LAYERS + 1),  # of queries and keys as well
        ("gemma", 0),  # 1 + w
        ("cohere", 0),  # the mean is taken off
        ("gpt2", 0),  # with a bias
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_says_the_same_is_replaced(name: str, count: int, dtype: torch.dtype) -> None:
    model = stirred(name, dtype)
    norms = FusedNorms(model)
    assert len(norms) == count
    tokens = torch.arange(3, 20).unsqueeze(0)
    before = model(tokens).logits
    with norms.used():
        within = model(tokens).logits
    assert torch.equal(model(tokens).logits, before)
    exact = stirred(name, dtype).double()(tokens).logits
    found, own = ((x.double() - exact).norm() / exact.norm() for x in (within, before))
    assert found <= 1.5 * own + 1e-7  # no further from the exact logits than the model's own
    if dtype is torch.float32:
        assert_close(within, before)


def test_a_model_in_float64_keeps_its_own() -> None:
    """Its norms round to float32; the fused operation would not."""
    assert len(FusedNorms(stirred("llama", torch.float64))) == 0


def test_a_pass_uses_them() -> None:
    static = HFStatic(row_target(stirred("qwen3", torch.bfloat16)))
    assert len(static.norms) == 4 * LAYERS + 1
    assert wrong_logits(static) is None
