"""The prefix cache: it saves reading and changes nothing, whatever fails on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.draft import DraftConfig, DSparkDrafter
from dspark.draft.shapes import KDAShape, MLAShape
from dspark.errors import UserError
from dspark.runtime import checkpoint, prefix_cache, prefix_tree
from dspark.runtime.checkpoint import Checkpoint, take
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.frames import FrameScheduler
from dspark.runtime.hf_open import hf_target
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.pool import StatePool
from dspark.runtime.prefill import prefill
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.requests import Request
from dspark.runtime.sampling import BadLogits, SamplingParams, request_generator
from dspark_eval import prefix_reuse
from tests.hf_tiny import tiny_hf
from tests.k3_tiny import TINY, tiny_model, tiny_tokens
from tests.tolerance import assert_close

GREEDY, WARM = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)
PLENTY = 10**9
BASE = DraftConfig(
    hidden_size=TINY.hidden_size,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=TINY.vocab_size,
    num_target_layers=TINY.num_hidden_layers,
    target_layer_ids=(1, 3),
    target_tap_kind="attn_res_mixture",
    mask_token_id=0,
    block_size=4,
    markov_rank=8,
)
DRAFTERS = {
    "attention": replace(BASE, num_key_value_heads=1),
    "kda": replace(BASE, backbone="kda", kda=KDAShape(gate_rank=4)),
    "mla": replace(
        BASE,
        backbone="mla",
        mla=MLAShape(
            q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
        ),
    ),
}
every_drafter = pytest.mark.parametrize("kind", DRAFTERS)


@cache
def target() -> K3Target:
    return K3Target(tiny_model(), "tiny", (2,))


@cache
def drafter(kind: str) -> DSparkDrafter:
    torch.manual_seed(0)
    return DSparkDrafter(DRAFTERS[kind]).eval()


def text(length: int, seed: int = 1) -> list[int]:
    return tiny_tokens(1, length, seed=seed)[0].tolist()


def new_cache(kind: str | None = None, budget: int = PLENTY, **more: int) -> PrefixCache:
    return PrefixCache(target(), kind and drafter(kind), budget, least_tokens=4, **more)


def read(
    held: PrefixCache, prompt: Sequence[int], chunk: int = 16
) -> tuple[Tensor, Any, Any | None]:
    """Read a prompt through a prefix cache: the next token's logits, cache and context."""
    made = target().new_cache(1, len(prompt) + 8)
    context = held.drafter and held.drafter.new_context(1, len(prompt) + 8)
    taps = None if held.drafter is None else held.drafter.taps
    seen: list[Tensor] = []
    with torch.inference_mode():
        prefill(
            _Watched(seen),
            made,
            prompt,
            GREEDY,
            request_generator(0, 0, torch.device("cpu")),
            taps=taps,
            on_taps=lambda features: held.drafter.extend(context, features),
            chunk=chunk,
            prefix=held.open(prompt, made, context),
        )
    return seen[-1], made, context


class _Watched:
    """The target, its logits noted."""

    def __init__(self, seen: list[Tensor]) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(target(), name)

    def logits(self, hidden: Tensor) -> Tensor:
        self._seen.append(target().logits(hidden).clone())
        return self._seen[-1]


def checkpoints(held: PrefixCache) -> dict[tuple[int, ...], Checkpoint]:
    """All of them by text."""
    found: dict[tuple[int, ...], Checkpoint] = {}
    stack: list[tuple[Any, tuple[int, ...]]] = [(held._tree.root, ())]
    while stack:
        node, tokens = stack.pop()
        if node.value is not None:
            found[tokens] = node.value
        stack += [(child, tokens + child.tokens) for child in node.children.values()]
    return found


def check(held: PrefixCache) -> None:
    """Every checkpoint is complete and true, and the bytes are what the tensors are."""
    for tokens, kept in checkpoints(held).items():
        assert kept.length == len(tokens)
        hit = held.lookup(tokens)
        assert hit is not None, "a checkpoint that nothing can be done with"
        assert hit.length == len(tokens)
        made = target().new_cache(1, len(tokens) + 8)
        context = held.drafter and held.drafter.new_context(1, len(tokens) + 8)
        checkpoint.restore(hit.chain, made, context)
        fresh_logits, fresh, fresh_context = read(new_cache_like(held), tokens)
        assert_close(target().logits(kept.hidden), fresh_logits, limit=1e-5)
        assert_same(made, fresh)
        if context is not None:
            assert context.row_lengths == fresh_context.row_lengths
            assert_close(context_tensor(context), context_tensor(fresh_context), limit=1e-5)
    stats = held.stats()
    assert (stats.device_bytes, stats.host_bytes) == real_bytes(held)
    assert stats.device_bytes <= held.budget_bytes
    assert stats.host_bytes <= held.host_bytes


