"""Recorded frames on a GPU: the texts of the loops that wait, the same again, and no host waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.k3.config import K3Config
from dspark.k3.static.decode import StaticDecoder
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark_eval.device_profile import profile
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.test_graph_decode import (
    BLOCK,
    DRAFTERS,
    GREEDY,
    SMALL,
    SMALL_PLAIN,
    plain_texts,
    requests,
)
from tests.tiny_drafters import make_drafter

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
CONFIGS = pytest.mark.parametrize("config", [SMALL, SMALL_PLAIN], ids=["k3", "kimi_linear"])
WIDE = replace(
    TINY,
    hidden_size=256,
    kda_num_heads=4,
    kda_head_dim=64,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    intermediate_size=384,
    moe_intermediate_size=128,
    routed_expert_hidden_size=128,
)
"""K3 in sizes that the kernels take."""
WIDE_PLAIN = replace(
    PLAIN,
    hidden_size=256,
    kda_num_heads=4,
    kda_head_dim=64,
    num_attention_heads=4,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    intermediate_size=384,
    moe_intermediate_size=128,
)


def on_gpu(config: K3Config, dtype: torch.dtype = torch.float32) -> K3Target:
    model = tiny_model(config)
    for name, parameter in model.named_parameters():
        wide = name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "bias"))
        parameter.data = parameter.data.to(GPU, torch.float32 if wide else dtype)
    return K3Target(model, "tiny", ())


@CONFIGS
@pytest.mark.parametrize("seats", [1, 3])
def test_plain_frames(config: K3Config, seats: int) -> None:
    target = on_gpu(config)
    decoder = GraphDecoder(target, seats=seats, max_length=40)
    assert decoder.replay.recorded
    asked = requests()
    expected = plain_texts(target, asked)
    for _ in range(2):  # seats are used again
        assert [g.tokens for g in decoder.generate_many(asked)] == expected


@pytest.mark.parametrize("backbone", DRAFTERS)
def test_speculative_frames(backbone: str) -> None:
    target, drafter = on_gpu(SMALL), make_drafter(DRAFTERS[backbone]).to(GPU)
    decoder = GraphDecoder(target, drafter, seats=2, max_length=40)
    found = decoder.generate_many(requests())
    assert [g.tokens for g in found] == plain_texts(target, requests())
    waiting = SpeculativeDecoder(target, drafter)
    for request, got in zip(requests(2), found, strict=False):
        expected = waiting.generate(
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            sampling=GREEDY,
            draft_length=BLOCK,
        )
        assert [r.accepted for r in got.rounds] == [r.accepted for r in expected.rounds]


def test_samples_are_those_of_the_cpu() -> None:
    """Random numbers are the same on every device; logits are, but for their last bits."""
    sampling = SamplingParams(temperature=0.8, top_k=20)
    texts = []
    for device in (torch.device("cpu"), GPU):
        target = on_gpu(SMALL) if device.type == "cuda" else K3Target(tiny_model(SMALL), "tiny", ())
        drafter = make_drafter(DRAFTERS["attention"]).to(device)
        decoder = GraphDecoder(target, drafter, seats=2, max_length=40, sampling=sampling)
        texts.append([g.tokens for g in decoder.generate_many(requests())])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= 3


@pytest.mark.parametrize("config", [WIDE, WIDE_PLAIN], ids=["k3", "kimi_linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_static_pass_at_kernel_sizes(config: K3Config, dtype: torch.dtype) -> None:
    """Against the ordinary decoder in float32 on the CPU, several rounds deep."""
    reference = tiny_model(config)
    if dtype is torch.bfloat16:
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    target = on_gpu(config, dtype)
    for ours, theirs in zip(target.model.parameters(), reference.parameters(), strict=True):
        ours.copy_(theirs)
    decoder = StaticDecoder(target.model)
    cache = decoder.new_cache(2, 60, 8)
    oracle = reference.new_cache(2, 60)
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 8, 4, 8, 1, 3, 8):
        tokens = tiny_tokens(2, rows, config, seed=rows)
        hidden, _ = reference(tokens, oracle, commit=False)
        found = decoder.logits(decoder.step(tokens.to(GPU), cache).last).cpu()
        expected = reference.lm_head(hidden).float()
        error = (found - expected).norm() / expected.norm()
        assert error < (2e-5 if dtype is torch.float32 else 6e-2), (rows, float(error))
        counts = torch.randint(0, rows + 1, (2,), generator=generator)
        oracle.commit(counts)
        cache.commit(counts.to(GPU))


def test_no_host_waits_in_the_loop() -> None:
    target, drafter = on_gpu(SMALL), make_drafter(DRAFTERS["kda"]).to(GPU)
    decoder = GraphDecoder(target, drafter, seats=2, max_length=40)

    def frames() -> None:
        for _ in range(10):
            decoder.replay.run()

    seen = profile(frames, 10)
    assert seen.waits == 0
    assert seen.event_waits == 0


@CONFIGS
def test_replays_are_deterministic(config: K3Config) -> None:
    target = on_gpu(config)
    drafterless = GraphDecoder(target, seats=2, max_length=60)
    runs = [[g.tokens for g in drafterless.generate_many(requests())] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    alone = plain_generate(
        target, requests()[0].prompt_ids, max_new_tokens=8, sampling=GREEDY
    ).tokens
    assert runs[0][0] == alone
