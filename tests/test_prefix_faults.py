"""Whatever fails on the way, the prefix cache holds whole texts or nothing of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.runtime import checkpoint, prefix_cache, prefix_tree
from dspark.runtime.checkpoint import Checkpoint, take
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.sampling import BadLogits
from tests.k3_tiny import TINY, tiny_model, tiny_tokens
from tests.prefix_setup import (
    GREEDY,
    PLENTY,
    assert_same,
    checkpoints,
    drafter,
    new_cache,
    new_cache_like,
    read,
    real_bytes,
    target,
    text,
)
from tests.tolerance import assert_close

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
