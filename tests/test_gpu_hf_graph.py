"""Recorded frames of transformers' models on a GPU: their own texts, and no host waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers

from dspark.errors import UserError
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_prompts import PromptReader
from dspark.runtime.graph_reading import StaticReader
from dspark.runtime.graph_replay import NotRecorded, Replay
from dspark.runtime.hf_open import hf_target
from dspark.runtime.hf_target import RowTarget
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import Auto, Fixed
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.static_pass import unrecordable
from dspark_eval.device_profile import profile
from tests.hf_tiny import ROWS, SIZES, tiny_hf
from tests.test_hf_static import expected, requests, row_target
from tests.test_hf_targets import BLOCK, drafter_for, prompt_of

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
GROUPED = {"qwen3-moe", "gpt-oss", "deepseek-v3"}
"""Their grouped products read offsets on the host in float32, and are one kernel in bfloat16."""


def on_gpu(name: str, dtype: torch.dtype = torch.float32, **more: int) -> RowTarget:
    return row_target(tiny_hf(name, **more).to(GPU, dtype), name)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in GROUPED])
def test_frames_say_what_the_model_says_on_a_cpu(name: str) -> None:
    target, asked = on_gpu(name), requests()
    theirs = expected(row_target(tiny_hf(name)), asked)
    for drafter in (None, drafter_for(target).to(GPU)):
        decoder = GraphDecoder(target, drafter, seats=2, max_length=40)
        assert decoder.turns.recorded
        for _ in range(2):  # seats are used again
            found = [g.tokens for g in decoder.generate_many(asked)]
            same = sum(a == b for a, b in zip(found, theirs, strict=True))
            assert same >= len(theirs) - 1  # two devices round differently


@pytest.mark.parametrize("name", sorted(GROUPED))
def test_experts_in_bfloat16_are_recorded(name: str) -> None:
    """Or refused with the reason where the grouped product of this card and torch waits."""
    target = on_gpu(name, torch.bfloat16)
    reason = unrecordable(target)
    if reason is not None:
        with pytest.raises(UserError, match="cannot be recorded"):
            GraphDecoder(target, max_length=40)
        pytest.skip(f"{name}: {reason}")
    decoder = GraphDecoder(target, max_length=40)
    assert decoder.turns.recorded
    texts = [[g.tokens for g in decoder.generate_many(requests())] for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
@pytest.mark.parametrize("draft", [False, True])
def test_recorded_reading_says_what_an_eager_one_does(name: str, draft: bool) -> None:
    """Prompts that end before, at and behind the ends of chunks, on seats that are used again."""
    target = on_gpu(name, max_position_embeddings=1024)
    drafter = drafter_for(target).to(GPU) if draft else None
    lengths = (1, 63, 64, 65, 256, 300, 321, 600)
    asked = [Request(prompt_of(n), 12, end_token_ids=(), index=n) for n in lengths]
    texts = []
    for reader in (None, PromptReader(target, drafter)):
        decoder = GraphDecoder(target, drafter, seats=2, max_length=640, reader=reader)
        if reader is None:
            assert isinstance(decoder.reader, StaticReader)
            assert decoder.reader.recorded
        texts.append([g.tokens for g in decoder.generate_many(asked)])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(asked) - 1  # chunks of two sizes round differently


def test_reading_a_prompt_waits_for_nothing_in_between() -> None:
    """Ids go to the device before the first chunk; from there on the host only queues."""
    target = on_gpu("llama", max_position_embeddings=1024)
    reader = GraphDecoder(target, drafter_for(target).to(GPU), max_length=640).reader
    assert isinstance(reader, StaticReader)
    one, many = (profile(lambda n=n: reader.read(prompt_of(n)), 1) for n in (30, 600))
    assert many.waits == one.waits


def test_sizes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    target = on_gpu("gemma3")
    decoder = GraphDecoder(
        target, drafter_for(target).to(GPU), seats=2, max_length=60, policy=Auto(Fixed(BLOCK))
    )
    assert decoder.turns.recorded
    turns = iter([BLOCK, 0, 0, 1, 2, 0, 4, 1, BLOCK, 2] * 30)
    monkeypatch.setattr(decoder.rule, "next", lambda seats: next(turns))
    plain = [
        plain_generate(
            target, r.prompt_ids, max_new_tokens=r.max_new_tokens, sampling=SamplingParams()
        ).tokens
        for r in requests()
    ]
    assert [g.tokens for g in decoder.generate_many(requests())] == plain


def test_no_host_waits_in_the_loop() -> None:
    target = on_gpu("llama")
    decoder = GraphDecoder(target, drafter_for(target).to(GPU), seats=2, max_length=40)

    def frames() -> None:
        for _ in range(10):
            decoder.replay.run()

    seen = profile(frames, 10)
    assert seen.waits == 0
    assert seen.event_waits == 0


def works(target: RowTarget) -> None:
    """The device computes, draws and records after what went wrong before."""
    assert torch.randn(8, device=GPU).isfinite().all()
    decoder = GraphDecoder(target, max_length=40)
    plain = plain_generate(target, prompt_of(5), max_new_tokens=8, sampling=SamplingParams())
    assert decoder.generate(prompt_of(5), max_new_tokens=8).tokens == plain.tokens


def dynamic_rope() -> RowTarget:
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
    return row_target(transformers.LlamaForCausalLM(config).float().to(GPU), "dynamic")


def eager_experts() -> RowTarget:
    model = tiny_hf("qwen3-moe").to(GPU)
    model.set_experts_implementation("eager")
    return row_target(model, "experts")


@pytest.mark.parametrize("build", [dynamic_rope, eager_experts])
def test_a_pass_that_waits_is_refused(build: Callable[[], RowTarget]) -> None:
    refused, fine = build(), on_gpu("llama")
    with pytest.raises(UserError, match=r"cannot be recorded: .*modeling_.*use SpeculativeDecoder"):
        GraphDecoder(refused, max_length=40)
    works(fine)
    mode = torch.cuda.get_sync_debug_mode()
    assert mode == 0


def test_a_recording_that_fails_is_an_error_of_its_own() -> None:
    fine, number = on_gpu("llama"), torch.ones(3, device=GPU)
    with pytest.raises(NotRecorded):
        Replay(lambda: number.sum().item(), GPU)
    works(fine)


def test_a_recurrent_model_is_refused() -> None:
    target = hf_target(tiny_hf("lfm2").to(GPU), name="states", end_token_ids=())
    with pytest.raises(UserError, match="attention layers alone"):
        GraphDecoder(target, max_length=20)
