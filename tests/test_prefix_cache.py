"""The prefix cache: it saves reading and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.frames import FrameScheduler
from dspark.runtime.hf_open import hf_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.pool import StatePool
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from dspark_eval import prefix_reuse
from tests.headings import assert_headed
from tests.hf_tiny import tiny_hf
from tests.prefix_setup import (
    DRAFTERS,
    GREEDY,
    PLENTY,
    WARM,
    check,
    checkpoints,
    drafter,
    new_cache,
    new_cache_like,
    read,
    target,
    text,
)

every_drafter = pytest.mark.parametrize("kind", DRAFTERS)


@every_drafter
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_tokens_are_the_same_with_and_without(kind: str, sampling: SamplingParams):
    """Prompts that share beginnings, one twice, one that is the beginning of another."""
    decoder = SpeculativeDecoder(target(), drafter(kind))
    held = new_cache(kind)
    common = text(30)
    prompts = [common + text(n, seed) for n, seed in ((9, 5), (12, 6), (9, 5), (1, 7))]
    prompts += [common, common + text(12, 6) + text(5, 8), text(20, 9)]
    for seed, prompt in enumerate(prompts):
        wanted, got = (
            decoder.generate(
                prompt, max_new_tokens=10, sampling=sampling, seed=seed, prefix_cache=given
            ).tokens
            for given in (None, held)
        )
        assert got == wanted
    assert held.stats().hits >= 4
    check(held)


def test_plain_decoding_uses_it_too():
    held, common = new_cache(), text(24)
    for seed in (5, 6, 6, 7):
        prompt = common + text(8, seed)
        wanted, got = (
            plain_generate(
                target(), prompt, max_new_tokens=8, sampling=WARM, seed=seed, prefix_cache=given
            ).tokens
            for given in (None, held)
        )
        assert got == wanted
    assert held.stats().reused == 32 + 24  # the third prompt whole, of the fourth what they share


@every_drafter
def test_batches_and_frames_use_it_and_share_it(kind: str):
    """One cache for a ragged batch, for frames whose requests live in a pool, and for one request
    alone: whoever comes later finds what the others kept."""
    held, common = new_cache(kind), text(24)
    requests = [Request(common + text(n, n), 8, index=n) for n in (5, 6, 7, 8)]
    decoder = SpeculativeDecoder(target(), drafter(kind))
    wanted = [
        plain_generate(target(), r.prompt_ids, max_new_tokens=8, sampling=GREEDY).tokens
        for r in requests
    ]
    many = decoder.generate_many(requests, sampling=GREEDY, batch=3, prefix_cache=held)
    assert [one.tokens for one in many] == wanted
    assert held.stats().reused == 2 * 24
    pool = StatePool(target(), drafter(kind), 1 << 23, page_tokens=8)
    scheduler = FrameScheduler(
        target(), drafter(kind), max_length=48, slots=2, pool=pool, prefix_cache=held
    )
    handles = [scheduler.submit(request) for request in requests]
    scheduler.run()
    assert [handle.tokens for handle in handles] == wanted
    assert held.stats().reused == 2 * 24 + sum(len(r.prompt_ids) for r in requests)
    check(held)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-next", "mamba"])
def test_transformers_models_use_it_too(name: str):
    """Their snapshots hold everything, so that no checkpoint needs another."""
    other = hf_target(tiny_hf(name), name=name, end_token_ids=())
    held = PrefixCache(other, None, PLENTY, host_bytes=PLENTY, least_tokens=4)
    common, tails = text(20), (text(6, 5), text(7, 6), text(6, 5), [3])
    for tail in tails:
        prompt = common + tail
        wanted, got = (
            plain_generate(
                other, prompt, max_new_tokens=8, sampling=GREEDY, prefix_cache=given
            ).tokens
            for given in (None, held)
        )
        assert got == wanted
        # the next one moves states to the host; hidden states stay, and need a little room
        held.budget_bytes = held.stats().device_bytes + 1000
    assert (held.stats().hits, held.stats().reused) == (2, 26 + 20)
    assert held.stats().offloaded
    assert all(kept.start == 0 for kept in checkpoints(held).values())


@every_drafter
def test_bit_for_bit_where_chunks_begin_alike(kind: str):
    """A prefix that ends at a multiple of the chunk: state and logits are those of reading it all.
    The same prompt again is not read at all."""
    held, prompt = new_cache(kind), text(40)
    expected, fresh, _ = read(new_cache_like(held), prompt, chunk=16)
    read(held, prompt[:32], chunk=16)
    for reused in (32, 40):
        before = held.stats().reused
        logits, made, _ = read(held, prompt, chunk=16)
        assert held.stats().reused - before == reused
        assert torch.equal(logits, expected)
        for ours, theirs in zip(made.layers, fresh.layers, strict=True):
            if hasattr(ours, "latents"):
                assert torch.equal(ours.latents[:, :40], theirs.latents[:, :40])
            else:
                assert torch.equal(ours.state, theirs.state)
                assert torch.equal(ours.window, theirs.window)


def test_what_a_request_does_later_reaches_no_checkpoint():
    """Snapshots share no memory with the cache they were taken of, nor with one made of them."""
    held, prompt = new_cache("kda"), text(20)
    decoder = SpeculativeDecoder(target(), drafter("kda"))
    for _ in range(2):
        decoder.generate(prompt, max_new_tokens=12, sampling=WARM, prefix_cache=held)
    _, made, context = read(held, prompt)
    for layer in made.layers:
        for name in ("state", "window", "latents"):
            if hasattr(layer, name):
                getattr(layer, name).fill_(torch.nan)
        with torch.inference_mode():
            context.state.fill_(torch.nan)
    check(held)


def test_the_command_that_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "reuse.json"
    asked = ["--shared", "40", "--prompts", "4", "--max-new-tokens", "3", "--json", str(out)]
    assert prefix_reuse.main(asked) == 0
    found = json.loads(out.read_text())
    assert_headed(found, "prefix_reuse", asked, None)
    assert (found["mismatches"], found["requests"], found["hits"]) == (0, 4, 2)
    assert found["reused"] >= 2 * 40
    assert found["asked"] == found["prompt_tokens"]
    assert "hit_rate  0.5" in capsys.readouterr().out
    assert prefix_reuse.main(["--shared", "10000000"]) == 2
    assert "more than the shipped prompts have" in capsys.readouterr().err