def new_cache_like(held: PrefixCache) -> PrefixCache:
    return PrefixCache(target(), held.drafter, PLENTY, least_tokens=10**6)


def assert_same(made: Any, fresh: Any) -> None:
    length = int(fresh.lengths[0])
    assert int(made.lengths[0]) == length
    for ours, theirs in zip(made.layers, fresh.layers, strict=True):
        if hasattr(ours, "latents"):
            assert_close(ours.latents[:, :length], theirs.latents[:, :length], limit=1e-5)
        else:
            assert_close(ours.state, theirs.state, limit=1e-5)
            assert_close(ours.window, theirs.window, limit=1e-5)


def context_tensor(context: Any) -> Tensor:
    """Something of a context that every position has left its mark on."""
    length = context.row_lengths[0]
    if hasattr(context, "state"):
        return context.state
    if hasattr(context, "latents"):
        return context.latents[0][:, :, :length]
    return context.buffers[0].keys[:, :, :, :length]


def real_bytes(held: PrefixCache) -> tuple[int, int]:
    """Device and host bytes of every tensor, by looking at the tensors."""
    device = host = 0
    for kept in checkpoints(held).values():
        states = sum(s.nbytes + w.nbytes for s, w in kept.state.recurrent)
        device += sum(x.nbytes for x in kept.state.latents) + kept.hidden.nbytes
        device += 0 if kept.context is None else kept.context.nbytes
        host, device = (host + states, device) if kept.on_host else (host, device + states)
    return device, host


