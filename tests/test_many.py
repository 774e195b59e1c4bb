"""Requests in a batch: the same text as alone, whatever their lengths, ends and neighbours."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import Bands, Confidence, Entropy, Fixed, Policy
from dspark.runtime.records import Generation
from dspark.runtime.requests import Request
from dspark.runtime.rules import Rules
from dspark.runtime.sampling import SamplingParams
from tests.k3_tiny import TINY, tiny_model
from tests.table_target import TableDrafter, TableTarget
from tests.test_decode_k3 import real_drafter

GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.9, 0.95)
POLICIES = [Fixed(4), Entropy(1, h_stop=1.5), Bands(Confidence(1, s_stop=0.2), 0.95, 0.1, 2, 1)]


def _table(vocab: int = 13, seed: int = 2) -> SpeculativeDecoder:
    target = TableTarget.random(vocab, seed)
    return SpeculativeDecoder(target, TableDrafter.of(target, 5, noise=0.5, seed=seed))


def _requests(count: int, vocab: int, seed: int) -> list[Request]:
    """Prompts of 1..12 tokens, 1..30 new ones, none or several end tokens."""
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(vocab) for _ in range(rng.randint(1, 12))],
            rng.choice([1, 2, 3, 7, 30]),
            end_token_ids=rng.sample(range(vocab), rng.choice([0, 1, 2])),
            seed=seed,
            index=index,
        )
        for index in range(count)
    ]


def _alone(
    decoder: SpeculativeDecoder, request: Request, sampling: SamplingParams, policy: Policy
) -> Generation:
    return decoder.generate_many([request], sampling=sampling, policy=policy, batch=1)[0]


def _rounds(result: Generation) -> list[tuple[int, int, int, int, bool]]:
    return [(r.verified, r.accepted, r.emitted, r.level, r.sibling) for r in result.rounds]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 9), batch=st.integers(1, 5))
def test_a_text_does_not_depend_on_its_batch(
    policy: Policy, sampling: SamplingParams, seed: int, count: int, batch: int
) -> None:
    """Table targets have the same logits in every batch: texts and rounds are equal exactly."""
    decoder = _table()
    requests = _requests(count, 13, seed)
    together = decoder.generate_many(requests, sampling=sampling, policy=policy, batch=batch)
    for request, result in zip(requests, together, strict=True):
        alone = _alone(decoder, request, sampling, policy)
        assert result.tokens == alone.tokens
        assert result.finish == alone.finish
        assert _rounds(result) == _rounds(alone)
        if sampling.greedy:
            plain = plain_generate(
                decoder.target,
                request.prompt_ids,
                max_new_tokens=request.max_new_tokens,
                sampling=GREEDY,
                end_token_ids=request.end_token_ids,
            )
            assert result.tokens == plain.tokens


def test_a_seed_of_generate_is_index_zero_of_a_batch() -> None:
    decoder = _table()
    text = decoder.generate([3, 1], max_new_tokens=25, sampling=SAMPLED, seed=7, draft_length=4)
    requests = [Request([5], 9, seed=1, index=4), Request([3, 1], 25, seed=7)]
    together = decoder.generate_many(requests, sampling=SAMPLED, draft_length=4)
    assert together[1].tokens == text.tokens


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_ragged_rows_of_a_hybrid_target_equal_single_rows(
    sampling: SamplingParams, policy: Policy
) -> None:
    """Prompts of 3, 17 and 64 tokens and more; one accepts much, one little; rows join and leave.

    In float32 the logits of a batch differ from those of a single row in the last bits, so this
    asks for equal tokens.
    """
    target = K3Target(tiny_model(), "tiny", ())
    decoder = SpeculativeDecoder(target, real_drafter())
    rng = random.Random(5)
    requests = [
        Request(
            [rng.randrange(TINY.vocab_size) for _ in range(length)],
            new,
            end_token_ids=range(0, 60, 17),
            index=index,
        )
        for index, (length, new) in enumerate([(3, 24), (17, 5), (64, 24), (1, 1), (5, 12)])
    ]
    together = decoder.generate_many(requests, sampling=sampling, policy=policy, batch=3)
    for request, result in zip(requests, together, strict=True):
        assert result.tokens == _alone(decoder, request, sampling, policy).tokens


def test_rules_and_streams_are_each_requests_own() -> None:
    decoder = _table()
    streams: list[list[int]] = [[], [], []]
    kinds: list[str] = []
    requests = [
        Request([1], 12, on_tokens=streams[0].extend, index=0),
        Request(
            [1], 12, Rules(logit_bias={4: -float("inf")}), on_tokens=streams[1].extend, index=1
        ),
        Request(
            [1],
            12,
            Rules(min_new_tokens=9),
            end_token_ids=range(0, 13, 2),
            on_tokens=streams[2].extend,
            on_round=lambda said: kinds.extend(each.kind for each in said),
            index=2,
        ),
    ]
    for policy in POLICIES:
        for stream in streams:
            stream.clear()
        kinds.clear()
        results = decoder.generate_many(requests, sampling=GREEDY, policy=policy)
        assert [r.tokens for r in results] == streams
        assert 4 not in streams[1]
        assert 9 <= len(streams[2]) <= 12
        assert not any(token % 2 == 0 for token in streams[2][:9])
        assert len(kinds) == len(streams[2])
        assert kinds[0] == "first"
        for request, result in zip(requests, results, strict=True):
            plain = plain_generate(
                decoder.target,
                request.prompt_ids,
                max_new_tokens=12,
                sampling=GREEDY,
                rules=request.rules,
                end_token_ids=request.end_token_ids,
            )
            assert result.tokens == plain.tokens


def test_wrong_requests_are_refused_before_any_runs() -> None:
    decoder = _table()
    with pytest.raises(UserError, match="at least one token"):
        decoder.generate_many([Request([1], 4), Request([], 4)], sampling=GREEDY)
    with pytest.raises(UserError, match="at least 1 row"):
        decoder.generate_many([Request([1], 4)], sampling=GREEDY, batch=0)
    assert decoder.target.rows_seen == 0
    assert decoder.generate_many([], sampling=GREEDY) == []


def test_a_batch_holds_the_rows_that_are_left() -> None:
    """When nobody waits any more the batch shrinks: finished rows are not computed."""
    decoder = _table()
    seen: list[int] = []
    forward = decoder.target.forward

    def watch(tokens: torch.Tensor, cache: object, **options: object) -> object:
        if not options["commit"]:
            seen.append(tokens.shape[0])
        return forward(tokens, cache, **options)

    decoder.target.forward = watch  # type: ignore[method-assign]
    requests = [Request([1], n, index=i) for i, n in enumerate([3, 3, 20, 9])]
    decoder.generate_many(requests, sampling=GREEDY, draft_length=2, batch=3)
    assert seen[0] == 3
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 1
