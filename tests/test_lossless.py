"""Losslessness of a chain's verdict at many settings: chi-square of stated power, planted defects.

Exact enumeration is in test_exact_laws.py; trees, policies and methods in `dspark_eval.lossless`.

Statistics. Every chi-square runs DRAWS draws at a false-alarm rate of ALPHA = 1e-3 / TESTS, so that
the whole file raises a false alarm with probability below 1e-3 (Bonferroni; with the fixed seeds
here it does so always or never). Power: an output law that is off by total variation d = 1/2 sum|e|
has noncentrality DRAWS * sum(e^2 / p) >= DRAWS * (2 d)^2 by Cauchy-Schwarz, whatever its shape; at
d = 0.01 that is 120 against 23 degrees of freedom, and `test_power_at_a_hundredth` computes the
chance to catch it (>= 0.99).

References are computed in float64 numpy, by sorting and cumulating, apart from the code tested.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dspark.runtime import judge
from dspark.runtime.records import Plan, Proposal, Verdict
from dspark.runtime.sampling import SamplingParams, draw, to_probs
from dspark.runtime.verify import verify
from tests.laws import proposal, pvalue, reference, seeded

VOCAB = 24
DRAWS = 300_000
TESTS = 250
ALPHA = 1e-3 / TESTS

TEMPERATURES = (0.5, 0.7, 1.0, 1.3)
TOP_PS = (1.0, 0.9, 0.5)
TOP_KS = (0, 3, 20)


def _emitted(offer: Proposal, verdict: Verdict, at: int) -> Tensor:
    """Tokens that came out at position `at`, over the rows that got that far."""
    reached = verdict.accepted >= at
    if at == offer.tokens.shape[1]:
        return verdict.next_token[reached]
    token = torch.where(verdict.accepted > at, offer.tokens[:, at], verdict.next_token)
    return token[reached]


# The fixed distributions -----------------------------------------------------------------------

FIXED = seeded(1)
TARGET_LOGITS = 1.5 * torch.randn(2, VOCAB, generator=FIXED)
DRAFT_LOGITS = TARGET_LOGITS[:1] + 0.8 * torch.randn(1, VOCAB, generator=FIXED)


def _run_fixed(params: SamplingParams, dtype: torch.dtype, seed: int) -> None:
    p_logits, q_logits = TARGET_LOGITS.to(dtype), DRAFT_LOGITS.to(dtype)
    generator = seeded(seed)
    probs = to_probs(q_logits, params).expand(DRAWS, 1, VOCAB)
    offer = proposal(draw(probs, generator), probs)
    verdict = verify(offer, p_logits.expand(DRAWS, 2, VOCAB), params, generator)
    for at in range(2):
        law = reference(p_logits[at].float(), params)
        assert pvalue(_emitted(offer, verdict, at), law) > ALPHA, (params, dtype, at)
    q = reference(q_logits[0].float(), params)
    rate = np.minimum(reference(p_logits[0].float(), params), q).sum()  # 1 - TV
    assert abs(verdict.accepted.double().mean() - rate) < 5 * 0.5 / DRAWS**0.5


ALL_SETTINGS = list(itertools.product(TEMPERATURES, TOP_PS, TOP_KS))
FAST_SETTINGS = [(0.5, 1.0, 0), (0.7, 0.9, 0), (1.0, 0.5, 3), (1.3, 1.0, 20), (1.0, 0.9, 20)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [pytest.param(*s, marks=() if s in FAST_SETTINGS else pytest.mark.slow) for s in ALL_SETTINGS],
)
def test_fixed_distributions_come_out_as_the_target_has_them(
    temperature: float, top_p: float, top_k: int, dtype: torch.dtype
) -> None:
    index = ALL_SETTINGS.index((temperature, top_p, top_k))
    _run_fixed(SamplingParams(temperature, top_p, top_k), dtype, seed=index)


def test_a_chain_of_three_keeps_every_position() -> None:
    """Each position given that it was reached, against p of that position; bonus included."""
    generator, params, rows = seeded(3), SamplingParams(1.0, 0.95), 100_000
    p_logits = torch.randn(4, 8, generator=generator)
    q_logits = p_logits[:3] + torch.randn(3, 8, generator=generator)
    probs = to_probs(q_logits, params).expand(rows, 3, 8)
    offer = proposal(draw(probs, generator), probs)
    verdict = verify(offer, p_logits.expand(rows, 4, 8), params, generator)
    for at in range(4):
        tokens = _emitted(offer, verdict, at)
        assert len(tokens) > 5_000
        assert pvalue(tokens, reference(p_logits[at], params)) > ALPHA


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_deterministic_draft_is_a_point_mass(temperature: float) -> None:
    """Greedy or copied drafts under sampling: `probs` None means a one-hot q, and is exact."""
    params, generator = SamplingParams(temperature, 0.9), seeded(5)
    for token in (int(DRAFT_LOGITS.argmax()), 3, 17):
        tokens = torch.full((DRAWS, 1), token)
        logits = TARGET_LOGITS.expand(DRAWS, 2, VOCAB)
        offer = proposal(tokens, None)
        verdict = verify(offer, logits, params, generator)
        for at in range(2):
            law = reference(TARGET_LOGITS[at], params)
            if at == 0 or law[token] > 0:
                assert pvalue(_emitted(offer, verdict, at), law) > ALPHA


def test_a_cut_keeps_the_law_of_what_follows() -> None:
    """The token at the cut comes from p, although q of that position was drawn from."""
    params, generator = SamplingParams(1.0), seeded(4)
    probs = to_probs(DRAFT_LOGITS, params).expand(DRAWS, 1, VOCAB)
    offer = proposal(draw(probs, generator), probs)
    lengths = torch.zeros(DRAWS, dtype=torch.int64)
    logits = TARGET_LOGITS.expand(DRAWS, 2, VOCAB)
    verdict = verify(offer, logits, params, generator, Plan.chain(offer, lengths))
    assert (verdict.accepted == 0).all()
    assert pvalue(verdict.next_token, reference(TARGET_LOGITS[0], params)) > ALPHA


# Power and planted defects ---------------------------------------------------------------------


def _power(noncentrality: float, cells: int) -> float:
    critical = stats.chi2.isf(ALPHA, cells - 1)
    return float(stats.ncx2.sf(critical, cells - 1, noncentrality))


def test_power_at_a_hundredth() -> None:
    assert _power(DRAWS * (2 * 0.01) ** 2, VOCAB) > 0.99


def _defective_law(p: np.ndarray, drawn: np.ndarray, claimed: np.ndarray) -> np.ndarray:
    """Law of the first token when x ~ drawn is verified against `claimed`."""
    ratio = np.divide(p, claimed, out=np.full_like(p, np.inf), where=claimed > 0)
    kept = drawn * np.minimum(1, ratio)
    residual = np.maximum(p - claimed, 0)
    return kept + (1 - kept.sum()) * residual / residual.sum()


def _assert_caught(
    p: np.ndarray, law: np.ndarray, offer: Proposal, logits: Tensor, params: SamplingParams
) -> None:
    """The defect's exact law is off by TV > 0.01, the test's power against it is 0.99, it fires."""
    assert 0.5 * np.abs(law - p).sum() > 0.01
    assert (p > 0).all() or law[p == 0].sum() == 0
    inside = p > 0
    assert _power(DRAWS * ((law - p)[inside] ** 2 / p[inside]).sum(), inside.sum()) > 0.99
    verdict = verify(offer, logits.expand(DRAWS, 2, VOCAB), params, seeded(9))
    tokens = _emitted(offer, verdict, 0)
    assert pvalue(tokens, p) < ALPHA
    assert pvalue(tokens, law) > ALPHA  # and the closed form of the defect is the right one


def test_defect_q_computed_again_in_half_precision_is_caught() -> None:
    """bfloat16 has 8 bits: near 47 logits move in steps of 1/4, so q moves by several per cent."""
    params = SamplingParams(1.0)
    q_logits = DRAFT_LOGITS[0] + 47.0
    q = to_probs(q_logits, params)
    again = torch.softmax(q_logits.bfloat16(), dim=-1).float()
    tokens = draw(q.expand(DRAWS, 1, VOCAB), seeded(7))
    p = reference(TARGET_LOGITS[0], params)
    law = _defective_law(p, q.double().numpy(), again.double().numpy())
    offer = proposal(tokens, again.expand(DRAWS, 1, VOCAB))
    _assert_caught(p, law, offer, TARGET_LOGITS, params)


def test_defect_unfiltered_q_is_caught() -> None:
    params = SamplingParams(1.0, 1.0, 20)
    q = to_probs(DRAFT_LOGITS[0], SamplingParams(1.0, 0.6))
    claimed = to_probs(DRAFT_LOGITS[0], SamplingParams(1.0))
    p = reference(TARGET_LOGITS[0], params)
    law = _defective_law(p, q.double().numpy(), claimed.double().numpy())
    offer = proposal(draw(q.expand(DRAWS, 1, VOCAB), seeded(7)), claimed.expand(DRAWS, 1, VOCAB))
    _assert_caught(p, law, offer, TARGET_LOGITS, params)


def test_defect_greedy_draft_judged_as_sampled_is_caught() -> None:
    params = SamplingParams(1.0)
    claimed = to_probs(DRAFT_LOGITS[0], params)
    best = int(claimed.argmax())
    p = reference(TARGET_LOGITS[0], params)
    law = _defective_law(p, np.eye(VOCAB)[best], claimed.double().numpy())
    offer = proposal(torch.full((DRAWS, 1), best), claimed.expand(DRAWS, 1, VOCAB))
    _assert_caught(p, law, offer, TARGET_LOGITS, params)


def test_defect_correction_from_p_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_left", lambda sent, p, weight, accepted: p)
    params = SamplingParams(1.0)
    probs = to_probs(DRAFT_LOGITS, params).expand(DRAWS, 1, VOCAB)
    p, q = reference(TARGET_LOGITS[0], params), probs[0, 0].double().numpy()
    kept = np.minimum(p, q)
    law = kept + (1 - kept.sum()) * p
    offer = proposal(draw(probs, seeded(7)), probs)
    _assert_caught(p, law, offer, TARGET_LOGITS, params)
