"""The rules of the verdict: matches, ties, cuts, empty proposals, residuals, bad rows, batches.

That the verdict is lossless is the business of test_lossless.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dspark.runtime.records import ALL_ACCEPTED, CORRECTED, CUT, Plan
from dspark.runtime.sampling import BadLogits, SamplingParams, draw, to_probs
from dspark.runtime.verify import verify
from tests.laws import proposal, pvalue, reference, seeded

ALPHA = 1e-4
"""False-alarm rate of the two chi-squares here (50,000 draws, 2 cells)."""


def _peaks(tokens: list[list[int]], vocab: int) -> Tensor:
    return 5.0 * torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


@pytest.mark.parametrize("vocab", [7, 8])
def test_greedy_accepts_exactly_the_leading_matches(vocab: int) -> None:
    best = [[1, 2, 3, 4]] * 5
    tokens = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 0], [0, 0, 0]])
    verdict = verify(proposal(tokens, None), _peaks(best, vocab), SamplingParams(), seeded())
    assert verdict.accepted.tolist() == [3, 1, 0, 2, 0]
    assert verdict.next_token.tolist() == [4, 2, 1, 3, 1]
    assert verdict.level.tolist() == [ALL_ACCEPTED] + [CORRECTED] * 4


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 2, 5)
    verdict = verify(proposal(torch.tensor([[0], [1]]), None), logits, SamplingParams(), seeded())
    assert verdict.accepted.tolist() == [1, 0]
    assert verdict.next_token.tolist() == [0, 0]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)])
def test_a_cut_block_is_judged_up_to_the_cut(params: SamplingParams) -> None:
    """Tokens behind the cut do not matter; level 3 exactly where all verified ones passed."""
    best = [[1, 2, 3, 4]] * 5
    logits = 40 * _peaks(best, 6)  # so peaked that sampling has no choice
    tokens = torch.tensor([[1, 2, 3]] * 4 + [[1, 0, 3]])
    lengths = torch.tensor([0, 1, 2, 3, 2])
    probs = None if params.greedy else torch.nn.functional.one_hot(tokens, 6).float()
    offer = proposal(tokens, probs)
    verdict = verify(offer, logits, params, seeded(), Plan.chain(offer, lengths))
    assert verdict.accepted.tolist() == [0, 1, 2, 3, 1]
    assert verdict.next_token.tolist() == [1, 2, 3, 4, 2]
    assert verdict.level.tolist() == [CUT, CUT, CUT, ALL_ACCEPTED, CORRECTED]
    # Fewer logits rows than proposed tokens is the same cut for every row.
    short = verify(proposal(tokens, probs), logits[:, :2], params, seeded())
    assert short.accepted.tolist() == [1] * 5
    assert short.level.tolist() == [CUT] * 5


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.8, 0.9)])
def test_an_empty_proposal_is_a_plain_step(params: SamplingParams) -> None:
    logits = torch.randn(4, 1, 9)
    empty = proposal(torch.empty(4, 0, dtype=torch.int64), None)
    verdict = verify(empty, logits, params, seeded())
    assert verdict.accepted.tolist() == [0] * 4
    assert verdict.level.tolist() == [ALL_ACCEPTED] * 4
    if params.greedy:
        assert torch.equal(verdict.next_token, logits[:, 0].argmax(dim=-1))


def test_equal_distributions_always_accept() -> None:
    params = SamplingParams(0.7, 0.9, 20)
    logits = torch.randn(20_000, 4, 24)
    probs = to_probs(logits[:, :3], params)
    offer = proposal(draw(probs, seeded()), probs)
    verdict = verify(offer, logits, params, seeded(1))
    assert (verdict.accepted == 3).all()


def test_without_a_residual_p_stands_in() -> None:
    """A q that lies above p everywhere (rounding, exaggerated here) rejects without a residual."""
    logits = torch.tensor([[[2.0, 1.0, -torch.inf], [0.0, 0.0, 0.0]]]).expand(50_000, 2, 3)
    params = SamplingParams(1.0)
    probs = 4 * to_probs(logits[:, :1], params)
    offer = proposal(torch.zeros(50_000, 1, dtype=torch.int64), probs)
    verdict = verify(offer, logits, params, seeded())
    rejected = verdict.accepted == 0
    assert 0.7 < rejected.double().mean() < 0.8
    law = reference(logits[0, 0], params)
    assert pvalue(verdict.next_token[rejected], law) > ALPHA


def test_disjoint_supports_reject_and_correct_from_p() -> None:
    logits = torch.tensor([[[1.0, 2.0, -torch.inf, -torch.inf], [0.0] * 4]]).expand(50_000, 2, 4)
    q = torch.tensor([0.0, 0.0, 0.4, 0.6]).expand(50_000, 1, 4)
    offer = proposal(draw(q, seeded()), q)
    verdict = verify(offer, logits, SamplingParams(1.0), seeded())
    assert (verdict.accepted == 0).all()
    law = reference(logits[0, 0], SamplingParams(1.0))
    assert pvalue(verdict.next_token, law) > ALPHA


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("vocab", [7, 33])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(1.0), SamplingParams(0.5, 0.5)]
)
def test_bad_rows_are_named_and_healthy_batches_pass(
    batch: int, vocab: int, params: SamplingParams
) -> None:
    healthy = torch.randn(batch, 4, vocab)
    probs = to_probs(healthy[:, :3], params)
    offer = proposal(draw(probs, seeded()), None if params.greedy else probs)
    spoil: list[tuple[Callable[[Tensor], None], str]] = [
        (lambda row: row.fill_(torch.nan), "NaN"),
        (lambda row: row[2:3].fill_(torch.inf), "[+]inf"),
        (lambda row: row.fill_(-torch.inf), "nothing but -inf"),
    ]
    for change, found in spoil:
        logits = healthy.clone()
        change(logits[batch - 1, 2])
        with pytest.raises(BadLogits, match=f"row {batch - 1}, position 2 hold {found}"):
            verify(offer, logits, params, seeded())
    verdict = verify(offer, healthy, params, seeded())
    assert ((verdict.next_token >= 0) & (verdict.next_token < vocab)).all()


def test_generators_per_row_make_verdicts_independent_of_the_batch() -> None:
    params = SamplingParams(1.0)
    logits = torch.randn(6, 4, 9)
    probs = to_probs(torch.randn(6, 3, 9), params)
    tokens = draw(probs, seeded())
    together = verify(proposal(tokens, probs), logits, params, [seeded(100 + b) for b in range(6)])
    for b in range(6):
        one = slice(b, b + 1)
        alone = verify(proposal(tokens[one], probs[one]), logits[one], params, [seeded(100 + b)])
        assert alone.accepted == together.accepted[b]
        assert alone.next_token == together.next_token[b]
