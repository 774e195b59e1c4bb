"""Prompts read by the static pass: the states of an ordinary reading, and no other pass beside it.

Chunks are of 4 and 16 rows here, windows of 8 tokens. Hidden states are compared with the model's
uncached forward, drafts with those behind a context that the ordinary loop has filled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dspark.draft.model import DSparkDrafter
from dspark.draft.shapes import KDAShape, MLAShape
from dspark.k3.storage import PrivateStorage
from dspark.runtime import graph_decode, hf_static
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_prompts import PromptReader
from dspark.runtime.graph_reading import StaticReader
from dspark.runtime.graph_replay import NotRecorded
from dspark.runtime.hf_static import HFStatic
from dspark.runtime.prefill import watch_reading
from dspark.runtime.requests import Request
from dspark.runtime.sampling import BadLogits
from tests.hf_tiny import ROWS, tiny_hf
from tests.test_hf_static import (
    FLOAT32,
    check_step,
    every_model,
    expected,
    own_states,
    requests,
    row_target,
    seat_text,
)
from tests.test_hf_targets import BLOCK, drafter_for, prompt_of
from tests.tolerance import assert_close

SHAPES = {"kda": KDAShape(gate_rank=4), "mla": MLAShape(10, 6, 4, 4, 6)}
LENGTHS = (1, 3, 4, 5, 16, 17, 32, 37)
LONGEST = 40


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_static, "CHUNKS", (4, 16))


def reader_of(static: HFStatic, drafter: DSparkDrafter | None = None) -> StaticReader:
    return StaticReader(static, static.reading(LONGEST), drafter, LONGEST + BLOCK)


def static_of(name: str) -> HFStatic:
    model = tiny_hf(name).double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the other one knows no float64
    return HFStatic(row_target(model, name))


@every_model
@torch.inference_mode()
def test_states_are_the_models_own(name: str) -> None:
    """The last row's, and those of blocks behind prompts; the seats beside are not touched."""
    static = static_of(name)
    reader, cache = reader_of(static), static.new_cache(3, LONGEST, 4)
    texts = [prompt_of(9), [], prompt_of(6)]
    for seat in (0, 2):
        seat_text(cache, seat, static, texts[seat])
    limit: dict[str, Any] = {"dtype": torch.float32, "limit": 1e-6}
    if name not in FLOAT32:
        limit = {"limit": 1e-9}
    for length in LENGTHS:
        before = [held[:, [0, 2]].clone() for held in cache._all()]
        texts[1] = prompt_of(length)
        read = reader.read(texts[1])
        cache.load(1, read.cache)  # type: ignore[arg-type]
        wanted = own_states(static.target, texts[1])[0]
        assert_close(read.last, wanted[-1:], **limit, what=f"last of {length}")
        assert cache.lengths.tolist() == [9, length, 6]
        for held, was in zip(cache._all(), before, strict=True):
            assert torch.equal(held[:, [0, 2]], was)
        blocks = [[5, 7], [9, 4], [3, 8]] if length % 2 else [[5, 7, 9, 2], [9, 4, 4, 1], [3] * 4]
        check_step(static, cache, texts, blocks, name in FLOAT32)


def with_backbone(target: Any, kind: str, window: int | None) -> DSparkDrafter:
    config = drafter_for(target).config
    more: dict[str, Any] = {"backbone": kind}
    if window is not None:
        more |= {"sliding_window": window, "layer_types": ("sliding_attention",)}
    if kind != "attention":
        more |= {"num_key_value_heads": 2, kind: SHAPES[kind]}
    torch.manual_seed(4)
    return DSparkDrafter(replace(config, **more)).double()


@pytest.mark.parametrize(
    ("kind", "window"), [("attention", None), ("attention", 6), ("mla", None), ("kda", None)]
)
@torch.inference_mode()
def test_contexts_draft_as_after_an_ordinary_reading(kind: str, window: int | None) -> None:
    static = static_of("llama")
    drafter = with_backbone(static.target, kind, window)
    reader, ordinary = reader_of(static, drafter), PromptReader(static.target, drafter)
    block = torch.randn(2, BLOCK, static.target.hidden_size, dtype=torch.float64)
    for length in LENGTHS:
        drafts = []
        for each in (reader, ordinary):
            context = drafter.new_context(2, LONGEST + BLOCK, PrivateStorage())
            context.fix_shapes(in_place=True)
            for row, text in enumerate((prompt_of(11), prompt_of(length))):
                read = each.read(text)
                assert read.context is not None
                context.put(row, read.context)
            assert context.lengths.tolist() == [11, length]
            drafts.append(drafter.block_hidden(block, context))
        assert_close(drafts[0], drafts[1], limit=1e-9, what=f"drafts behind {length}")


