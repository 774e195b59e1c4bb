"""Recorded frames on a GPU: the texts of the loops that wait, the same again, and no host waits."""

from __future__ import annotations

import pytest
import torch

from dspark import ops
from dspark.k3 import layout
from dspark.k3.config import K3Config
from dspark.k3.mxfp4 import dequantise, quantise
from dspark.k3.static.decode import StaticDecoder
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import Auto, Fixed
from dspark.runtime.sampling import SamplingParams
from dspark_eval.device_profile import profile
from tests.k3_tiny import tiny_model
from tests.test_graph_decode import (
    BLOCK,
    DRAFTERS,
    GREEDY,
    SMALL,
    SMALL_PLAIN,
    plain_texts,
    requests,
)
from tests.test_static_kernels import LIMITS, WIDE, WIDE_PLAIN, follow
from tests.tiny_drafters import make_drafter

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
CONFIGS = pytest.mark.parametrize("config", [SMALL, SMALL_PLAIN], ids=["k3", "kimi_linear"])


def on_gpu(config: K3Config, dtype: torch.dtype = torch.float32) -> K3Target:
    model = tiny_model(config)
    for name, parameter in model.named_parameters():
        kept = torch.float32 if layout.is_float32(name) else dtype
        parameter.data = parameter.data.to(GPU, kept)
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


@pytest.mark.parametrize("kind", ["attention", "gated", "rnn"])
def test_samples_are_those_of_the_cpu(kind: str) -> None:
    """Random numbers are the same on every device; logits are, but for their last bits."""
    sampling = SamplingParams(temperature=0.8, top_k=20)
    texts = []
    for device in (torch.device("cpu"), GPU):
        target = on_gpu(SMALL) if device.type == "cuda" else K3Target(tiny_model(SMALL), "tiny", ())
        drafter = make_drafter(DRAFTERS[kind]).to(device)
        decoder = GraphDecoder(target, drafter, seats=2, max_length=40, sampling=sampling)
        texts.append([g.tokens for g in decoder.generate_many(requests())])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= 3


@pytest.mark.parametrize("config", [WIDE, WIDE_PLAIN], ids=["k3", "kimi_linear"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_static_pass_at_kernel_sizes(config: K3Config, dtype: torch.dtype) -> None:
    ops.forget()
    follow(config, dtype, GPU, (1, 8, 4, 8, 1, 3, 8))
    if dtype is torch.bfloat16:  # what the reference on the CPU calls runs in torch
        passed = ("kda_decode", "mla_absorb", "mla_output", "linear_rows", "moe_decode")
        assert {name: ops.ran().get(name) for name in passed} == dict.fromkeys(passed, "triton")


def test_frames_with_experts_in_mxfp4() -> None:
    """Of weights that MXFP4 can hold, so that both packings say the same."""
    target = on_gpu(WIDE, torch.bfloat16)
    for layer in target.model.model.decoder_layers:
        if layer.moe:
            for weight in layer.block_sparse_moe.experts.parameters():
                weight.data = dequantise(*quantise(weight.data), torch.bfloat16)
    asked, texts = requests(), []
    for mxfp4 in (False, True):
        ops.forget()
        static = StaticDecoder(target.model, mxfp4=mxfp4)
        decoder = GraphDecoder(target, seats=2, max_length=40, static=static)
        assert decoder.replay.recorded
        assert ops.ran()["moe_decode"] == "triton"
        texts.append([g.tokens for g in decoder.generate_many(asked)])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(asked) - 1  # products of other shapes round otherwise


@pytest.mark.parametrize("kind", ["kda", "gated", "rnn"])
def test_no_host_waits_in_the_loop(kind: str) -> None:
    target, drafter = on_gpu(SMALL), make_drafter(DRAFTERS[kind]).to(GPU)
    ops.forget()
    decoder = GraphDecoder(target, drafter, seats=2, max_length=40)
    assert ops.ran()["markov_sample"] == "triton"  # whatever the head

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


@pytest.mark.parametrize("seats", [1, 2])
def test_frames_of_several_sizes(seats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of one decoder in any order: plain after large, large after plain."""
    target, drafter = on_gpu(SMALL), make_drafter(DRAFTERS["kda"]).to(GPU)
    decoder = GraphDecoder(target, drafter, seats=seats, max_length=60, policy=Auto(Fixed(BLOCK)))
    assert decoder.turns.recorded
    turns = iter([4, 0, 0, 1, 2, 0, 4, 1, 4, 2] * 20)
    monkeypatch.setattr(decoder.rule, "next", lambda seats: next(turns))
    asked = requests(length=20)
    assert [g.tokens for g in decoder.generate_many(asked)] == plain_texts(target, asked)
    assert set(decoder.frame_sizes) == {0, 1, 2, 4}
