"""Recorded frames of several sizes: the texts of plain decoding, whichever comes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dspark import ops
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime import graph_taps, graph_turns
from dspark.runtime.cost_model import BatchCosts, CostModel
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_draft import Drafting
from dspark.runtime.graph_sizes import ByRate, ByWish, frame_sizes, size_rule
from dspark.runtime.k3_target import K3Target
from dspark.runtime.policies import (
    Auto,
    AutoSettings,
    Bands,
    Confidence,
    Delayed,
    Entropy,
    Fixed,
    Policy,
    Throughput,
)
from dspark.runtime.policies.auto import RunningTime, Times
from dspark.runtime.requests import Outcome, Request
from tests.k3_tiny import tiny_model
from tests.test_graph_decode import (
    BLOCK,
    DRAFTERS,
    PROMPTS,
    SMALL,
    plain_texts,
    requests,
    scripted,
)
from tests.tiny_drafters import make_drafter

COST = CostModel(
    (BatchCosts(1, 1.0, {1: 0.1, 8: 0.1}, {n: 1 + 0.25 * n for n in range(1, 10)}, 0.0),),
    "t",
    "d",
    0,
)
"""A row more costs a fifth of a plain step."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "entropy": lambda: Entropy(min_draft=1, h_stop=3.9),
    "confidence": lambda: Confidence(min_draft=1, s_stop=0.3),
    "throughput": lambda: Throughput(min_draft=1, cost=COST),
    "throughput-delayed": lambda: Delayed(COST, limits=(1, None)),
    "auto": lambda: Auto(Entropy(min_draft=1, h_stop=3.9), AutoSettings(0.5, 0.5, 1, 2, 4)),
}


@pytest.fixture(scope="module")
def target() -> K3Target:
    return K3Target(tiny_model(SMALL), "tiny", ())


@pytest.fixture(scope="module")
def drafter() -> DSparkDrafter:
    return make_drafter(DRAFTERS["kda"])


def outcome(*confidence: float, accepted: int = 0, sent: int = 0) -> Outcome:
    """Of a draft of which `sent` primaries were judged."""
    count = len(confidence)
    return Outcome(accepted, 7, 3, -1, -1, sent, [1] * count, confidence, [0.1] * count, [])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("seats", [1, 3])
