"""Relaxed acceptance: who passes, what it costs, and that it costs what the verdict says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.errors import UserError
from dspark.runtime.records import Proposal
from dspark.runtime.relaxed import Relaxed
from dspark.runtime.sampling import SamplingParams, draw, to_probs
from dspark.runtime.verify import verify
from tests.laws import pvalue, reference, seeded

DRAWS = 200_000
GREEDY, SAMPLED = SamplingParams(), SamplingParams(1.0)
LOGITS = torch.tensor([[2.0, 1.5, 0.5, -1.0, -2.0], [0.0] * 5])
DRAFT = torch.tensor([0.2, 0.3, 0.3, 0.1, 0.1])


def offer(token: torch.Tensor, confidence: float, probs: torch.Tensor | None) -> Proposal:
    return Proposal(token, probs, torch.full(token.shape, confidence), torch.zeros(token.shape))


def typical(relaxed: Relaxed) -> np.ndarray:
    p = reference(LOGITS[0], SAMPLED)
    entropy = -(p * np.log(p)).sum()
    return p > min(relaxed.epsilon, relaxed.delta * math.exp(-entropy))


def test_the_law_is_off_by_exactly_the_distance_that_is_reported() -> None:
    relaxed, p, q = Relaxed(), reference(LOGITS[0], SAMPLED), DRAFT.double().numpy()
    passes = typical(relaxed)
    assert passes.tolist() == [True, True, True, False, False]
    kept = np.where(passes, q, np.minimum(p, q))
    residual = np.maximum(p - q, 0)
    law = kept + (1 - kept.sum()) * residual / residual.sum()
    distance = 0.5 * np.abs(law - p).sum()
    assert distance > 0.1
    probs = DRAFT.expand(DRAWS, 1, 5)
    made = offer(draw(probs, seeded()), 0.95, probs)
    verdict = verify(made, LOGITS.expand(DRAWS, 2, 5), SAMPLED, seeded(1), relaxed=relaxed)
    first = torch.where(verdict.accepted > 0, made.tokens[:, 0], verdict.next_token)
    assert verdict.distance.numpy() == pytest.approx(distance, abs=1e-6)
    assert pvalue(first, law) > 1e-4
    assert pvalue(first, p) == 0


def test_a_position_below_the_threshold_is_not_relaxed() -> None:
    probs = DRAFT.expand(DRAWS, 1, 5)
    made = offer(draw(probs, seeded()), 0.89, probs)
    logits = LOGITS.expand(DRAWS, 2, 5)
    strict = verify(made, logits, SAMPLED, seeded(1))
    relaxed = verify(made, logits, SAMPLED, seeded(1), relaxed=Relaxed())
    assert torch.equal(strict.next_token, relaxed.next_token)
    assert torch.equal(strict.accepted, relaxed.accepted)
    assert (relaxed.distance == 0).all()
    assert strict.distance is None


def test_greedy_decoding_passes_typical_tokens_and_counts_them() -> None:
    tokens = torch.arange(5).unsqueeze(1)
    verdict = verify(
        offer(tokens, 1.0, None), LOGITS.expand(5, 2, 5), GREEDY, seeded(), relaxed=Relaxed()
    )
    assert verdict.accepted.tolist() == [1, 1, 1, 0, 0]
    assert verdict.distance[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert verdict.next_token[3:].tolist() == [0, 0]


def test_a_token_that_a_filter_removed_never_passes() -> None:
    tokens = torch.full((1000, 1), 2)
    probs = torch.eye(5)[2].expand(1000, 1, 5)
    params = SamplingParams(1.0, top_k=2)
    assert to_probs(LOGITS[0], params)[2] == 0
    made = offer(tokens, 1.0, probs)
    verdict = verify(made, LOGITS.expand(1000, 2, 5), params, seeded(), relaxed=Relaxed())
    assert (verdict.accepted == 0).all()


def test_what_it_cannot_do_is_refused() -> None:
    made = offer(torch.zeros(1, 1, dtype=torch.int64), 1.0, None)
    with pytest.raises(ValueError, match="method 'token'"):
        verify(made, LOGITS[None], SAMPLED, seeded(), method="block", relaxed=Relaxed())
    with pytest.raises(ValueError, match="confidence head"):
        verify(replace(made, confidence=None), LOGITS[None], SAMPLED, seeded(), relaxed=Relaxed())
    for wrong in ({"high": 1.5}, {"epsilon": -0.1}, {"delta": math.nan}):
        with pytest.raises(UserError, match=f"relaxed {next(iter(wrong))}"):
            Relaxed(**wrong)
