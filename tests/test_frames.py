"""Frames against the unscheduled loop: the same texts, in the promised order, whoever comes.

The table target has the same logits in every batch, so texts are compared exactly, at temperature 0
with plain decoding and at others with what the request says alone. The law is tested on its own.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.frame_report import Handle, Slot
from dspark.runtime.frames import FrameScheduler
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import Bands, Confidence, Entropy, Fixed, Frontier, Policy
from dspark.runtime.pool import PoolFull, StatePool
from dspark.runtime.requests import Request
from dspark.runtime.rules import Rules
from dspark.runtime.sampling import BadLogits, SamplingParams
from tests.k3_tiny import TINY, tiny_model
from tests.table_target import TableDrafter, TableTarget
from tests.test_adaptive import ADAPTIVE
from tests.test_decode_k3 import real_drafter
from tests.test_decode_law import assert_law, joint

GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.9, 0.95)
OWN = [Fixed(4), Entropy(1, h_stop=1.5), Bands(Confidence(1, s_stop=0.2), 0.95, 0.1, 2, 1)]
"""Policies that decide about a row by that row alone."""
own_policies = pytest.mark.parametrize("policy", OWN, ids=lambda policy: type(policy).__name__)
VOCAB = 13


def _pair(seed: int = 2, noise: float = 0.5) -> tuple[TableTarget, TableDrafter]:
    target = TableTarget.random(VOCAB, seed)
    return target, TableDrafter.of(target, 5, noise=noise, seed=seed)


def _requests(count: int, seed: int, vocab: int = VOCAB) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(vocab) for _ in range(rng.randint(1, 12))],
            rng.choice([1, 2, 3, 7, 30]),
            end_token_ids=rng.sample(range(vocab), rng.choice([0, 1, 2, 4])),
            seed=seed,
            index=index,
        )
        for index in range(count)
    ]


def _plain(target: TableTarget, request: Request) -> list[int]:
    return plain_generate(
        target,
        request.prompt_ids,
        max_new_tokens=request.max_new_tokens,
        sampling=GREEDY,
        end_token_ids=request.end_token_ids,
        stop=request.stop,
    ).tokens


def _run(scheduler: FrameScheduler, requests: list[Request]) -> list[Handle]:
    handles = [scheduler.submit(request) for request in requests]
    scheduler.run()
    return handles


@own_policies
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_greedy_frames_say_what_plain_decoding_says(policy: Policy, groups: int) -> None:
    target, drafter = _pair()
    requests = _requests(14, seed=groups)
    scheduler = FrameScheduler(
        target, drafter, max_length=42, slots=2, groups=groups, policy=policy
    )
    for request, handle in zip(requests, _run(scheduler, requests), strict=True):
        result = handle.generation()
        assert result.tokens == _plain(target, request)
        assert len(result.tokens) == 1 + sum(r.emitted for r in result.rounds)
        for r in result.rounds:
            assert 0 <= r.accepted <= r.verified <= r.drafted <= 5
    assert not scheduler.busy


@own_policies
@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 500), sampled=st.booleans())
def test_random_arrivals_change_no_text(
    policy: Policy, data: st.DataObject, seed: int, sampled: bool
) -> None:
    """Requests of any length, end tokens anywhere, joining at any step, streams read on the way."""
    target, drafter = _pair(seed % 5)
    sampling = SAMPLED if sampled else GREEDY
    groups = data.draw(st.integers(1, 2))
    slots = data.draw(st.integers(1, 3))
    options = {"max_length": 42, "policy": policy, "sampling": sampling}
    scheduler = FrameScheduler(target, drafter, slots=slots, groups=groups, **options)
    requests = _requests(data.draw(st.integers(1, 8)), seed)
    streams: list[list[int]] = [[] for _ in requests]
    handles = []
    for request, stream in zip(requests, streams, strict=True):
        for _ in range(data.draw(st.integers(0, 6))):
            scheduler.step()
        heard = Request(**{**request.__dict__, "on_tokens": stream.extend})
        handles.append(scheduler.submit(heard))
    scheduler.run()
    for request, handle, stream in zip(requests, handles, streams, strict=True):
        alone = FrameScheduler(target, drafter, slots=1, groups=1, **options)
        (expected,) = _run(alone, [request])
        assert stream == handle.tokens == expected.tokens
        rounds = [(r.verified, r.accepted, r.level) for r in handle.generation().rounds]
        assert rounds == [(r.verified, r.accepted, r.level) for r in expected.generation().rounds]
        if not sampled:
            assert stream == _plain(target, request)
    for cache in target.caches:
        assert cache.pending is None


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_fixed_length_says_what_generate_says_for_the_seed(sampling: SamplingParams) -> None:
    target, drafter = _pair()
    scheduler = FrameScheduler(
        target, drafter, max_length=60, slots=2, policy=Fixed(4), sampling=sampling
    )
    requests = [Request([3, n], 25 + n, seed=n) for n in range(6)]
    decoder = SpeculativeDecoder(target, drafter)
    for request, handle in zip(requests, _run(scheduler, requests), strict=True):
        text = decoder.generate(
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            sampling=sampling,
            seed=request.seed,
            draft_length=4,
        )
        assert handle.tokens == text.tokens
        counts = [(r.drafted, r.verified, r.accepted, r.level) for r in text.rounds]
        assert counts == [
            (r.drafted, r.verified, r.accepted, r.level) for r in handle.generation().rounds
        ]


def test_slots_come_in_the_order_of_the_schedule() -> None:
    """Two groups take turns; a frame is read when the next one of its group has been queued."""
    target, drafter = _pair()
    slots: list[Slot] = []
    scheduler = FrameScheduler(
        target, drafter, max_length=60, slots=1, policy=Fixed(2), on_slot=slots.append
    )
    _run(scheduler, [Request([1], 40, index=0), Request([2], 40, index=1)])
    queued = [(s.group, s.frame, s.kind) for s in slots if s.kind != "read"]
    start = [(0, 0, "draft"), (1, 0, "draft"), (0, 0, "verify")]
    assert queued[:3] == start
    for n in range(1, 6):
        at = queued.index((0, n, "draft"))
        assert queued[at : at + 4] == [
            (0, n, "draft"),
            (1, n - 1, "verify"),
            (1, n, "draft"),
            (0, n, "verify"),
        ]
    for group in (0, 1):
        own = [(s.frame, s.kind) for s in slots if s.group == group]
        for n in range(6):
            assert own.index((n, "read")) > own.index((n + 1, "verify"))
            assert own.index((n, "read")) < own.index((n + 2, "draft"))


def test_the_size_of_a_slot_rests_on_frames_two_back() -> None:
    """A drafter turns unsure at a known place: the slots follow two frames later, no sooner."""
    target, drafter = _pair()
    unsure: list[bool] = []
    block = drafter.block_hidden

    def block_hidden(embeds: torch.Tensor, context: object) -> torch.Tensor:
        unsure.append(len(unsure) >= 5)
        return block(embeds, context) * (0 if unsure[-1] else 1)

    class Scripted(Fixed):
        """Wants everything while the draft is sure, and one token when it is not."""

        def plan(self, frontier: object) -> None:
            frontier.extend_unseen(1 if unsure[-1] else 5)

    drafter.block_hidden = block_hidden  # type: ignore[method-assign]
    slots: list[Slot] = []
    scheduler = FrameScheduler(
        target, drafter, max_length=99, slots=1, groups=1, policy=Scripted(5), on_slot=slots.append
    )
    _run(scheduler, [Request([1], 60)])
    sizes = [s.size for s in slots if s.kind == "verify"]
    # frame 5 is the first unsure one; its wish of 1 halves the mean: 3 in frame 7, 2 in frame 8
    assert sizes[:9] == [5, 5, 5, 5, 5, 5, 5, 4, 2]


@pytest.mark.parametrize("at", range(7))
def test_nothing_follows_an_end_token_wherever_it_falls(at: int) -> None:
    """First token, every slot of a block, the bonus; while a neighbour goes on."""
    target, drafter = _pair(noise=0.1)
    plain = _plain(target, Request([1, 2], 40))
    ends = [plain[at]]
    scheduler = FrameScheduler(target, drafter, max_length=60, slots=2, groups=1, policy=Fixed(5))
    stream: list[int] = []
    one = Request([1, 2], 40, end_token_ids=ends, on_tokens=stream.extend)
    other = Request([5], 40, end_token_ids=[])
    handles = _run(scheduler, [one, other])
    assert stream == handles[0].tokens == plain[: plain.index(plain[at]) + 1]
    assert handles[0].generation().finish == "end"
    assert handles[1].tokens == _plain(target, other)


@pytest.mark.parametrize("steps", range(9))
def test_a_request_stopped_between_draft_and_verify_leaves_no_trace(steps: int) -> None:
    """Its seat is used again at once; the neighbour's and the successor's texts are as alone."""
    target, drafter = _pair()
    scheduler = FrameScheduler(target, drafter, max_length=60, slots=2, groups=2, policy=Fixed(4))
    requests = [Request([n], 30, index=n) for n in range(4)]
    handles = [scheduler.submit(request) for request in requests]
    for _ in range(steps):
        scheduler.step()
    said = list(handles[1].tokens)
    scheduler.cancel(handles[1])
    late = Request([7, 7], 20)
    after = scheduler.submit(late)
    scheduler.run()
    assert handles[1].tokens == said == _plain(target, requests[1])[: len(said)]
    with pytest.raises(UserError, match="cancelled"):
        handles[1].generation()
    for n in (0, 2, 3):
        assert handles[n].tokens == _plain(target, requests[n])
    assert after.tokens == _plain(target, late)


def test_logits_that_are_not_finite_end_one_request_and_no_other() -> None:
    target, drafter = _pair()
    good = Request([2], 30, index=1)
    expected = _plain(target, good)
    bad_text = _plain(target, Request([1, 9], 30))
    pair = next(
        (a, b)
        for a, b in itertools.pairwise(bad_text)
        if (a, b) not in set(zip([2, *expected], expected, strict=False))
    )
    target.table[pair] = torch.nan
    scheduler = FrameScheduler(target, drafter, max_length=60, slots=2, groups=1, policy=Fixed(4))
    bad, fine, after = _run(scheduler, [Request([1, 9], 30), good, Request([2], 30, index=2)])
    assert fine.tokens == after.tokens == expected
    at = next(n for n in range(len(bad_text)) if (bad_text[n], bad_text[n + 1]) == pair)
    with pytest.raises(BadLogits, match=f"target logits of row 0, position {2 + at + 2}"):
        bad.generation()


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(1.3, 0.8)])
@pytest.mark.parametrize("policy", OWN, ids=lambda policy: type(policy).__name__)
def test_frames_follow_the_targets_law(sampling: SamplingParams, policy: Policy) -> None:
    """The joint law of the first three tokens, 600 requests side by side, at a false-alarm rate
    of 1e-4 per test; a TV of 0.19 is caught with probability 0.99."""
    target = TableTarget.random(3, 8, scale=1.0)
    drafter = TableDrafter.of(target, 5, noise=1.0, seed=2)
    scheduler = FrameScheduler(
        target, drafter, max_length=9, slots=50, policy=policy, sampling=sampling
    )
    handles = _run(scheduler, [Request([1, 2], 6, index=n) for n in range(600)])
    assert_law([handle.tokens[:3] for handle in handles], joint(target, [1, 2], sampling))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@own_policies
def test_a_hybrid_target_in_frames(sampling: SamplingParams, policy: Policy) -> None:
    """States, windows, latents and the draft context of joining and leaving rows."""
    target = K3Target(tiny_model(), "tiny", ())
    drafter = real_drafter()
    rng = random.Random(3)
    requests = [
        Request(
            [rng.randrange(TINY.vocab_size) for _ in range(length)],
            new,
            end_token_ids=range(0, 60, 17),
            index=index,
        )
        for index, (length, new) in enumerate([(3, 20), (17, 5), (40, 16), (1, 1), (5, 12)])
    ]
    options = {"max_length": 60, "policy": policy, "sampling": sampling}
    scheduler = FrameScheduler(target, drafter, slots=1, groups=2, **options)
    for request, handle in zip(requests, _run(scheduler, requests), strict=True):
        alone = FrameScheduler(target, drafter, slots=1, groups=1, **options)
        assert handle.tokens == _run(alone, [request])[0].tokens
        if sampling.greedy:
            assert handle.tokens == _plain(target, request)


def test_seats_and_prompts_live_in_the_pool() -> None:
    target, drafter = K3Target(tiny_model(), "tiny", ()), real_drafter()
    requests = [Request([3 + n, 4], 12, index=n) for n in range(5)]
    room = StatePool(target, drafter, 1 << 24, page_tokens=8)
    scheduler = FrameScheduler(target, drafter, max_length=20, slots=2, pool=room, policy=Fixed(3))
    seats = room.stats().taken
    handles = _run(scheduler, requests)
    assert [h.tokens for h in handles] == [_plain(target, r) for r in requests]
    assert room.stats().taken == seats  # prompts have left
    with pytest.raises(PoolFull):
        FrameScheduler(target, drafter, max_length=10**6, pool=room)
    # room for the seats and not for a prompt beside them: the request is told, the others go on
    tight = StatePool(target, drafter, seats + room.bytes_for(4), page_tokens=8)
    scheduler = FrameScheduler(target, drafter, max_length=20, slots=2, pool=tight, policy=Fixed(3))
    long, short = _run(scheduler, [Request([5] * 12, 8), Request([1], 4)])
    assert isinstance(long.error, PoolFull)
    assert short.tokens == _plain(target, Request([1], 4))


@pytest.mark.parametrize("turns", [15, pytest.param(150, marks=pytest.mark.slow)])
def test_nothing_grows_over_thousands_of_frames(turns: int) -> None:
    target, drafter = _pair()
    scheduler = FrameScheduler(target, drafter, max_length=70, slots=2, policy=Fixed(2))
    live = 0
    for turn in range(turns):
        _run(scheduler, [Request([turn % VOCAB, n], 60, index=n) for n in range(3)])
        target.caches[2:] = []
        drafter.contexts[2:] = []
        held = (len(scheduler._seated), len(scheduler._waiting), len(scheduler._times._gaps))
        assert held[:2] == (0, 0)
        assert held[2] < 4
        live = max(live, sum(len(group._flying) for group in scheduler._groups))
    assert live == 0
    assert scheduler.report().frames > 30 * turns
    assert all(row == [] for cache in target.caches[:2] for row in cache.rows)


def test_the_report_counts_frames_tokens_and_waits() -> None:
    target, drafter = _pair()
    scheduler = FrameScheduler(target, drafter, max_length=60, slots=2, policy=Fixed(4))
    assert scheduler.report().frame_ms_p50 is None
    assert scheduler.report().host_syncs_per_token is None
    handles = _run(scheduler, [Request([n], 30, index=n) for n in range(3)])
    report = scheduler.report()
    assert report.tokens == sum(len(h.tokens) for h in handles) == 90
    assert report.host_syncs == 3  # one per prompt, none per frame
    assert report.host_syncs_per_token == 3 / 90
    assert report.rows_per_frame == 5
    assert 0 < report.frame_ms_p50 <= report.frame_ms_p99
    assert report.idle_s >= 0


@pytest.mark.parametrize("ends", [[], [3], [0, 2, 4, 6, 8, 10, 12, 99, -1], list(range(13))])
def test_any_number_of_end_tokens_ends_a_text(ends: list[int]) -> None:
    """Ids that are none are no token of any text, so they end nothing."""
    target, drafter = _pair()
    requests = [Request([1 + n], 30, end_token_ids=ends[n % 2 :], index=n) for n in range(5)]
    scheduler = FrameScheduler(target, drafter, max_length=60, slots=2, policy=Fixed(4))
    for request, handle in zip(requests, _run(scheduler, requests), strict=True):
        assert handle.tokens == _plain(target, request)


def test_what_frames_cannot_do_is_refused() -> None:
    target, drafter = _pair()
    scheduler = FrameScheduler(target, drafter, max_length=10)
    with pytest.raises(UserError, match="rules: they read the text on the host"):
        scheduler.submit(Request([1], 4, Rules(min_new_tokens=2)))
    with pytest.raises(UserError, match="may become 11 tokens"):
        scheduler.submit(Request([1], 10))
    with pytest.raises(UserError, match="at least one token"):
        scheduler.submit(Request([], 4))
    with pytest.raises(UserError, match="expected at least 1"):
        FrameScheduler(target, drafter, max_length=10, slots=0)
    with pytest.raises(UserError, match=r"expected 1\.\.5"):
        FrameScheduler(target, drafter, max_length=10, policy=Fixed(6))
    target.supports_trees = False
    with pytest.raises(UserError, match="verifies chains only"):
        FrameScheduler(target, drafter, max_length=10, policy=Bands(Fixed(4)))
    assert not scheduler.busy


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_frames_drain_to_the_last_row(name: str) -> None:
    """Eight rows that end at different times, policies that share, learn and fall back: every text
    is the plain one, and the number of turns is bounded, so that nothing hangs."""
    target, drafter = _pair()
    requests = [Request([n], 2 + 5 * n, end_token_ids=(), index=n) for n in range(8)]
    scheduler = FrameScheduler(target, drafter, max_length=60, slots=4, policy=ADAPTIVE[name]())
    handles = [scheduler.submit(request) for request in requests]
    for _ in range(4 * sum(request.max_new_tokens for request in requests)):
        scheduler.step()
    assert not scheduler.busy
    for request, handle in zip(requests, handles, strict=True):
        assert handle.tokens == _plain(target, request)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_frames_of_every_draft_length(length: int) -> None:
    target, drafter = _pair()
    scheduler = FrameScheduler(target, drafter, max_length=60, slots=1, policy=Fixed(length))
    requests = [Request([n], 30, index=n) for n in range(3)]
    for request, handle in zip(requests, _run(scheduler, requests), strict=True):
        assert handle.tokens == _plain(target, request)
        assert {r.target_rows for r in handle.generation().rounds} == {1 + length}


def test_idle_seats_of_a_hybrid_target_do_not_reach_a_live_one() -> None:
    """Four seats and one request in the first of them, for 100 tokens; then three beside it, two
    of which have nothing to draft."""
    target, drafter = K3Target(tiny_model(), "tiny", ()), real_drafter()
    scheduler = FrameScheduler(target, drafter, max_length=110, slots=4, groups=1, policy=Fixed(3))
    long = Request([5, 6], 100)
    (alone,) = _run(scheduler, [long])
    assert alone.tokens == _plain(target, long)
    beside = [Request([9], 2, index=1), Request([8] * 9, 20, index=2), Request([7], 2, index=3)]
    first, *others = _run(scheduler, [long, *beside])
    assert first.tokens == alone.tokens
    assert [handle.tokens for handle in others] == [_plain(target, each) for each in beside]


def test_empty_seats_have_no_share_in_what_a_policy_decides(monkeypatch) -> None:
    """A policy that gives out one budget sees the rows of texts alone."""
    seen: list[int] = []

    def plan(self: Confidence, frontier: Frontier) -> None:
        seen.append(int(frontier.open.sum()))
        frontier.extend_unseen(frontier.slots)

    monkeypatch.setattr(Confidence, "plan", plan)
    target, drafter = _pair()
    scheduler = FrameScheduler(
        target, drafter, max_length=42, slots=4, groups=1, policy=Confidence()
    )
    (handle,) = _run(scheduler, [Request([1, 2], 12, end_token_ids=())])
    assert handle.finished
    assert set(seen) <= {0, 1}
    assert 1 in seen


def test_the_draft_context_is_fed_along_the_accepted_path() -> None:
    """Whatever was accepted, siblings too, the drafter has read what the target has committed."""
    target, drafter = _pair()
    policy = Bands(Fixed(), 0.95, 0.0, 2, 1)
    scheduler = FrameScheduler(target, drafter, max_length=42, slots=2, policy=policy)
    handles = [scheduler.submit(request) for request in _requests(10, seed=4)]
    while scheduler.busy:
        scheduler.step()
        for group in scheduler._groups:
            assert group.context.rows == group.cache.rows
    rounds = [r for handle in handles for r in handle.text.rounds]
    assert any(r.sibling for r in rounds)
