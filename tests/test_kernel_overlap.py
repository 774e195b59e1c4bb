"""Kernels that begin before the one in front has ended give what they give one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("the GPU's own order is its own", allow_module_level=True)

from dspark.k3 import layout
from dspark.k3.config import K3Config
from dspark.k3.static.decode import StaticDecoder
from dspark_kernels import moe_decode_triton as kernel
from tests.early_launches import adversary
from tests.k3_tiny import tiny_model, tiny_tokens
from tests.test_kernel_moe_decode import EPS, _random, _rows
from tests.test_static_kernels import WIDE, WIDE_PLAIN


@pytest.mark.slow
@pytest.mark.parametrize("few", [64, 0], ids=["own", "list"])
def test_one_row_of_experts(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down asks for the experts' weights before gate and up have ended: by then they are chosen."""
    monkeypatch.setattr(kernel, "FEW", few)
    moe = _random(256, 5, 2, 32, 32, latent=None, packed=False)
    moe.bias[0] = -10.0  # never chosen, and what memory holds where nothing was chosen yet
    x, norm, residual = _rows(1, 256)
    wanted = kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    with adversary(monkeypatch) as queue:
        found = kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    assert queue.ran_ahead
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("config", [WIDE, WIDE_PLAIN], ids=["k3", "kimi_linear"])
def test_a_plain_step(config: K3Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that begins early, in the company it has in a frame."""
    monkeypatch.setenv("DSPARK_OPS", "triton")
    model = tiny_model(replace(config, num_hidden_layers=2, full_attention_layers=(1,)))
    for name, parameter in model.named_parameters():
        if not layout.is_float32(name):
            parameter.data = parameter.data.bfloat16()
    decoder, tokens = StaticDecoder(model), tiny_tokens(1, 1, config, seed=1)

    def step() -> tuple[Tensor, ...]:
        cache = decoder.new_cache(1, 20, slots=False)
        found = decoder.logits(decoder.step(tokens, cache).last)
        return found, cache.state, cache.rows, cache.latents

    wanted = step()
    with adversary(monkeypatch) as queue:
        found = step()
    assert queue.ran_ahead
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