# --- it changes nothing --------------------------------------------------------------------------


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
    size = ["--shared", "40", "--prompts", "4", "--max-new-tokens", "3"]
    assert prefix_reuse.main([*size, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["mismatches"], found["requests"], found["hits"]) == (0, 4, 2)
    assert found["reused"] >= 2 * 40
    assert found["asked"] == found["prompt_tokens"]
    assert "hit_rate  0.5" in capsys.readouterr().out
    with pytest.raises(UserError, match="more than the shipped prompts have"):
        prefix_reuse.main(["--shared", "10000000"])


# --- where checkpoints are -----------------------------------------------------------------------


def test_a_hit_reaches_the_deepest_checkpoint_and_partings_get_one():
    held, common = new_cache(), text(24)
    read(held, common + text(8, 5))
    assert [len(t) for t in checkpoints(held)] == [32]
    _, made, _ = read(held, common + text(8, 6))
    assert held.stats().hits == 0, "the state at the parting was never kept"
    assert sorted(len(t) for t in checkpoints(held)) == [24, 32, 32]
    assert int(made.lengths[0]) == 32
    read(held, common + text(8, 7))
    assert (held.stats().hits, held.stats().reused) == (1, 24)
    lengths = {c.length: c.start for c in checkpoints(held).values()}
    assert lengths == {24: 0, 32: 24}, "latents of the shared part are held once"
    check(held)


@pytest.mark.parametrize("length", [1, 3, 4])
def test_short_prefixes_are_not_worth_a_state(length: int):
    held = new_cache()
    read(held, text(length))
    assert held.stats().checkpoints == (length >= 4)


def test_statistics_add_up():
    held, common = new_cache(), text(24)
    assert held.stats().hit_rate is None
    assert held.stats().saved_s is None
    for seed in (5, 6, 7):
        read(held, common + text(8, seed))
    stats = held.stats()
    assert (stats.requests, stats.hits, stats.asked, stats.reused) == (3, 1, 96, 24)
    assert (stats.hit_rate, stats.token_hit_rate) == (1 / 3, 0.25)
    assert stats.saved_s == pytest.approx(24 * stats.read_s / 72 - stats.restore_s)
    held.clear()
    assert (held.stats().checkpoints, held.stats().requests) == (0, 3)


# --- bytes ---------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first():
    one = bytes_of_one(20)
    held = new_cache(budget=3 * one)
    prompts = [text(20, seed) for seed in (5, 6, 7, 8)]
    for prompt in prompts[:3]:
        read(held, prompt)
    read(held, prompts[0])
    read(held, prompts[3])
    assert set(checkpoints(held)) == {tuple(prompts[i]) for i in (0, 2, 3)}
    assert held.stats().evicted == 1
    check(held)


def test_what_a_text_builds_on_is_never_dropped_for_it():
    """Room for one checkpoint and a bit: the longer text cannot push its own beginning out."""
    held = new_cache(budget=bytes_of_one(20) + 100)
    prompt = text(20)
    read(held, prompt)
    read(held, prompt + text(20, 5))
    assert [len(t) for t in checkpoints(held)] == [20]
    assert (held.stats().refused, held.stats().evicted) == (1, 0)
    check(held)


def test_a_checkpoint_larger_than_the_budget_is_not_kept_and_drops_nothing():
    held = new_cache(budget=bytes_of_one(20))
    read(held, text(20))
    read(held, text(60, 5))
    assert [len(t) for t in checkpoints(held)] == [20]
    assert held.stats().refused == 1


def test_idle_states_move_to_the_host_before_anything_is_dropped():
    one, states = bytes_of_one(20), states_of_one(20)
    held = new_cache(budget=2 * one, host_bytes=2 * states)
    for seed in (5, 6, 7):
        read(held, text(20, seed))
    moved = {tokens for tokens, kept in checkpoints(held).items() if kept.on_host}
    assert moved == {tuple(text(20, seed)) for seed in (5, 6)}, "one would not have been enough"
    stats = held.stats()
    assert (stats.offloaded, stats.evicted, stats.host_bytes) == (2, 0, 2 * states)
    assert stats.checkpoints == 3
    check(held)
    before = held.stats().reused
    expected, _, _ = read(new_cache_like(held), text(20, 5))
    logits, _, _ = read(held, text(20, 5))
    assert held.stats().reused - before == 20
    assert torch.equal(logits, expected)


@cache
def bytes_of_one(length: int) -> int:
    held = new_cache()
    read(held, text(length))
    return held.stats().device_bytes


@cache
def states_of_one(length: int) -> int:
    held = new_cache()
    read(held, text(length))
    (kept,) = checkpoints(held).values()
    return kept.movable


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_traffic_within_any_budget(data: st.DataObject):
    """Prompts of a few pieces, so that they share and part at random; every logit is that of
    reading the prompt alone, and the budgets hold after every request."""
    pieces = [text(6, seed) for seed in range(3, 6)]
    budget = data.draw(st.integers(1, 6)) * bytes_of_one(20)
    host = data.draw(st.integers(0, 3)) * states_of_one(20)
    held = new_cache(data.draw(st.sampled_from([None, "kda"])), budget, host_bytes=host)
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        prompt = [token for i in chosen for token in pieces[i]][: data.draw(st.integers(1, 24))]
        logits, _, _ = read(held, prompt)
        expected, _, _ = read(new_cache_like(held), prompt)
        assert_close(logits, expected, limit=1e-5)
        assert held.stats().device_bytes <= budget
        assert held.stats().host_bytes <= host
    check(held)


# --- failures ------------------------------------------------------------------------------------

WATCHED = {module.__file__ for module in (checkpoint, prefix_cache, prefix_tree)}


class Planted(Exception):
    """The failure under test."""


@contextmanager
def failing_at(step: int) -> Iterator[Callable[[], int]]:
    """Raise Planted before the `step`-th line that the prefix cache executes, counted from 0.

    Yields a function: how many lines were executed.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            lines += 1
            if lines == step + 1:
                sys.settrace(None)
                raise Planted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: lines
    finally:
        sys.settrace(before)


def prepared() -> PrefixCache:
    """A cache about to do everything at once for `BUSY`: split an edge, hold a parting, move a
    state to the host and drop a leaf."""
    held = new_cache("kda")
    for tokens, kept in prepared_checkpoints().items():
        assert held.insert(tokens, kept)
    held.budget_bytes = held.stats().device_bytes
    held.host_bytes = max(kept.movable for kept in prepared_checkpoints().values())
    return held


@cache
def prepared_checkpoints() -> dict[tuple[int, ...], Checkpoint]:
    held = new_cache("kda")
    for prompt in (text(8, 9), text(8, 10), text(12) + text(6, 5)):
        read(held, prompt)
    return checkpoints(held)


BUSY = text(12) + text(6, 6)


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_a_failure_at_any_line_leaves_a_cache_that_is_whole(stride: int):
    """The request fails, and that is all: what is in the tree is true, within budget and usable,
    and the same request then goes through."""
    held = prepared()
    with failing_at(10**9) as lines:
        read(held, BUSY)
    total, stats = lines(), held.stats()
    assert total > 100
    assert stats.offloaded
    assert stats.evicted
    assert {12, 18} <= {len(tokens) for tokens in checkpoints(held)}
    for step in range(stride // 2, total, stride):
        held = prepared()
        with pytest.raises(Planted), failing_at(step):
            read(held, BUSY)
        check_quickly(held)
        held.host_bytes += 10**6  # whatever was moved before the failure, there is room again
        read(held, BUSY)
        check_quickly(held)
        assert tuple(BUSY) in checkpoints(held)


CHECKED: dict[tuple[int, ...], object] = {}
KEPT: list[Any] = []
"""What was checked stays alive: a new tensor must not get the identity of an old one."""


@cache
def truth(tokens: tuple[int, ...]) -> tuple[Tensor, Any, Any]:
    return read(PrefixCache(target(), drafter("kda"), PLENTY, least_tokens=10**6), tokens)


def check_quickly(held: PrefixCache) -> None:
    """As `check`, against states that were made once; the same tensors are compared once."""
    for tokens, kept in checkpoints(held).items():
        hit = held.lookup(tokens)
        assert hit is not None
        held_by = tuple(id(tensor) for one in hit.chain for tensor in one.state.latents)
        if CHECKED.get(tokens) == (held_by, id(kept.context)):
            continue
        CHECKED[tokens] = held_by, id(kept.context)
        KEPT.append(hit)
        made = target().new_cache(1, len(tokens) + 8)
        context = drafter("kda").new_context(1, len(tokens) + 8)
        checkpoint.restore(hit.chain, made, context)
        logits, fresh, fresh_context = truth(tokens)
        assert_close(target().logits(kept.hidden), logits, limit=1e-5)
        assert_same(made, fresh)
        assert_close(context.state, fresh_context.state, limit=1e-5)
    stats = held.stats()
    assert (stats.device_bytes, stats.host_bytes) == real_bytes(held)
    assert stats.device_bytes <= held.budget_bytes
    assert stats.host_bytes <= held.host_bytes


def test_a_request_with_bad_logits_leaves_nothing():
    held, prompt = new_cache(), text(20)
    broken = K3Target(tiny_model(), "broken", (2,))
    held.target = broken
    broken.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(BadLogits):
        plain_generate(broken, prompt, max_new_tokens=2, sampling=GREEDY, prefix_cache=held)
    assert held.stats().checkpoints == held.stats().requests == 0


def test_states_of_another_model_or_drafter_are_refused():
    held = new_cache("kda")
    decoder = SpeculativeDecoder(target(), drafter("attention"))
    with pytest.raises(ValueError, match="another target or drafter"):
        decoder.generate(text(8), max_new_tokens=2, sampling=GREEDY, prefix_cache=held)
    with pytest.raises(ValueError, match="another target or drafter"):
        plain_generate(target(), text(8), max_new_tokens=2, sampling=GREEDY, prefix_cache=held)


def test_a_drafter_that_lags_behind_the_target_is_noticed():
    made = target().new_cache(1, 16)
    hidden = target().forward(tiny_tokens(1, 8), made, commit=True).hidden[:, -1]
    context = drafter("kda").new_context(1, 16)
    with pytest.raises(ValueError, match="the target has read 8 tokens, the drafter 0"):
        take(made, drafter("kda"), context, hidden, 0)
    with pytest.raises(ValueError, match="a checkpoint of 8 tokens for 7"):
        new_cache().insert(text(7), take(made, None, None, hidden, 0))


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"host_bytes": -1}])
def test_budgets_are_checked(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="expected at least"):
        new_cache(**wrong)


def test_a_base_that_left_meanwhile_refuses_the_checkpoint():
    """Two requests at once: the second's insertions drop what the first one started behind."""
    held, prompt = new_cache(), text(40)
    read(held, prompt[:20])
    _, made, _ = read(new_cache_like(held), prompt)
    hidden = torch.zeros(1, TINY.hidden_size)
    late = take(made, None, None, hidden, start=20)
    held.clear()
    assert not held.insert(prompt, late)
    assert held.stats().checkpoints == 0
    assert held.insert(prompt, take(made, None, None, hidden, start=0))
