"""Texts held against the target's law: false alarms as stated, planted defects found."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams, to_probs
from dspark_eval import fidelity
from dspark_eval.lossless.statistics import ALPHA
from tests.table_target import TableDrafter, TableTarget

VOCAB = 12
ONE = SamplingParams(temperature=1.0)
GREEDY = SamplingParams()
Texts = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def target() -> TableTarget:
    return TableTarget.random(VOCAB, seed=1)


def drawn(
    target: TableTarget, law: Callable[[Tensor], Tensor], count: int, *, seed: int, end: int = -1
) -> Texts:
    """`count` texts of 50 tokens at most, `law` of the logits at each; token `end` ends one."""
    generator = torch.Generator().manual_seed(seed)
    laws = law(target.table.reshape(-1, VOCAB)).reshape(VOCAB, VOCAB, VOCAB)
    rows = torch.tensor([[3, 5]]).repeat(count, 1)
    for _ in range(50):
        now = laws[rows[:, -2], rows[:, -1]]
        rows = torch.cat((rows, torch.multinomial(now, 1, generator=generator)), dim=1)
    answers = rows[:, 2:].tolist()
    return [([3, 5], a[: a.index(end) + 1] if end in a else a) for a in answers]


def judged(target: TableTarget, texts: Texts, sampling: SamplingParams = ONE, seed: int = 0):
    found = fidelity.collect(target, texts, sampling, seed=seed)
    return fidelity.judge(found, sampling, tests=2)


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


# ------------------------------------------------------------------ what is collected


def test_chunks_give_the_logits_of_one_plain_pass(target, monkeypatch):
    """Prompts and answers longer and shorter than a chunk, first token included."""
    monkeypatch.setattr(fidelity, "PREFILL_CHUNK", 5)
    monkeypatch.setattr(fidelity, "ROWS", 3)
    text = torch.randint(VOCAB, (23,), generator=torch.Generator().manual_seed(2)).tolist()
    for cut in (1, 4, 5, 6, 12, 22):
        parts = list(fidelity.logits_of_answer(target, text[:cut], text[cut:]))
        logits = torch.cat([rows for rows, _ in parts])
        assert torch.cat([tokens for _, tokens in parts]).tolist() == text[cut:]
        padded = [0, *text]
        expected = [target.table[padded[i], padded[i + 1]] for i in range(cut - 1, 22)]
        assert torch.equal(logits, torch.stack(expected))


def test_ranks_and_surprise_by_hand():
    """p = .5 .3 .2: token 1 stands behind .5, its U lies in [.5, .8]."""
    row = torch.tensor([0.5, 0.3, 0.2]).log()
    target = TableTarget(row.expand(3, 3, 3).contiguous())
    found = fidelity.collect(target, [([0], [1, 0, 2])], ONE, seed=0)
    u = found.ranks
    assert 0.5 <= u[0] <= 0.8
    assert 0 <= u[1] <= 0.5
    assert 0.8 <= u[2] <= 1
    p = np.array([0.5, 0.3, 0.2])
    entropy = -(p * np.log(p)).sum()
    assert found.surprise == pytest.approx(-np.log(p).sum() - 3 * entropy, rel=1e-5)
    assert found.variance == pytest.approx(3 * ((p * np.log(p) ** 2).sum() - entropy**2), rel=1e-5)
    assert found.tokens == 3


# ------------------------------------------------------------------ false alarms


def test_p_values_of_right_texts_are_uniform_or_larger(target):
    """Ends included. Kolmogorov-Smirnov of 120 ranks; fails by chance once in 10,000. At most one
    surprise in ten is below 0.1: 25 of 120 would be 4 standard deviations above that."""
    ranks, surprises = [], []
    texts = drawn(target, softmax, 120 * 40, seed=0, end=7)
    for seed in range(120):
        group = texts[40 * seed : 40 * (seed + 1)]
        found = fidelity.collect(target, group, ONE, seed=seed)
        ranks.append(fidelity.rank_test(found.ranks)["p"])
        surprises.append(fidelity.surprise_test(found)["p"])
    assert stats.kstest(ranks, "uniform").pvalue > 1e-4
    assert sum(p < 0.1 for p in surprises) < 25


@pytest.mark.parametrize("tokens", [50, 200, 1000, 5000])
def test_a_sure_target_raises_no_more_alarms_than_stated(tokens):
    """Law (0.999, 0.001): every number of rare tokens, weighed by its binomial chance. The tail of
    a normal, which p-values must not be taken from, would raise ten times as many."""
    p = torch.tensor([0.999, 0.001])
    one = TableTarget(p.log().expand(2, 2, 2).contiguous())
    usual, rare = (fidelity.collect(one, [([0], [x])], ONE, seed=0) for x in (0, 1))
    alarms = normal = 0.0
    for count in range(40):
        found = fidelity.surprise_test(
            fidelity.Evidence(
                tokens,
                [0.5] * tokens,
                surprise=(tokens - count) * usual.surprise + count * rare.surprise,
                variance=tokens * usual.variance,
                cumulants=[tokens * each for each in usual.cumulants],
            )
        )
        chance = stats.binom.pmf(count, tokens, 0.001)
        alarms += chance * (found["p"] < ALPHA / 2)
        normal += chance * (2 * stats.norm.sf(abs(found["z"])) < ALPHA / 2)
    assert usual.cumulants == pytest.approx(rare.cumulants)
    assert alarms <= ALPHA / 2
    assert normal > 2 * ALPHA / 2
    assert found["p"] < 1e-9, "39 rare ones are noticed"


def test_cumulants_by_hand():
    """ln sum p^(1 - l) - l H, token left out by a filter aside."""
    p = np.array([0.5, 0.3, 0.2])
    one = TableTarget(torch.tensor([*p, 1e-9]).log().expand(4, 4, 4).contiguous())
    found = fidelity.collect(one, [([0], [1, 0])], SamplingParams(1.0, 1.0, 3), seed=0)
    entropy = -(p * np.log(p)).sum()
    expected = [2 * (np.log((p ** (1 - t)).sum()) - t * entropy) for t in fidelity.TILTS]
    assert found.cumulants == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "sampling", [ONE, SamplingParams(0.7, 0.9), SamplingParams(1.3, 1.0, 4)], ids=str
)
def test_speculative_texts_pass_with_every_filter(target, sampling):
    """The real decoder on a drafter that is often wrong: rejections, corrections and bonuses."""
    drafter = TableDrafter.random(VOCAB, 4, seed=3)
    decoder = SpeculativeDecoder(target, drafter)
    texts: Texts = []
    for seed in range(20):
        out = decoder.generate([3, 5], max_new_tokens=50, sampling=sampling, seed=seed)
        texts.append(([3, 5], out.tokens))
    found = judged(target, texts, sampling)
    assert found["passed"] is True
    assert (found["impossible"], found["tokens"]) == (0, 1000)
    assert found["rank"]["bins"] == 20
    assert fidelity.fidelity_warnings(found) == []


# ------------------------------------------------------------------ planted defects


def drafter_law(target: TableTarget) -> Tensor:
    """q of a drafter that is wrong about a third of the time."""
    noise = torch.randn(VOCAB * VOCAB, VOCAB, generator=torch.Generator().manual_seed(9))
    return (target.table.reshape(-1, VOCAB) + noise).softmax(-1)


DEFECTS = {
    # corrections drawn from p instead of the residual
    "no residual": lambda p, q: torch.minimum(p, q) + (1 - torch.minimum(p, q).sum(-1, True)) * p,
    # a draft is kept half of the times it should be thrown away
    "lenient": lambda p, q: 0.5 * p + 0.5 * q,
    "temperature 1.1": lambda p, q: (p.log() / 1.1).softmax(-1),
    "temperature 0.9": lambda p, q: (p.log() / 0.9).softmax(-1),
}


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_defects_of_speculative_decoding_are_found(target, name):
    q = drafter_law(target)
    texts = drawn(target, lambda logits: DEFECTS[name](logits.softmax(-1), q), 120, seed=4)
    found = judged(target, texts)
    assert found["passed"] is False
    (said,) = fidelity.fidelity_warnings(found)
    assert "NOT LOSSLESS" in said
    assert "less than one of 1000 runs" in said


def test_the_power_stated_is_that_of_the_test():
    """U off by the smallest TV said to be found: with 99 % of 300 samples it is.

    Half of the bins get more and half less; 285 of 300 would be 7 standard errors below.
    """
    n, level = 4000, ALPHA / 2
    generator = np.random.default_rng(6)
    evidence = fidelity.Evidence(tokens=n, ranks=generator.random(n).tolist())
    tv = fidelity.judge(evidence, ONE, tests=2)["rank"]["detectable_tv"]
    assert 0.02 < tv < 0.07
    law = np.repeat([1 + 2 * tv, 1 - 2 * tv], 10) / 20
    found = 0
    for _ in range(300):
        u = (generator.choice(20, n, p=law) + generator.random(n)) / 20
        found += fidelity.rank_test(u.tolist())["p"] < level
    assert found >= 285


def test_impossible_tokens_fail_at_once_and_the_edge_of_a_filter_does_not(target):
    """top-k 2 over three tokens of which two are a rounding step apart."""
    row = torch.tensor([2.0, 1.0, 1.0 - 1e-7, -3.0])
    tied = TableTarget(row.expand(4, 4, 4).contiguous())
    top2 = SamplingParams(1.0, 1.0, 2)
    kept = to_probs(row, top2) > 0
    assert kept.tolist() == [True, True, False, False]
    edge = fidelity.collect(tied, [([0], [2] * 3 + [0] * 90)], top2, seed=0)
    assert (edge.edge, edge.impossible) == (3, 0)
    wrong = fidelity.collect(tied, [([0], [3] + [0] * 90)], top2, seed=0)
    assert (wrong.edge, wrong.impossible) == (0, 1)
    assert fidelity.judge(wrong, top2, tests=2)["passed"] is False


def test_too_few_tokens_say_nothing(target):
    found = judged(target, drawn(target, softmax, 1, seed=0))
    assert (found["rank"], found["tokens"]) == (None, 50)
    assert judged(target, [([3, 5], [1, 2])])["passed"] is None


# ------------------------------------------------------------------ temperature 0


def test_greedy_texts_are_the_best_tokens_and_one_that_is_not_has_its_margin(target):
    answer = plain_generate(target, [3, 5], max_new_tokens=30, sampling=GREEDY).tokens
    found = judged(target, [([3, 5], answer)], GREEDY)
    assert (found["passed"], found["not_best"], found["tokens"]) == (True, 0, 30)
    wrong = list(answer)
    before = [3, 5, *answer][10:12]
    logits = target.table[before[0], before[1]]
    wrong[10] = int(logits.topk(2).indices[1])
    found = judged(target, [([3, 5], answer), ([3, 5], wrong[:11])], GREEDY)
    assert (found["passed"], found["not_best"], found["near_ties"]) == (False, 1, 0)
    (entry,) = [dict(e) for e in found["entries"][:1]]
    best = logits.topk(2).values
    assert (entry["answer"], entry["position"]) == (1, 10)
    assert entry["margin"] == pytest.approx(float(best[0] - best[1]))
    assert "1 of 41 tokens is not the target's best" in fidelity.fidelity_warnings(found)[0]


def test_a_near_tie_is_no_defect():
    row = torch.tensor([1.0, 1.0 + 2**-22, 0.0])
    target = TableTarget(row.expand(3, 3, 3).contiguous())
    found = judged(target, [([0], [0, 1, 0])], GREEDY)
    assert (found["passed"], found["not_best"], found["near_ties"]) == (True, 2, 2)
    assert fidelity.fidelity_warnings(found) == []
    assert math.isclose(found["largest_margin"], 2**-22)