def forbidden(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("an ordinary pass of the target")


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "gpt2"])
@pytest.mark.parametrize("draft", [False, True])
def test_no_ordinary_pass_reads_a_prompt(
    name: str, draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of up to three chunks on two seats, read while the other seat is in its text."""
    target = row_target(tiny_hf(name), name)
    asked = [Request(prompt_of(n), 6, end_token_ids=(), index=n) for n in (1, 33, 4, 17, 5, 30)]
    theirs = expected(target, asked)
    drafter = drafter_for(target) if draft else None
    decoder = GraphDecoder(target, drafter, seats=2, max_length=LONGEST)
    monkeypatch.setattr(target, "forward", forbidden)
    for _ in range(2):
        assert [g.tokens for g in decoder.generate_many(asked)] == theirs


def test_a_reader_given_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    target = row_target(tiny_hf("llama"))
    decoder = GraphDecoder(target, max_length=LONGEST, reader=PromptReader(target, None))
    monkeypatch.setattr(target, "forward", forbidden)
    with pytest.raises(AssertionError, match="ordinary pass"):
        decoder.generate(prompt_of(5), max_new_tokens=4)


def test_padding_does_not_look_behind_a_table_of_positions() -> None:
    """38 positions: the last chunk of 37 tokens would be padded up to the 40 that a seat has."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**ROWS["gpt2"][1], "n_positions": 38})
    target = row_target(transformers.GPT2LMHeadModel(config).eval(), "gpt2")
    assert target.max_positions == 38
    assert HFStatic(target).reading(38) is not None
    asked = [Request(prompt_of(37), 1, end_token_ids=())]
    decoder = GraphDecoder(target, max_length=LONGEST)
    assert [g.tokens for g in decoder.generate_many(asked)] == expected(target, asked)


def test_chunks_that_cannot_be_recorded_are_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> StaticReader:
        raise NotRecorded("a value is read")

    target = row_target(tiny_hf("llama"))
    theirs = expected(target, requests())
    monkeypatch.setattr(graph_decode, "StaticReader", refused)
    decoder = GraphDecoder(target, drafter_for(target), seats=2, max_length=LONGEST)
    assert [g.tokens for g in decoder.generate_many(requests())] == theirs


@torch.inference_mode()
def test_chunks_and_what_is_said_of_them() -> None:
    """The fewest rows that hold what is left; sizes that no prompt needs are not recorded."""
    static = static_of("llama")
    heard: list[tuple[int, int]] = []
    with watch_reading(lambda read, total: heard.append((read, total))):
        reader_of(static).read(prompt_of(37))
        reader_of(static).read(prompt_of(20))
    assert heard == [(0, 37), (16, 37), (32, 37), (37, 37), (0, 20), (16, 20), (20, 20)]
    assert [static.reading(n).rows for n in (1, 4, 5, 99)] == [(4,), (4,), (4, 16), (4, 16)]


def test_bad_logits_of_a_prompt_do_not_outlive_it() -> None:
    model = tiny_hf("llama")
    target = row_target(model)
    theirs = expected(target, requests())
    decoder = GraphDecoder(target, drafter_for(target), seats=2, max_length=LONGEST)
    embedding = model.get_input_embeddings().weight
    kept = embedding[119].clone()
    embedding[119] = torch.nan
    with pytest.raises(BadLogits, match="position 9"):
        decoder.generate([119] * 9, max_new_tokens=4)
    embedding[119] = kept
    assert [g.tokens for g in decoder.generate_many(requests())] == theirs


@torch.inference_mode()
def test_a_seat_or_context_of_other_sizes_is_refused() -> None:
    static = static_of("llama")
    drafter = with_backbone(static.target, "attention", None)
    read = reader_of(static, drafter).read(prompt_of(5))
    with pytest.raises(ValueError, match="a seat of another length"):
        static.new_cache(2, LONGEST + 1, 4).load(0, read.cache)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a seat of another length"):
        static_of("gpt2").new_cache(2, LONGEST, 4).load(0, read.cache)  # type: ignore[arg-type]
    longer = drafter.new_context(2, LONGEST + BLOCK + 1)
    growing = drafter.new_context(2, LONGEST + BLOCK)
    longer.fix_shapes()
    assert read.context is not None
    for context in (longer, growing):
        with pytest.raises(ValueError, match="shapes fixed like"):
            context.put(0, read.context)
