"""Estimates and paired comparisons against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dspark.runtime.records import Generation
from dspark_eval import metrics
from dspark_eval.intervals import (
    MIN_PROMPTS,
    Estimate,
    estimate,
    over_seeds,
    paired,
    share,
    share_of,
    student_quantile,
)
from tests.test_metrics import answer, record


def test_an_estimate_by_hand():
    """Two prompts with 6 of 2 and 2 of 2: pooled 8 / 4, each 3 and 1, sd sqrt 2."""
    found = estimate([6, 2, 0], [2, 2, 0])  # the third has nothing to divide by
    assert (found.value, found.n, found.n_prompts) == (2.0, 4.0, 2)
    assert found.spread == pytest.approx(np.sqrt(2))
    assert found.ci95 == (1.0, 3.0)
    assert found.few
    assert estimate([], []) == Estimate(None, 0.0, 0, None, None, True)
    one = estimate([3], [2])
    assert (one.value, one.spread, one.ci95) == (1.5, None, None)
    assert not estimate([1] * MIN_PROMPTS, [1] * MIN_PROMPTS).few


def test_the_interval_of_equal_weights_is_the_normal_one():
    values = np.random.default_rng(2).normal(4, 2, 900)
    found = estimate(values, np.ones(900))
    half = 1.96 * found.spread / 30
    assert found.ci95 == pytest.approx((found.value - half, found.value + half), abs=0.15 * half)


@pytest.mark.parametrize(("right", "n"), [(0, 10), (6, 6), (17, 40), (99, 100)])
def test_the_interval_of_a_share_is_wilsons(right, n):
    """scipy as the oracle; never a point where all answers are alike."""
    found = share([True] * right + [False] * (n - right))
    exact = stats.binomtest(right, n).proportion_ci(0.95, "wilson")
    assert found.value == right / n
    assert found.ci95 == pytest.approx((exact.low, exact.high), abs=1e-6)
    assert share([]).ci95 is None


def test_shares_that_are_all_alike_are_not_certain():
    """Rounds of a prompt resemble each other: 20 of 20 in 4 prompts is as sure as 4 of 4."""
    exact = stats.binomtest(4, 4).proportion_ci(0.95, "wilson")
    found = share_of([5] * 4, [5] * 4)
    assert (found.value, found.n, found.n_prompts) == (1.0, 20.0, 4)
    assert found.ci95 == pytest.approx((exact.low, 1.0), abs=1e-6)
    none = share_of([0] * 4, [5] * 4)
    assert none.ci95 == pytest.approx((0.0, 1 - exact.low), abs=1e-6)
    half = stats.binomtest(20, 40).proportion_ci(0.95, "wilson")
    found = share_of([1, 2] * 20, [2, 4] * 20)  # one half of each
    assert found.ci95 == pytest.approx((half.low, half.high), abs=1e-6)
    assert share_of([3], [5]).ci95 is None
    # where they are not, prompts are resampled as for any other ratio
    assert share_of([1, 5], [5, 5]) == estimate([1, 5], [5, 5])


def test_answers_that_never_loop_may_still_do_so():
    found = metrics.estimates([[answer([record(3, 1)])] for _ in range(40)])
    bounds = stats.binomtest(0, 40).proportion_ci(0.95, "wilson")
    assert found["loop_share"].ci95 == pytest.approx((0, bounds.high), abs=1e-6)
    assert found["finished_share"].value == 0
    assert found["finished_share"].ci95[1] > 0.05


def test_a_length_without_loops_is_of_the_answers_that_do_not():
    looping = answer([record(3, 3)] * 20, tokens=[7] * 81)
    found = metrics.estimates([[answer([record(3, 1)])], [looping]])
    alone = found["accepted_length_without_loops"]
    assert (alone.value, alone.n, alone.n_prompts) == (2.0, 1.0, 1)
    assert metrics.accepted_length_without_loops([answer([record(3, 1)]), looping]) == 2.0


def test_pairs_take_the_difficulty_of_prompts_out():
    """Prompts differ by a factor of three, drafters by 5 %: in pairs that is clear."""
    generator = np.random.default_rng(3)
    hard = generator.uniform(1, 3, 60)
    theirs = [(100 * level, 100.0) for level in hard]
    ours = [(105 * level + generator.normal(0, 2), 100.0) for level in hard]
    found = paired(ours, theirs)
    assert found.ratio == pytest.approx(1.05, abs=0.01)
    assert found.clear
    assert 1.03 < found.ratio_ci95[0] < found.ratio < found.ratio_ci95[1] < 1.07
    assert found.difference == pytest.approx(found.ours - found.theirs)
    assert found.difference_ci95[0] > 0
    # apart the two intervals overlap by most of their width
    alone = [estimate([x for x, _ in rows], [n for _, n in rows]) for rows in (ours, theirs)]
    assert alone[0].ci95[0] < alone[1].ci95[1]


def test_a_drafter_against_itself_is_exactly_one_and_never_clear():
    rows = [(float(e), 5.0) for e in range(5, 40)]
    found = paired(rows, rows)
    assert (found.ratio, found.ratio_ci95, found.difference) == (1.0, (1.0, 1.0), 0.0)
    assert (found.wins, found.clear, found.few) == (0.5, False, False)


def test_paired_intervals_cover_no_difference_as_often_as_they_say():
    """Two equal drafters, noise of their own: the interval leaves 1 out in about 5 % of 200.

    With a true rate of 0.05 more than 24 of 200 has a chance of 2e-5.
    """
    generator = np.random.default_rng(11)
    outside = 0
    for seed in range(200):
        hard = generator.uniform(1, 4, 40)
        ours, theirs = (
            [(float(generator.poisson(20 * level)), 20.0) for level in hard] for _ in range(2)
        )
        outside += paired(ours, theirs, seed=seed).clear
    assert outside <= 24


def test_prompts_that_one_of_the_two_lacks_are_left_out_and_counts_must_agree():
    found = paired([(4, 2), (1, 0)], [(2, 2), (9, 3)])
    assert (found.ratio, found.n_prompts, found.wins) == (2.0, 1, 1.0)
    assert paired([(1, 0)], [(1, 1)]).ratio is None
    with pytest.raises(ValueError, match="2 prompts of ours, 1 of theirs"):
        paired([(1, 1), (1, 1)], [(1, 1)])


def test_figures_of_records_in_pairs():
    ours, theirs = [[record(3, 3)], [record(3, 1)]], [[record(3, 1)], [record(3, 0)]]
    assert metrics.compare(ours, theirs).ratio == 2.0
    rate = metrics.compare(ours, theirs, "acceptance_rate")
    assert (rate.ours, rate.theirs) == (pytest.approx(4 / 6), pytest.approx(1 / 6))


def test_every_figure_is_estimated_and_agrees_with_its_definition():
    by_prompt = [
        [answer([record(3, 3), record(3, 1)]), answer([record(2, 2, ended=True)])],
        [answer([record(3, 0)])],
    ]
    found = metrics.estimates(by_prompt)
    generations: list[Generation] = [g for answers in by_prompt for g in answers]
    rounds = metrics.pool(g.rounds for g in generations)
    for name in metrics.FIGURES:
        assert found[name].value == pytest.approx(getattr(metrics, name)(rounds)), name
        assert found[name].n_prompts == 2
    # 1 + 4 + 2, 1 + 2 and 1 + 1 tokens over 1 + 2, 1 + 1 and 1 + 1 passes
    assert found["block_efficiency"].value == pytest.approx(12 / 7)
    assert metrics.block_efficiency(generations) == pytest.approx(12 / 7)
    assert (found["loop_share"].value, found["loop_share"].n) == (0.0, 3.0)
    # a = 3, 1, 2 and 0 of four rounds; the bonus is missing where the answer ended
    assert metrics.accepted_length_without_bonus(rounds) == pytest.approx(6 / 4)
    assert metrics.accepted_length(rounds) == pytest.approx(9 / 4)
    assert metrics.draft_share(rounds) == pytest.approx(1 / 6)


def test_positions_have_their_own_n():
    found = metrics.position_estimates([[record(3, 3), record(3, 0)], [record(2, 2)]])
    conditional, survival = found["conditional_acceptance"], found["prefix_survival"]
    assert [e.value for e in conditional] == pytest.approx([2 / 3, 1.0, 1.0])
    assert [e.n for e in conditional] == [3.0, 2.0, 1.0]
    assert [e.n for e in survival] == [3.0, 3.0, 2.0]
    assert [e.n_prompts for e in survival] == [2, 2, 1]
    # one round of one prompt, accepted: Wilson's [0.207, 1] of 1 out of 1, and never a point
    assert conditional[2].ci95 == pytest.approx((0.2065, 1), abs=1e-4)
    assert conditional[2].few


@pytest.mark.parametrize("freedom", [1, 2, 2.7, 10, 300])
def test_students_quantile(freedom):
    """scipy as the oracle."""
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)


def counts(rng, length, prompts, seeds, spread):
    """[seeds, prompts, 2]: 20 rounds a prompt; prompts and seeds each shift the accepted length."""
    seed = length * np.exp(spread * rng.normal(size=(seeds, 1)))
    emitted = 20 * seed * prompts + rng.normal(0, 3, (seeds, len(prompts)))
    return np.stack([emitted, np.full_like(emitted, 20)], axis=-1)


def test_an_interval_over_seeds_covers_and_one_over_prompts_does_not():
    """Two recipes that are worth the same, seeds that differ by 5 %: 3 seeds each, 60 prompts.

    Of 200 pairs at least 90 % have to hold 1 (95 % less three standard errors of 1.5 %).
    """
    held, by_prompts = 0, 0
    for trial in range(200):
        rng = np.random.default_rng(trial)
        prompts = rng.uniform(0.7, 1.3, 60)
        ours, theirs = (counts(rng, 2.5, prompts, 3, 0.05) for _ in range(2))
        low, high = over_seeds(ours, theirs).ratio_ci95
        held += low <= 1 <= high
        low, high = paired(ours.sum(0), theirs.sum(0)).ratio_ci95
        by_prompts += low <= 1 <= high
    assert held >= 0.90 * 200
    assert by_prompts < 0.6 * 200


def test_an_interval_over_seeds_by_hand():
    """Prompts alike: only seeds count. Logs 0 and 2a against one run without a seed."""
    ours = np.array([[[10.0, 10], [10, 10]], [[12, 10], [12, 10]]])
    theirs = np.array([[[10.0, 10], [10, 10]]])
    found = over_seeds(ours, theirs)
    log = np.log(1.2)
    assert found.ratio == pytest.approx(1.1)
    assert found.per_seed == ((1.0, 1.2), (1.0,))
    assert found.prompts_sd == pytest.approx(0, abs=1e-12)
    assert found.seeds_sd == pytest.approx(log / 2)  # sd = log / sqrt 2, over sqrt 2 seeds
    assert found.freedom == pytest.approx(1)
    half = stats.t.ppf(0.975, 1) * log / 2
    assert found.ratio_ci95 == pytest.approx((1.1 * np.exp(-half), 1.1 * np.exp(half)))
    alike = over_seeds(theirs, theirs)
    assert (alike.ratio, alike.ratio_ci95, alike.seeds_sd) == (1.0, (1.0, 1.0), None)
    assert over_seeds(ours[:, :1], theirs[:, :1]).ratio_ci95 is None
    with pytest.raises(ValueError, match="prompts and counts"):
        over_seeds(ours, theirs[:, :1])
