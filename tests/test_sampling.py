"""Logits to probabilities to tokens: equality with transformers, edge values, bad rows, draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dspark.errors import UserError
from dspark.runtime.sampling import (
    BadLogits,
    SamplingParams,
    check_logits,
    draw,
    draw_at,
    request_generator,
    sample,
    to_probs,
    uniform,
)

CPU = torch.device("cpu")


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("vocab", [7, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [1e-4, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50])
def test_equals_the_warpers_of_transformers(
    vocab: int, temperature: float, top_p: float, top_k: int
) -> None:
    logits = 3 * torch.randn(64, vocab)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    scores = TopPLogitsWarper(top_p)(None, scores)
    ours = to_probs(logits, SamplingParams(temperature, top_p, top_k))
    assert torch.equal(ours > 0, scores > -torch.inf)
    # Two softmaxes of scores that differ by the rounding of the shift, |score| < 64 eps.
    torch.testing.assert_close(ours, scores.softmax(-1), rtol=1e-4, atol=1e-9)


def test_equal_logits_share_one_fate_at_every_cut() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0, 1.0, 0.0]])
    kept = to_probs(logits, SamplingParams(1.0, top_k=3)) > 0
    assert kept.tolist() == [[True, True, True, True, False]]
    # 0.5 of the mass is reached inside the first tie, 0.8 inside the second.
    kept = to_probs(logits, SamplingParams(1.0, top_p=0.3)) > 0
    assert kept.tolist() == [[True, False, True, False, False]]
    kept = to_probs(logits, SamplingParams(1.0, top_p=0.8)) > 0
    assert kept.tolist() == [[True, True, True, True, False]]


def test_a_permutation_of_tokens_permutes_the_probabilities() -> None:
    """No rule looks at ids (temperature above 0): the basis for p and q sharing one function."""
    logits = torch.randint(-3, 4, (200, 40)).float()  # many ties
    order = torch.randperm(40)
    for params in (
        SamplingParams(0.7, 0.6),
        SamplingParams(1.3, 1.0, 7),
        SamplingParams(1, 0.5, 9),
    ):
        a, b = to_probs(logits, params)[:, order], to_probs(logits[:, order], params)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_rows_beside_them(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 9, 33).to(dtype)
    params = SamplingParams(0.7, 0.9, 20)
    together = to_probs(logits, params)
    for b, t in itertools.product(range(3), range(9)):
        assert torch.equal(together[b, t], to_probs(logits[b, t], params))


def test_temperature_zero_is_the_lowest_id_among_the_best() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [-torch.inf, -torch.inf, 1.0]])
    greedy = SamplingParams()
    assert to_probs(logits, greedy).tolist() == [[0, 1, 0], [0, 0, 1]]
    assert sample(logits, greedy, _generator()).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-8, 1e-4])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_tiny_temperatures_equal_greedy(temperature: float, scale: float) -> None:
    # Gaps of at least 0.01: the runner-up keeps at most exp(-0.01 / 1e-4) = e^-100, a denormal.
    logits = scale * torch.randperm(101).float().repeat(4, 1)
    probs = to_probs(logits, SamplingParams(temperature))
    torch.testing.assert_close(probs, to_probs(logits, SamplingParams()), rtol=0, atol=1e-40)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-4, 100.0, 1e30, 1e300])
@pytest.mark.parametrize("top_p", [1e-4, 1.0, 5e-324])
@pytest.mark.parametrize("top_k", [0, 1, 10**6])
def test_extreme_settings_give_distributions(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(50, 33) * torch.logspace(-6, 6, 50)[:, None]
    logits[:, 5] = -torch.inf
    probs = to_probs(logits, SamplingParams(temperature, top_p, top_k))
    assert torch.isfinite(probs).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(50))
    assert (probs[:, 5] == 0).all()
    if top_k == 1 or top_p < 1e-3:
        assert torch.equal(probs.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": -0.1},
        {"top_p": 1.0001},
        {"top_p": math.nan},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
    ],
)
def test_invalid_settings_are_refused_where_they_are_written(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "found"), [(torch.nan, "NaN"), (torch.inf, "[+]inf"), (None, "nothing but -inf")]
)
@pytest.mark.parametrize("vocab", [5, 33])
def test_bad_rows_are_named(value: float | None, found: str, vocab: int) -> None:
    logits = torch.randn(3, 4, vocab)
    if value is None:
        logits[1, 2] = -torch.inf
    else:
        logits[1, 2, vocab // 2] = value
    for params in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.5, 0.9, 3)):
        with pytest.raises(BadLogits, match=f"row 1, position 2 hold {found}") as caught:
            to_probs(logits, params)
        assert (caught.value.row, caught.value.position) == (1, 2)
        with pytest.raises(BadLogits, match="row 1, position 0"):
            sample(logits[:, 2], params, _generator())
        # Unchecked, a bad row still yields an id below the vocabulary, for the check to come.
        unchecked = draw(to_probs(logits, params, check=False), _generator())
        assert ((unchecked >= 0) & (unchecked < vocab)).all()
    with pytest.raises(BadLogits, match="drafter logits"):
        check_logits(logits, "drafter")


def test_draws_never_return_a_weightless_token() -> None:
    """Every u that float64 can make near a step of the CDF, zeros at both ends and inside."""
    weights = torch.tensor([0.0, 0.0, 0.25, 0.0, 0.5, 1e-12, 0.0, 0.25, 0.0, 0.0])
    steps = weights.double().cumsum(0)
    u = torch.cat([steps / steps[-1] + k * 2.0**-53 for k in range(-4, 5)]).clamp(0, 1 - 2**-53)
    tokens = draw_at(weights.expand(len(u), -1), u)
    assert (weights[tokens] > 0).all()
    # Not even for totals that round up when multiplied by the largest u.
    totals = 1 + torch.rand(10_000)
    tail = torch.stack((totals, torch.zeros_like(totals)), dim=1)
    assert (draw_at(tail, torch.full((10_000,), 1 - 2.0**-53, dtype=torch.float64)) == 0).all()


def test_draws_follow_the_weights_down_to_rare_tokens() -> None:
    """The share of u that maps to a token is its weight, also 1e-9: float32 would have no room."""
    weights = torch.tensor([0.5, 1e-9, 0.5 - 1e-9])
    edges = weights.double().cumsum(0) / weights.double().sum()
    eps = 1e-13
    for k, edge in enumerate(edges[:-1]):
        u = torch.stack((edge - eps, edge + eps))
        assert draw_at(weights.expand(2, -1), u).tolist() == [k, k + 1]


def test_draws_pass_a_chi_square() -> None:
    weights = torch.rand(50)  # not normalised
    counts = np.bincount(draw(weights.expand(200_000, -1), _generator()).numpy(), minlength=50)
    expected = 200_000 * (weights.double() / weights.double().sum()).numpy()
    assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_generators_per_row_make_rows_independent_of_their_batch() -> None:
    alone = uniform((1, 5), [request_generator(3, 7, CPU)], CPU)
    batch = uniform((3, 5), [request_generator(3, i, CPU) for i in (1, 7, 2)], CPU)
    assert torch.equal(batch[1], alone[0])
    draws = {request_generator(s, i, CPU).initial_seed() for s in range(30) for i in range(30)}
    assert len(draws) == 900
    assert request_generator(-1, 0, CPU).initial_seed() >= 0
