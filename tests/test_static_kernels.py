"""The static pass through its kernels, at sizes that they take, against float32 and plain torch.

Every expert is chosen: rounding that moves a choice would hide what kernels do. Here in Triton's
interpreter; `test_gpu_graph.py` follows the same rounds on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark import ops
from dspark.k3 import layout
from dspark.k3.config import K3Config
from dspark.k3.static.decode import StaticDecoder
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens

WIDE = replace(
    TINY,
    hidden_size=128,
    num_hidden_layers=3,
    full_attention_layers=(2,),
    kda_num_heads=2,
    kda_head_dim=64,
    num_attention_heads=2,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=128,
    num_experts=4,
    num_experts_per_token=4,
    moe_intermediate_size=64,
    routed_expert_hidden_size=64,
    attn_res_block_size=2,
)
"""K3 in sizes that every kernel takes."""
WIDE_PLAIN = replace(
    PLAIN,
    hidden_size=128,
    num_hidden_layers=3,
    full_attention_layers=(2,),
    kda_num_heads=2,
    kda_head_dim=64,
    num_attention_heads=2,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=128,
    num_experts=4,
    num_experts_per_token=4,
    moe_intermediate_size=64,
)
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""Relative error of logits. In bfloat16 the ordinary pass is off by 3e-2 here."""


@torch.no_grad()
def follow(
    config: K3Config, dtype: torch.dtype, device: torch.device, rounds: tuple[int, ...]
) -> None:
    """Blocks and ragged counts of two seats, against the ordinary decoder in float32 on the CPU."""
    reference, model = tiny_model(config), tiny_model(config)
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        kept = torch.float32 if layout.is_float32(name) else dtype
        theirs.copy_(theirs.to(kept))
        ours.data = theirs.to(device, kept)
    decoder = StaticDecoder(model)
    cache, oracle = decoder.new_cache(2, 60, max(rounds)), reference.new_cache(2, 60)
    generator = torch.Generator().manual_seed(0)
    for rows in rounds:
        tokens = tiny_tokens(2, rows, config, seed=rows)
        hidden, _ = reference(tokens, oracle, commit=False)
        found = decoder.logits(decoder.step(tokens.to(device), cache).last).cpu().float()
        expected = reference.lm_head(hidden)
        error = float((found - expected).norm() / expected.norm())
        assert error < LIMITS[dtype], (rows, error)
        counts = torch.randint(0, rows + 1, (2,), generator=generator)
        oracle.commit(counts)
        cache.commit(counts.to(device))


@pytest.mark.parametrize("config", [WIDE, WIDE_PLAIN], ids=["k3", "kimi_linear"])
def test_every_kernel_of_the_pass_in_the_interpreter(
    config: K3Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("test_gpu_graph.py does this on the GPU")
    monkeypatch.setenv("DSPARK_OPS", "triton")
    ops.forget()
    follow(config, torch.bfloat16, torch.device("cpu"), (1, 4, 2))
    assert set(ops.ran().values()) == {"triton"}
    assert {"kda_decode", "mla_absorb", "mla_output", "linear_rows", "moe_decode"} <= set(ops.ran())


@torch.no_grad()
@pytest.mark.parametrize("config", [WIDE, WIDE_PLAIN], ids=["k3", "kimi_linear"])
def test_every_kernel_of_a_plain_step_in_the_interpreter(
    config: K3Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seat whose rows count at once: layers there are cut otherwise."""
    if torch.cuda.is_available():
        pytest.skip("test_gpu_graph.py does this on the GPU")
    monkeypatch.setenv("DSPARK_OPS", "triton")
    ops.forget()
    reference, model = tiny_model(config), tiny_model(config)
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        kept = torch.float32 if layout.is_float32(name) else torch.bfloat16
        theirs.copy_(theirs.to(kept))
        ours.data = theirs.to(kept)
    decoder = StaticDecoder(model)
    cache, oracle = decoder.new_cache(1, 20, slots=False), reference.new_cache(1, 20)
    tokens = tiny_tokens(1, 1, config, seed=1)
    expected = reference.lm_head(reference(tokens, oracle)[0])
    found = decoder.logits(decoder.step(tokens, cache).last).float()
    assert float((found - expected).norm() / expected.norm()) < LIMITS[torch.bfloat16]
    assert set(ops.ran().values()) == {"triton"}
    assert {"kda_output", "mla_absorb", "mla_output", "linear_rows", "moe_decode"} <= set(ops.ran())
