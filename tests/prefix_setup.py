"""A tiny target with drafters of every kind, and prefix caches for them with what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dspark.draft import DraftConfig, DSparkDrafter
from dspark.draft.shapes import KDAShape, MLAShape
from dspark.runtime import checkpoint
from dspark.runtime.checkpoint import Checkpoint
from dspark.runtime.k3_target import K3Target
from dspark.runtime.prefill import prefill
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.sampling import SamplingParams, request_generator
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
