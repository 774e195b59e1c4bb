"""Logits that are not finite end their own request of a batch, and no other notices."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.hf_open import hf_target
from dspark.runtime.k3_target import K3Target
from dspark.runtime.policies import Bands, Confidence, Entropy, Fixed, Policy
from dspark.runtime.requests import Request
from dspark.runtime.rules import Rules
from dspark.runtime.sampling import BadLogits, SamplingParams
from tests.hf_tiny import tiny_hf
from tests.k3_tiny import tiny_model
from tests.table_target import TableDrafter, TableTarget
from tests.test_decode_k3 import real_drafter
from tests.test_hf_runtime import drafter_for

GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.9, 0.95)
POLICIES = [Fixed(4), Entropy(1, h_stop=1.5), Bands(Confidence(1, s_stop=0.2), 0.95, 0.1, 2, 1)]
VOCAB = 13


def _alone(
    decoder: SpeculativeDecoder, request: Request, sampling: SamplingParams, policy: Policy
) -> tuple[list[int], BadLogits | None]:
    """Tokens of a request that runs by itself, and what ended it early."""
    said: list[int] = []
    heard = replace(request, on_tokens=said.extend)
    found = decoder.generate_many([heard], sampling=sampling, policy=policy, batch=1)[0]
    assert found.tokens == said
    return said, found.fault


def _check(
    decoder: SpeculativeDecoder,
    requests: list[Request],
    sampling: SamplingParams,
    policy: Policy,
    batch: int,
) -> list[bool]:
    """Every request of a batch is what it is alone; which of them failed."""
    together = decoder.generate_many(requests, sampling=sampling, policy=policy, batch=batch)
    for number, (request, found) in enumerate(zip(requests, together, strict=True)):
        tokens, fault = _alone(decoder, request, sampling, policy)
        assert found.tokens == tokens
        assert (found.finish == "fault") == (fault is not None)
        if fault is not None and found.fault is not None:
            assert (found.fault.row, found.fault.position) == (number, fault.position)
            assert f"logits of row {number}, position {fault.position} hold NaN" in str(found.fault)
            assert fault.position >= len(request.prompt_ids) + len(tokens)
    return [each.fault is not None for each in together]


@pytest.mark.parametrize("rules", [None, Rules(logit_bias={4: -1.0})], ids=["free", "ruled"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_others_go_on_and_equal_their_solo_texts(
    policy: Policy, sampling: SamplingParams, rules: Rules | None
) -> None:
    """A tenth of the target's rows are NaN: some texts run into one, at the prompt or later."""
    target = TableTarget.random(VOCAB, 2)
    drafter = TableDrafter.of(target, 5, noise=0.5, seed=2)  # before the damage
    generator = torch.Generator().manual_seed(3)
    target.table[torch.rand(VOCAB, VOCAB, generator=generator) < 0.1] = torch.nan
    rng = random.Random(4)
    requests = [
        Request(
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))],
            rng.choice([2, 7, 20]),
            rules=rules if n % 2 else None,
            index=n,
        )
        for n in range(24)
    ]
    decoder = SpeculativeDecoder(target, drafter)
    failed = _check(decoder, requests, sampling, policy, batch=4)
    assert 4 <= sum(failed) <= 20


def test_a_single_request_raises_the_fault() -> None:
    target = TableTarget.random(VOCAB, 2)
    drafter = TableDrafter.of(target, 5, noise=0.5, seed=2)
    target.table[:, :] = torch.nan
    with pytest.raises(BadLogits, match="target logits of row 0, position 2 hold NaN"):
        SpeculativeDecoder(target, drafter).generate([1, 2], max_new_tokens=4, sampling=GREEDY)


def _k3() -> tuple[SpeculativeDecoder, torch.Tensor]:
    model = tiny_model()
    target = K3Target(model, "tiny", ())
    return SpeculativeDecoder(target, real_drafter()), model.model.embed_tokens.weight


def _gemma() -> tuple[SpeculativeDecoder, torch.Tensor]:
    model = tiny_hf("gemma3")
    target = hf_target(model, name="gemma3", end_token_ids=())
    return SpeculativeDecoder(target, drafter_for(target)), model.base_model.embed_tokens.weight


@pytest.mark.parametrize("make", [_k3, _gemma], ids=["k3", "gemma3"])
def test_a_seat_that_held_nan_is_as_good_as_new(
    make: Callable[[], tuple[SpeculativeDecoder, torch.Tensor]],
) -> None:
    """One token's embedding is NaN, so its keys and values are: what a failed text left behind in
    the cache must not reach whoever sits there next."""
    decoder, table = make()
    rng = random.Random(5)
    texts = [rng.sample(range(3, 60), rng.choice([3, 9, 17])) for _ in range(9)]
    requests = [Request(text, 16, index=n) for n, text in enumerate(texts)]
    said = [
        decoder.generate_many([r], sampling=GREEDY, policy=Fixed(4), batch=1)[0].tokens
        for r in requests
    ]
    # A token that some of the texts come to say, and others never meet.
    bad = next(
        token
        for token in range(3, 60)
        if 2 <= sum(token in tokens[:-2] for tokens in said) <= 6
        and not any(token in text for text in texts)
    )
    with torch.no_grad():
        table[bad] = torch.nan
    failed = _check(decoder, requests, GREEDY, Fixed(4), batch=2)
    assert 2 <= sum(failed) < len(failed)
