"""Acceptance by context, entropy and threshold, goodput, and bands, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark.runtime.cost_model import BatchCosts, CostModel
from dspark.runtime.records import ALL_ACCEPTED, CORRECTED, CUT, SIBLING, RoundRecord
from dspark_eval import metrics, outcomes, profiles, sweeps
from tests.test_metrics import record


def told(accepted: int, confidence: tuple[float, ...], entropy: tuple[float, ...] = ()):
    verified = len(confidence)
    made = record(verified, accepted)
    return replace(made, confidence=confidence, entropy=entropy or (1.0,) * verified)


# ------------------------------------------------------------------ context


def test_buckets_resample_conversations_and_not_turns():
    """Two turns of one conversation are one prompt: no interval from it alone."""
    rounds = [[record(3, 3)], [record(3, 0)]]
    apart = profiles.context_buckets([10, 20], rounds)
    together = profiles.context_buckets([10, 20], rounds, owners=[0, 0])
    assert (apart[0].n_prompts, apart[0].accepted_length_ci95) == (2, (1.0, 4.0))
    assert (together[0].n_prompts, together[0].accepted_length_ci95) == (1, None)
    assert apart[0].accepted_length == together[0].accepted_length == 2.5


# ------------------------------------------------------------------ entropy


def test_entropy_of_accepted_and_rejected_positions():
    rounds = [told(1, (0.9, 0.9, 0.9), (0.05, 3.0, 9.0)), told(3, (0.9,) * 3, (0.05, 0.5, 0.5))]
    found = profiles.entropy_profile([rounds], edges=(0.1, 1.0))
    first, second, third = found.positions
    assert (first.drafted, first.accepted, first.rejected, first.n) == (0.05, 0.05, None, 2)
    assert (second.accepted, second.rejected) == (0.5, 3.0)
    assert (third.drafted, third.accepted, third.rejected) == (4.75, 0.5, None)  # one not reached
    low, middle, high = found.bins
    assert (low.drafted, low.reached, low.acceptance) == (2, 2, 1.0)
    assert (middle.drafted, middle.reached, middle.acceptance) == (2, 2, 1.0)
    assert (high.drafted, high.reached, high.acceptance, high.high) == (2, 1, 0.0, None)
    assert sum(b.share for b in found.bins) == pytest.approx(1)


def test_a_bin_of_few_positions_says_so_and_is_not_certain():
    """Two prompts, one position each below 0.1 nats, both accepted: 2 of 2 by Wilson."""
    one = told(1, (0.9,), (0.05,))
    low = profiles.entropy_profile([[one], [one], [told(0, (0.9,), (2.0,))]], edges=(0.1,)).bins[0]
    assert (low.reached, low.n_prompts, low.few) == (2, 2, True)
    assert low.acceptance_ci95 == pytest.approx((0.3424, 1), abs=1e-4)


def test_entropy_of_nothing():
    found = profiles.entropy_profile([[record(0, 0)]])
    assert found.positions == ()
    assert all((b.drafted, b.acceptance) == (0, None) for b in found.bins)


# ------------------------------------------------------------------ thresholds


def test_a_threshold_cuts_before_the_first_position_below_it():
    """c = .9 .5 .8: at 0.6 one is sent, of a = 3 that gives 2 tokens; a = 0 gives 1 anyway."""
    rounds = [told(3, (0.9, 0.5, 0.8)), told(0, (0.9, 0.5, 0.8))]
    all_sent, one_sent, none_sent = sweeps.threshold_curve([rounds], (0.0, 0.6, 0.95))
    assert (all_sent.draft_length, all_sent.accepted_length) == (3, 2.5)
    assert all_sent.acceptance_rate == 0.5
    assert (one_sent.draft_length, one_sent.accepted_length) == (1, 1.5)
    assert (none_sent.draft_length, none_sent.accepted_length) == (0, 1)
    assert none_sent.acceptance_rate is None
    assert none_sent.acceptance_rate_with_bonus == 1


def test_threshold_zero_is_the_run_and_an_ended_round_keeps_its_tokens():
    """Drafted 5, an accepted end token at slot 3: three tokens, no bonus."""
    ended = replace(record(3, 3, ended=True, drafted=5), confidence=(0.9, 0.9, 0.3, 0.9, 0.9))
    rounds = [ended, told(2, (0.9,) * 4)]
    run, cut = sweeps.threshold_curve([rounds], (0.0, 0.5))
    assert run.accepted_length == metrics.accepted_length(rounds) == 3.0
    assert run.acceptance_rate == metrics.acceptance_rate(rounds)
    # cut before slot 3: two accepted, and the target says the third token itself
    assert cut.accepted_length == 3.0
    assert cut.draft_length == pytest.approx((2 + 4) / 2)


def test_an_honest_confidence_gives_the_acceptance_it_promises():
    """c drawn from {0.5, 0.9} and acceptance by c: kept positions at 0.8 are accepted at 0.9.

    About 18,000 kept positions that are reached: five standard errors are 0.012.
    """
    generator = np.random.default_rng(0)
    rounds = []
    for _ in range(10_000):
        c = generator.choice([0.5, 0.9], 4)
        hits = generator.random(4) < c
        rounds.append(told(int(np.cumprod(hits).sum()), tuple(c)))
    (point,) = sweeps.threshold_curve([rounds], (0.8,))
    # L is geometric with chance 1/2, at most 4; tau = 1 + sum_j P(L >= j) 0.9^j
    expected = 1 + sum(0.5**j * 0.9**j for j in range(1, 5))
    assert point.accepted_length == pytest.approx(expected, abs=0.03)
    assert point.draft_length == pytest.approx(sum(0.5**j for j in range(1, 5)), abs=0.05)


def test_rounds_that_do_not_tell_are_left_out():
    cut = replace(record(2, 2), drafted=4, confidence=(0.9,) * 4, level=CUT)
    sibling = replace(told(1, (0.9,) * 3), sibling=True, rows=6, level=SIBLING)
    assert sweeps.threshold_curve([[cut, sibling]]) is None
    assert sweeps.threshold_curve([[replace(record(3, 1), confidence=())]]) is None
    assert sweeps.threshold_curve([[cut], [told(1, (0.9,) * 3)]])[0].rounds == 1


def test_a_threshold_has_the_interval_of_its_prompts():
    """Prompts of 4 and 1 token: a draw of two is 1, 2.5 or 4; cut to nothing both give 1."""
    by_prompt = [[told(3, (0.9,) * 3)], [told(0, (0.9,) * 3)]]
    run, nothing = sweeps.threshold_curve(by_prompt, (0.0, 0.95))
    assert (run.n_prompts, run.few, run.accepted_length_ci95) == (2, True, (1.0, 4.0))
    assert nothing.accepted_length_ci95 == (1.0, 1.0)


# ------------------------------------------------------------------ goodput


def costs(batch: int, step: float, row: float) -> BatchCosts:
    """A pass of n rows for each request takes step + row batch n; drafting is free."""
    return BatchCosts(
        batch,
        plain=step + row * batch,
        draft={1: 0.0, 4: 0.0},
        verify={n: step + row * batch * n for n in (1, 2, 5)},
        other=0.0,
    )


def test_goodput_in_closed_form_and_the_best_length_shrinks_with_the_batch():
    """tau(L) = 1 + sum 0.7^j. Bound by memory (B = 1) long drafts win, by compute short ones.

    At B = 8 a row costs 0.08 of a step of 1: length 2 gives 8 * 2.19 / 1.24, length 4 gives
    8 * 2.77 / 1.4; at B = 64 a row costs 0.64: length 1 gives 64 * 1.7 / 2.28.
    """
    accepted = [4] * 2401 + [3] * 1029 + [2] * 1470 + [1] * 2100 + [0] * 3000
    rounds = [record(4, a) for a in accepted]
    model = CostModel((costs(1, 1, 0.01), costs(64, 1, 0.01)), "t", "d", 0)
    tau = {length: 1 + sum(0.7**j for j in range(1, length + 1)) for length in range(1, 5)}
    one, many = sweeps.goodput([rounds], model, (1, 64))
    assert (one.draft_length, one.measured_times) == (4, True)
    assert one.speculative == pytest.approx(tau[4] / 1.05)
    assert one.plain == pytest.approx(1 / 1.01)
    best = max(range(1, 5), key=lambda n: tau[n] / (1 + 0.64 * (1 + n)))
    assert many.draft_length == best < 4
    assert many.speculative == pytest.approx(64 * tau[best] / (1 + 0.64 * (1 + best)))
    assert many.speedup == pytest.approx(many.speculative / many.plain)


def test_goodput_is_not_told_beyond_the_batches_that_were_measured():
    model = CostModel((costs(1, 1, 0.01), costs(4, 1, 0.01)), "t", "d", 0)
    found = sweeps.goodput([[record(4, 2)]], model, (1, 2, 4, 8))
    assert [(p.concurrency, p.measured_times) for p in found] == [
        (1, True),
        (2, False),
        (4, True),
    ]
    assert sweeps.goodput([[record(0, 0)]], model) == []


def test_a_modelled_speed_up_is_as_unsure_as_its_accepted_length():
    """tau is 1 or 5 of the two prompts; a round takes 1.05, a plain step 1.01."""
    model = CostModel((costs(1, 1, 0.01),), "t", "d", 0)
    (found,) = sweeps.goodput([[record(4, 4)], [record(4, 0)]], model, (1,))
    assert found.speedup == pytest.approx(3 * 1.01 / 1.05)
    assert found.speedup_ci95 == pytest.approx((1.01 / 1.05, 5 * 1.01 / 1.05))
    assert (found.rounds, found.n_prompts, found.few) == (2, 2, True)


# ------------------------------------------------------------------ bands


def test_levels_and_bands_have_their_prompts_and_intervals():
    """Two prompts, each of one round with both positions sure and accepted."""
    by_prompt = [[told(2, (0.95, 0.95))], [told(2, (0.95, 0.95))]]
    levels = outcomes.level_estimates(by_prompt)
    assert levels["all_accepted"].value == 1.0
    assert levels["all_accepted"].ci95 == pytest.approx((0.3424, 1), abs=1e-4)
    assert {k: e.value for k, e in levels.items()} == outcomes.level_shares(metrics.pool(by_prompt))
    table = outcomes.band_table(by_prompt)
    assert (table["high"]["reached"], table["high"]["n_prompts"], table["high"]["few"]) == (
        4,
        2,
        True,
    )
    assert table["high"]["acceptance_ci95"] == pytest.approx((0.3424, 1), abs=1e-4)
    assert table["low"]["acceptance_ci95"] is None


def test_what_became_of_the_positions_of_each_band():
    """high, mid, low at .95, .6 and .1 with the default thresholds."""
    c = (0.95, 0.6, 0.1)
    rounds: list[RoundRecord] = [
        replace(told(3, c), level=ALL_ACCEPTED),
        replace(told(1, c), level=SIBLING, sibling=True, emitted=3),
        replace(told(0, c), level=CORRECTED),
        replace(told(2, c), verified=2, level=CUT),
    ]
    table = outcomes.band_table([rounds])
    assert table["high"]["levels"] == {
        "accepted": 0.75,
        "sibling": 0.0,
        "corrected": 0.25,
        "cut": 0.0,
    }
    assert table["mid"]["reached"] == 3
    assert table["mid"]["levels"]["sibling"] == pytest.approx(1 / 3)
    assert table["low"]["reached"] == 1
    assert table["low"]["acceptance"] == 1.0
    assert table["low"]["levels"] == {
        "accepted": 0.5,
        "sibling": 0.0,
        "corrected": 0.0,
        "cut": 0.5,
    }
    for band in table.values():
        assert sum(band["levels"].values()) == pytest.approx(1)
