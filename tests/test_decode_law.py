"""Joint laws of what the decode loops emit, against the closed form of a table target.

Pearson's chi-square at a false-alarm rate of 1e-4 per test. Its power: a total-variation error d
gives a noncentrality of at least n * (2 d)^2, so with 26 degrees of freedom the fast runs (1,500
texts) catch d = 0.12 with probability 0.99 and the slow ones (15,000) d = 0.04; the verdict alone
is held to 0.01 in test_lossless.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.plain import generate_batch, plain_generate
from dspark.runtime.sampling import SamplingParams, to_probs
from tests.laws import pvalue
from tests.table_target import TableDrafter, TableTarget


def joint(target: TableTarget, prompt: list[int], sampling: SamplingParams) -> np.ndarray:
    """[V, V, V] exact joint law of the first three tokens after the prompt."""
    p = to_probs(target.table, sampling).double()
    a, b = prompt[-2:]
    first = p[a, b]
    return torch.einsum("x,xy,xyz->xyz", first, p[b], p).numpy()


def assert_law(texts: list[list[int]], law: np.ndarray) -> None:
    vocab = law.shape[0]
    cells = torch.tensor(texts) @ torch.tensor([vocab**2, vocab, 1])
    assert pvalue(cells, law.reshape(-1)) > 1e-4


SETTINGS = [
    SamplingParams(1.0),
    SamplingParams(0.6),
    SamplingParams(1.3, 0.8),
    SamplingParams(1.0, 1.0, 2),
]
COUNTS = [1_500, pytest.param(5_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("count", COUNTS)
def test_first_three_tokens_follow_the_targets_law(sampling: SamplingParams, count: int) -> None:
    """Through the whole loop: prefill, then drafts of three tokens from a poor drafter."""
    target = TableTarget.random(3, 8, scale=1.0)
    drafter = TableDrafter.of(target, 3, noise=1.0, seed=2)
    decoder = SpeculativeDecoder(target, drafter)
    results = [
        decoder.generate([1, 2], max_new_tokens=5, sampling=sampling, draft_length=3, seed=seed)
        for seed in range(count)
    ]
    assert_law([r.tokens[:3] for r in results], joint(target, [1, 2], sampling))
    # Tokens two and three came out in every way there is.
    assert {r.rounds[0].accepted for r in results} == {0, 1, 2, 3}


@pytest.mark.parametrize("sampling", SETTINGS)
def test_plain_and_batch_follow_the_same_law(sampling: SamplingParams) -> None:
    target = TableTarget.random(3, 8, scale=1.0)
    law = joint(target, [1, 2], sampling)
    options = {"max_new_tokens": 3, "sampling": sampling}
    plain = [plain_generate(target, [1, 2], seed=s, **options).tokens for s in range(2_000)]
    assert_law(plain, law)
    assert_law(generate_batch(target, [[1, 2]] * 2_000, **options), law)
