"""Acceptance metrics against closed forms, scripted rounds and bounds that must always hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.runtime.records import Generation, RoundRecord
from dspark_eval import metrics, profiles


def record(verified: int, accepted: int, *, ended: bool = False, drafted: int | None = None):
    """A round with k verified and a accepted; `ended`: an accepted token ended the text."""
    return RoundRecord(
        drafted=verified if drafted is None else drafted,
        verified=verified,
        accepted=accepted,
        emitted=accepted if ended else accepted + 1,
        level=0 if accepted == verified else 2,
        draft_s=0.001,
        verify_s=0.002,
        other_s=0.003,
        confidence=(0.5,) * verified,
        entropy=(1.0,) * verified,
    )


def answer(rounds: list[RoundRecord], tokens: list[int] | None = None) -> Generation:
    length = 1 + sum(r.emitted for r in rounds)
    return Generation(
        tokens=list(range(length)) if tokens is None else tokens,
        rounds=rounds,
        finish="length",
        prefill_s=0.01,
        decode_s=0.1,
    )


def rounds_strategy() -> st.SearchStrategy[list[RoundRecord]]:
    sizes = st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
    return st.lists(sizes.map(lambda pair: record(*pair)), max_size=40)


# a = 3 of 3, 1 of 3, 0 of 3: e = 4, 2, 1
THREE = [record(3, 3), record(3, 1), record(3, 0)]


def test_pooled_figures_by_hand():
    assert metrics.accepted_length(THREE) == pytest.approx(7 / 3)
    assert metrics.acceptance_rate(THREE) == pytest.approx(4 / 9)
    assert metrics.acceptance_rate_with_bonus(THREE) == pytest.approx(7 / 12)
    assert metrics.draft_length_mean(THREE) == 3
    assert metrics.conditional_acceptance(THREE) == pytest.approx([2 / 3, 1 / 2, 1])
    assert metrics.prefix_survival(THREE) == pytest.approx([2 / 3, 1 / 3, 1 / 3])


def test_match_after_a_rejection_does_not_count():
    """Matches [yes, no, yes]: one accepted, two emitted, and position 3 was never reached."""
    rounds = [record(3, 1)]
    assert metrics.accepted_length(rounds) == 2
    assert metrics.acceptance_rate(rounds) == pytest.approx(1 / 3)
    assert metrics.acceptance_rate_with_bonus(rounds) == pytest.approx(2 / 4)
    assert metrics.conditional_acceptance(rounds) == [1.0, 0.0, None]
    assert metrics.prefix_survival(rounds) == [1.0, 0.0, 0.0]


def test_end_token_inside_the_block():
    """End token at slot 3 of 5: three emitted, no bonus, and what follows it is not verified."""
    rounds = [record(3, 3, ended=True, drafted=5)]
    assert metrics.accepted_length(rounds) == 3
    assert metrics.acceptance_rate(rounds) == 1
    assert metrics.acceptance_rate_with_bonus(rounds) == pytest.approx(3 / 4)
    assert metrics.conditional_acceptance(rounds) == [1.0, 1.0, 1.0]


def test_round_cut_by_the_limit():
    """A last round that may draft two and a last single token, which drafts nothing."""
    rounds = [record(7, 7), record(2, 1), record(0, 0)]
    assert metrics.accepted_length(rounds) == pytest.approx((8 + 2 + 1) / 3)
    assert metrics.acceptance_rate(rounds) == pytest.approx(8 / 9)
    assert metrics.prefix_survival(rounds)[1] == pytest.approx(1 / 2)
    assert metrics.prefix_survival(rounds)[2] == 1


def test_nothing_measured_is_none():
    assert metrics.accepted_length([]) is None
    assert metrics.acceptance_rate([record(0, 0)]) is None
    assert metrics.conditional_acceptance([]) == []
    assert metrics.round_times_ms([])["frame_ms_p50"] is None
    assert metrics.accepted_length_percentiles([[]]) == {"p10": None, "p50": None, "p90": None}
    assert metrics.loop_share([]) is None


@settings(max_examples=200, deadline=None)
@given(rounds_strategy())
def test_rates_stay_in_the_unit_interval(rounds):
    rates = [
        metrics.acceptance_rate(rounds),
        metrics.acceptance_rate_with_bonus(rounds),
        *metrics.conditional_acceptance(rounds),
        *metrics.prefix_survival(rounds),
    ]
    assert all(0 <= rate <= 1 for rate in rates if rate is not None)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_accepted_length_is_one_plus_the_sum_of_survival(k, accepted):
    """The identity of a constant draft length without early stops; C_j is then S_j / S_{j-1}."""
    rounds = [record(k, min(a, k)) for a in accepted]
    survival = metrics.prefix_survival(rounds)
    assert metrics.accepted_length(rounds) == pytest.approx(1 + sum(survival))
    product = 1.0
    for chance, survived in zip(metrics.conditional_acceptance(rounds), survival, strict=True):
        product *= chance or 0.0
        assert product == pytest.approx(survived)


def test_conditional_acceptance_recovers_a_geometric_chain():
    """Independent acceptance with chance c gives C_j = c and tau = (1 - c^(k+1)) / (1 - c).

    20,000 rounds: five standard errors of C_1 are 0.015, of C_7 (c^6 of the rounds) 0.023.
    """
    chance, k, n = 0.8, 7, 20_000
    draws = np.random.default_rng(0).random((n, k)) < chance
    accepted = np.cumprod(draws, axis=1).sum(axis=1)
    rounds = [record(k, int(a)) for a in accepted]
    reached = n * chance ** np.arange(k)
    bound = 5 * np.sqrt(chance * (1 - chance) / reached)
    assert np.all(np.abs(np.array(metrics.conditional_acceptance(rounds)) - chance) < bound)
    expected = (1 - chance ** (k + 1)) / (1 - chance)
    assert metrics.accepted_length(rounds) == pytest.approx(expected, abs=0.1)


def test_round_times_are_means_and_percentiles_in_milliseconds():
    times = metrics.round_times_ms([record(3, 1)] * 4)
    assert times["draft_ms"] == pytest.approx(1)
    assert times["verify_ms"] == pytest.approx(2)
    assert times["other_ms"] == pytest.approx(3)
    assert times["frame_ms_p50"] == times["frame_ms_p99"] == pytest.approx(6)


def test_pooling_weighs_rounds_and_percentiles_weigh_prompts():
    by_prompt = [[record(3, 3)] * 9, [record(3, 0)]]
    assert metrics.accepted_length(metrics.pool(by_prompt)) == pytest.approx(3.7)
    assert metrics.accepted_length_percentiles(by_prompt)["p50"] == pytest.approx(2.5)


def test_bootstrap_interval_of_a_mean_matches_the_normal_one():
    """With denominators of 1 the ratio is a mean: half-width 1.96 sd / sqrt(n), to 15 %."""
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    low, high = metrics.ratio_ci95(values, np.ones(400))
    half = 1.96 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_bootstrap_is_seeded_and_resamples_prompts_not_rounds():
    """Ten identical rounds in each of two unlike prompts: the interval spans both prompts."""
    by_prompt = [[record(3, 3)] * 10, [record(3, 0)] * 10]
    interval = metrics.accepted_length_ci95(by_prompt, seed=3)
    assert interval == metrics.accepted_length_ci95(by_prompt, seed=3)
    assert interval == (1.0, 4.0)
    assert metrics.accepted_length_ci95(by_prompt[:1]) is None


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    """Ratio of sums over 40 prompts, 300 repetitions: coverage 95 % less a small-sample loss.

    True coverage 0.93 would be seen below 0.88 with a chance of about 4e-4.
    """
    generator = np.random.default_rng(5)
    hits = 0
    for seed in range(300):
        size = generator.integers(5, 50, 40)
        total = generator.poisson(3.0 * size)
        low, high = metrics.bootstrap_ci95(
            np.stack([total, size], 1), lambda s: s[0] / s[1], seed=seed, resamples=400
        )
        hits += low <= 3.0 <= high
    assert hits / 300 > 0.88


def test_few_prompts_are_warned_about():
    assert metrics.sample_size_warnings(30) == []
    assert "few prompts (29)" in metrics.sample_size_warnings(29)[0]


def test_loops_are_found_and_taken_out():
    loop, fresh = [1, 2, 3, 4] * 20, list(range(80))
    assert metrics.loop_share([loop, fresh]) == 0.5
    generations = [answer([record(79, 79)], loop), answer([record(7, 1)], fresh)]
    assert metrics.accepted_length_without_loops(generations) == 2


def test_context_buckets_follow_the_answer_across_an_edge():
    """A prompt of 126 tokens: the anchors of its rounds stand at 126, 130 and 132."""
    rounds = [record(3, 3), record(3, 1), record(3, 0)]
    buckets = profiles.context_buckets([126, 600], [rounds, [record(3, 0)]])
    assert [(b.low, b.high, b.rounds, b.accepted_length) for b in buckets] == [
        (0, 128, 1, 4.0),
        (128, 512, 2, 1.5),
        (512, 2048, 1, 1.0),
    ]


def test_rounds_that_do_not_add_up_are_refused():
    metrics.check_generation(answer(THREE))
    with pytest.raises(ValueError, match="rounds emitted 7"):
        metrics.check_generation(answer(THREE, [1, 2, 3]))
    impossible = RoundRecord(3, 2, 3, 4, 0, 0.0, 0.0, 0.0, (), ())
    with pytest.raises(ValueError, match="round 0"):
        metrics.check_generation(answer([impossible]))