def test_texts_are_those_of_plain_decoding(
    target: K3Target,
    drafter: DSparkDrafter,
    policy: Callable[[], Policy],
    seats: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every accepted length of every size, ragged over the seats."""
    asked = requests(length=14)
    plain = plain_texts(target, asked)
    texts = [list(r.prompt_ids) + text for r, text in zip(asked, plain, strict=True)]
    scripted(monkeypatch, texts, 3)
    decoder = GraphDecoder(target, drafter, seats=seats, max_length=40, policy=policy())
    found = decoder.generate_many(asked)
    assert [g.tokens for g in found] == plain
    rounds = [r for g in found for r in g.rounds]
    assert sum(r.emitted for r in rounds) == sum(len(text) - 1 for text in plain)
    assert all(r.accepted <= r.verified <= min(r.drafted, BLOCK) for r in rounds)
    assert decoder.sizes == ((0, 1, 2, 4) if "Auto" in repr(policy()) else (1, 2, 4))


@pytest.mark.parametrize("backbone", ["attention", "mla"])
def test_any_order_of_sizes_gives_the_same_texts(
    target: K3Target, backbone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small after large, large after plain: what was limited before does not stay."""
    asked = requests(length=14)
    plain = plain_texts(target, asked)
    texts = [list(r.prompt_ids) + text for r, text in zip(asked, plain, strict=True)]
    scripted(monkeypatch, texts, 1)
    generator = torch.Generator().manual_seed(0)

    def any_size(self: ByWish, seats: list[int]) -> int:
        return (0, 1, 2, 4)[int(torch.randint(4, (), generator=generator))]

    monkeypatch.setattr(ByWish, "next", any_size)
    made = make_drafter(DRAFTERS[backbone])
    decoder = GraphDecoder(target, made, seats=2, max_length=40, policy=Auto(Fixed(BLOCK)))
    found = decoder.generate_many(asked)
    assert [g.tokens for g in found] == plain
    assert set(decoder.frame_sizes) == {0, 1, 2, 4}
    verified = {r.verified for g in found for r in g.rounds}
    assert verified >= {0, 1, 2, 4}
    assert {r.level for g in found for r in g.rounds} == {0, 2, 3}


@pytest.mark.parametrize("backbone", ["sliding", "mla", "kda"])
def test_taps_of_plain_frames_are_read_before_a_draft(
    target: K3Target, backbone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches of plain frames, longer than there are places: drafts are those of a context that
    read every row at once, and it stands where the target does whenever it is asked."""
    made, asked = make_drafter(DRAFTERS[backbone]), requests(3, length=12)
    propose = Drafting.propose

    def drafts(places: int) -> list[ops.Drafted]:
        seen: list[ops.Drafted] = []
        for module in (graph_taps, graph_turns):
            monkeypatch.setattr(module, "PLACES", places)
        decoder = GraphDecoder(target, made, seats=2, max_length=40, policy=Auto(Fixed(BLOCK)))
        turns = iter([0, 0, 4, 0, 0, 0, 0, 0, 2, 4, 0, 0, 0, 0, 1] * 9)
        monkeypatch.setattr(decoder.rule, "next", lambda seats: next(turns))

        def draft(self: Drafting, *rest: Any) -> ops.Drafted:
            assert torch.equal(self.context.lengths, decoder.cache.lengths)
            seen.append(propose(self, *rest))
            return seen[-1]

        monkeypatch.setattr(Drafting, "propose", draft)
        found = decoder.generate_many(asked)
        assert [g.tokens for g in found] == plain_texts(target, asked)
        assert set(decoder.frame_sizes) == {0, 1, 2, 4}
        return seen

    for at_once, late in zip(drafts(1), drafts(3), strict=True):
        assert torch.equal(at_once.tokens, late.tokens)
        torch.testing.assert_close(at_once.entropy, late.entropy)


def test_auto_decodes_plainly_where_drafts_are_wrong(
    target: K3Target, drafter: DSparkDrafter
) -> None:
    """A random drafter, and frames that take three times as long as a plain one: 4 at first, one
    late, then probes between pauses of 8, 16 and more."""
    times = Times(RunningTime(1.0), RunningTime(3.0))
    rules = AutoSettings(patience=1.0, probe=1.0, pause=8, weight=1e-9)
    policy = Auto(Fixed(BLOCK), rules, times)
    decoder = GraphDecoder(target, drafter, max_length=60, policy=policy)
    asked = [Request(PROMPTS[0], 40)]
    assert decoder.generate_many(asked)[0].tokens == plain_texts(target, asked)[0]
    assert decoder.frame_sizes[0] == BLOCK
    assert decoder.frame_sizes.count(0) > 0.7 * len(decoder.frame_sizes)


def test_the_next_size_holds_the_running_mean_of_wishes() -> None:
    rule = ByWish(Confidence(min_draft=1, s_stop=0.5), (1, 2, 4, 8), seats=2, block=8)
    assert rule.next([0, 1]) == 8, "nothing is known"
    rule.learn({0: outcome(0.9, 0.9, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9)})
    assert rule.next([0]) == 2, "0.9, 0.81, then 0.32"
    assert rule.next([0, 1]) == 8, "the other seat is as it was"
    rule.learn({0: outcome(*[0.99] * 8), 1: outcome(0.2, *[0.9] * 7)})
    assert rule.next([0]) == 8, "mean of 2 and 8: no size between 4 and 8"
    assert rule.next([1]) == 1, "the first position is sent whatever the rule says"
    rule.learn({0: outcome(0.9, 0.9, 0.1, *[0.9] * 5)})
    assert rule.next([0]) == 4, "mean of 5 and 2, to the nearest token"
    rule.join(0)
    assert rule.next([0]) == 8


def test_throughput_takes_the_size_that_its_curve_promises_most_for() -> None:
    rule = ByRate(COST, (1, 2, 4, 8), seats=2, pauses=(1, 1))
    assert rule.next([0, 1]) == 8, "nothing is known"
    rule.learn({0: outcome(0.9, 0.5, 0.1, *[0.9] * 5)})
    # tokens / seconds: 1.9 / 1.6, 2.35 / 1.85, 2.395+ / 2.35
    assert rule.next([0]) == 2
    rule.learn({1: outcome(*[0.97] * 8)})
    assert rule.next([1]) == 8
    assert rule.next([0, 1]) in (4, 8)
    rule.join(1)
    assert rule.next([1]) == 2, "a new text starts with what all texts were like: most like seat 0"


def test_what_became_of_a_draft_counts_as_much_as_what_was_expected() -> None:
    sure = [1.0] * 8
    rule = ByRate(COST, (1, 2, 4, 8), seats=1, pauses=(1, 1))
    rule.learn({0: outcome(*sure, accepted=1, sent=8)})
    # survival 1, then 1/2 each: 2 / 1.6, 2.5 / 1.85, 3.5 / 2.35, 5.5 / 3.35
    assert rule.next([0]) == 8
    for _ in range(9):
        rule.learn({0: outcome(*[1.0, *[0.6] * 7], accepted=1, sent=8)})
    # survival 1, then 0.3, 0.18, 0.11 ..: 2 / 1.6, 2.3 / 1.85, 2.59 / 2.35
    assert rule.next([0]) == 1
    for _ in range(9):
        rule.learn({0: outcome(*sure, accepted=1, sent=1)})
    assert rule.next([0]) == 8, "sent whole and accepted: behind it confidence goes on"


def test_auto_by_rate_is_plain_where_that_is_faster_and_looks_again() -> None:
    rule = ByRate(COST, (0, 1, 2, 4, 8), seats=1, pauses=(3, 9))
    bad, good = outcome(0.3, *[0.1] * 7), outcome(*[0.97] * 8)
    rule.learn({0: bad})
    taken = [rule.next([0]) for _ in range(12)]
    assert taken == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0], "a look after 3 plain frames, then 6"
    for _ in range(6):
        rule.learn({0: good})
    assert rule.next([0]) == 8


def test_sizes_that_are_recorded() -> None:
    assert frame_sizes(Fixed(5), 8) == (5,)
    assert frame_sizes(Entropy(1, 7), 8) == (1, 2, 4, 7)
    assert frame_sizes(Auto(Entropy(min_draft=0)), 8) == (0, 1, 2, 4, 8)
    assert frame_sizes(Entropy(min_draft=1), 3) == (1, 2, 3)
    assert frame_sizes(Auto(Fixed()), 8, (3, 8, 1)) == (0, 1, 3, 8)


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (Entropy(min_draft=2, h_stop=0.05), (2, 4, 8)),
        (Throughput(min_draft=3, cost=COST), (4, 8)),
        (Auto(Throughput(min_draft=3, cost=COST)), (0, 4, 8)),
        (Delayed(COST, limits=(4, 6)), (4, 6)),
        (Auto(Confidence(min_draft=9, max_draft=9)), (0, 8)),
    ],
)
def test_no_frame_is_shorter_than_min_draft(policy: Policy, sizes: tuple[int, ...]) -> None:
    """A plain step of `auto` is no draft; a block shorter than min_draft is sent whole."""
    assert frame_sizes(policy, 8) == sizes
    rule = size_rule(policy, sizes, 1, 8)
    hopeless = outcome(*[0.01] * 8, sent=8)
    for _ in range(20):
        rule.learn({0: hopeless})
    taken = {rule.next([0]) for _ in range(40)}
    assert taken <= set(sizes)
    assert max(taken) <= max(sizes[0], sizes[1]), "the shortest that there is"


def test_the_pauses_of_auto_are_those_that_were_asked_for() -> None:
    policy = Auto(Throughput(cost=COST), AutoSettings(pause=2, longest_pause=5))
    rule = size_rule(policy, (0, 2, 4, 8), 1, 8)
    rule.learn({0: outcome(*[0.05] * 8, sent=8)})
    taken = [rule.next([0]) for _ in range(24)]
    looks = [at for at, size in enumerate(taken) if size]
    assert looks == [2, 7, 13, 19], "after 2 plain frames, 4, and 5 from then on"


def test_a_delayed_policy_starts_from_what_it_was_given() -> None:
    """1.9 / 1.85 at 2 is the best of acceptances 0.9, 0.5, then nothing; a first draft of full
    weight replaces it."""
    policy = Delayed(COST, start=(0.9, 0.5, *[0.01] * 6), weight=1.0, limits=(1, None))
    rule = size_rule(policy, (1, 2, 4, 8), 1, 8)
    assert rule.next([0]) == 2
    rule.learn({0: outcome(*[0.97] * 8)})
    assert rule.next([0]) == 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"policy": Bands(Fixed())}, "siblings"),
        ({"policy": Entropy(), "draft_length": 3}, "no draft_length"),
        ({"policy": Entropy(), "sizes": (0, 2)}, "1 or more"),
        ({"policy": Throughput(cost=COST, packed=True)}, "leave out packed"),
        (
            {"policy": Auto(Delayed(COST), AutoSettings(patience=9.0, weight=0.5))},
            "throughput-delayed go by the step times of its cost model; leave out patience, weight",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    target: K3Target, drafter: DSparkDrafter, more: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        GraphDecoder(target, drafter, max_length=9, **more)  # type: ignore[arg-type]
