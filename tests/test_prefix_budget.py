"""Where the prefix cache keeps checkpoints, how many bytes they take, and what has to go first."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prefix_setup import check, checkpoints, new_cache, new_cache_like, read, text
from tests.tolerance import assert_close


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


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"host_bytes": -1}])
def test_budgets_are_checked(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="expected at least"):
        new_cache(**wrong)
