"""Idle states leave a GPU while it computes, and come back to the bit."""

from __future__ import annotations

import pytest
import torch

from dspark.k3.snapshot import Snapshot
from tests.k3_tiny import TINY, tiny_model, tiny_tokens
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
MIB = 2**20


def large(count: int, mib: int) -> Snapshot:
    """So many states of that size; nothing of it is decoded."""
    states = tuple(
        (torch.randn(mib * MIB // 4, device=GPU), torch.randn(8, device=GPU)) for _ in range(count)
    )
    return Snapshot(TINY, 0, 0, states, ())


def busy(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def test_a_text_goes_on_from_states_that_were_away() -> None:
    model = tiny_model().to(GPU)
    tokens, more = tiny_tokens(1, 20).to(GPU), tiny_tokens(1, 3, seed=1).to(GPU)
    cache = model.new_cache(1, 40)
    model(tokens, cache)
    away = cache.snapshot(0).states_to_host()
    expected = model(more, cache)[0]
    again = model.new_cache(1, 40)
    again.restore(0, away)
    assert all(x.is_pinned() for pair in away.recurrent for x in pair)
    assert_close(model(more, again)[0], expected)


def test_the_host_does_not_wait_and_the_memory_is_not_used_before() -> None:
    """Behind 50 ms of work nothing can have left; what is allocated in between is other memory."""
    given = large(8, 16)
    expected = [state.double().sum().item() for state, _ in given.recurrent]
    busy(50)
    away = given.states_to_host()
    assert away.arrived is not None
    assert not away.arrived.query()
    del given
    for _ in range(8):
        torch.full((16 * MIB // 4,), torch.nan, device=GPU)
    away.wait()
    assert [state.double().sum().item() for state, _ in away.recurrent] == pytest.approx(expected)


def test_they_leave_while_what_is_queued_behind_them_runs() -> None:
    """512 MiB take 10 ms and more; they are there before 200 ms of later work are over."""
    large(8, 64).states_to_host().wait()  # pinned memory is there from now on
    away = large(8, 64).states_to_host()
    busy(200)
    over = torch.cuda.current_stream().record_event()
    away.wait()
    assert not over.query()
    over.synchronize()
