"""Calibration error, AUC, Brier and the temperature fit, against closed forms and brute force."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.draft.calibration import MIN_REACHED
from dspark.draft.curves import IDENTITY, curved_survival, fit_curves
from dspark.draft.reliability import (
    BINS,
    ConfidenceRounds,
    _resampled_ece,
    auc,
    average_ece_ci95,
    bin_sums,
    ece,
    ece_floor,
    reliability,
    sigmoid,
    split_prompts,
    survival,
)
from dspark.draft.scaling import (
    GRID,
    HIGHEST,
    LOWEST,
    fit_setting,
    fit_slots,
    fit_temperatures,
    held_out_survival,
)
from dspark.runtime.confidence import confidence_rounds
from dspark.runtime.records import ALL_ACCEPTED, RoundRecord
from dspark.runtime.sampling import SamplingParams


def stream(
    n: int, temperatures: tuple[float, ...], seed: int, *, per_prompt: int = 10
) -> ConfidenceRounds:
    """Rounds whose slot k is accepted with probability sigmoid(l_k / T_k), independently."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(1.0, 2.0, (n, len(temperatures)))
    accept = generator.random(logits.shape) < sigmoid(logits / np.array(temperatures))
    accepted = accept.cumprod(axis=1).sum(axis=1)
    verified = np.full(n, len(temperatures))
    return ConfidenceRounds(logits, accepted, verified, np.arange(n) // per_prompt)


def constant(rates: tuple[float, ...], logits: tuple[float, ...], n: int) -> ConfidenceRounds:
    """n rounds with the same logits, of which exactly the share `rates[j]` survives slot j."""
    accepted = np.zeros(n, dtype=np.int64)
    for rate in rates:
        accepted[: round(rate * n)] += 1
    table = np.tile(np.array(logits), (n, 1))
    return ConfidenceRounds(table, accepted, np.full(n, len(rates)), np.arange(n) % 10)


# ------------------------------------------------------------------ the measures


def test_calibration_error_by_hand():
    """Two bins of three rounds: |0.3 + 0.25 + 0.29 - 1| and |0.8 + 0.81 + 0.82 - 3| over six."""
    scores = np.array([0.3, 0.25, 0.29, 0.80, 0.81, 0.82])
    labels = np.array([True, False, False, True, True, True])
    assert ece(scores, labels, 4)[()] == pytest.approx((0.16 + 0.57) / 6)
    counts, predicted, observed = bin_sums(scores, labels, 4)
    assert counts.tolist() == [0, 3, 0, 3]
    assert predicted == pytest.approx([0, 0.84, 0, 2.43])
    assert observed.tolist() == [0, 1, 0, 3]


def test_scores_of_0_and_1_have_a_bin():
    counts, _, _ = bin_sums(np.array([0.0, 1.0]), np.array([False, True]), 15)
    assert (counts[0], counts[-1], counts.sum()) == (1, 1, 2)


def test_a_slot_that_no_round_reached_has_empty_bins() -> None:
    sums = bin_sums(np.empty(0), np.empty(0, dtype=bool), 4)
    assert sums.shape == (3, 4)
    assert not sums.any()


def test_many_forecasts_at_once_are_each_on_its_own():
    generator = np.random.default_rng(0)
    scores, labels = generator.random((3, 2, 50)), generator.random(50) < 0.5
    together = ece(scores, labels)
    assert together.shape == (3, 2)
    for index in np.ndindex(3, 2):
        assert together[index] == pytest.approx(float(ece(scores[index], labels)))


def test_a_perfect_forecast_shows_what_the_binomial_law_says():
    """E|gap_b| = sqrt(2/pi) s_b and var = (1 - 2/pi) s_b^2, s_b^2 = sum_b p(1-p), over n."""
    generator = np.random.default_rng(1)
    scores = generator.random(20_000)
    which = np.minimum((scores * BINS).astype(int), BINS - 1)
    variances = np.bincount(which, scores * (1 - scores))
    mean = math.sqrt(2 / math.pi) * np.sqrt(variances).sum() / len(scores)
    deviation = math.sqrt((1 - 2 / math.pi) * variances.sum()) / len(scores)
    for _ in range(5):
        found = float(ece(scores, generator.random(len(scores)) < scores))
        assert abs(found - mean) < 4.5 * deviation
    # The floor is the mean of 50 such draws.
    assert abs(ece_floor(scores) - mean) < 4.5 * deviation / math.sqrt(50)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[int, bool]]):
    scores = np.array([score / 4 for score, _ in pairs])
    labels = np.array([label for _, label in pairs])
    wins = [
        (high > low) + 0.5 * (high == low) for high in scores[labels] for low in scores[~labels]
    ]
    expected = None if not wins else pytest.approx(sum(wins) / len(wins))
    assert auc(scores, labels) == expected


def test_survival_is_the_product_of_the_scaled_sigmoids():
    logits = np.array([[2.0, -1.0, 0.5], [800.0, -800.0, 0.0]])
    expected = [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(2.0)), 1 / (1 + math.exp(-0.5))]
    found = survival(logits, (2.0, 0.5, 1.0))
    assert found[0] == pytest.approx(np.cumprod(expected))
    assert found[1] == pytest.approx([1.0, 0.0, 0.0])  # and no overflow warning


def test_a_slot_counts_the_rounds_that_verified_it():
    """Four rounds; the last one was cut after a slot and has no label in the second."""
    logits = np.zeros((4, 3))
    logits[3, 1:] = np.nan
    rounds = ConfidenceRounds(
        logits, np.array([2, 0, 1, 1]), np.array([2, 2, 2, 1]), np.array([0, 0, 1, 1])
    )
    found = reliability(survival(logits, (1.0, 1.0, 1.0)), rounds)
    assert found.rounds == (4, 3, 0)
    assert found.ece[:2] == pytest.approx((0.25, abs(0.25 - 1 / 3)))
    assert found.brier[:2] == pytest.approx((0.25, (0.75**2 + 2 * 0.25**2) / 3))
    assert found.auc[0] == 0.5
    assert (found.ece[2], found.ece_floor[2], found.auc[2], found.brier[2]) == (None,) * 4
    assert found.average_ece == pytest.approx((found.ece[0] + found.ece[1]) / 2)


def test_rounds_that_cannot_be_are_refused():
    one = np.array([1])
    with pytest.raises(ValueError, match="accepted <= verified"):
        ConfidenceRounds(np.zeros((1, 2)), np.array([2]), one, one)
    with pytest.raises(ValueError, match="no logit"):
        ConfidenceRounds(np.full((1, 2), np.nan), one, one, one)
    with pytest.raises(ValueError, match="another length"):
        ConfidenceRounds(np.zeros((2, 2)), one, one, one)


# ------------------------------------------------------------------ prompts stay together


def test_halves_share_no_prompt_and_lose_none():
    rounds = stream(95, (1.0, 1.0), 0)
    first, second = split_prompts(rounds, seed=3)
    assert (first ^ second).all()
    assert not set(rounds.prompt[first]) & set(rounds.prompt[second])
    assert len(set(rounds.prompt[first])) == len(set(rounds.prompt[second])) == 5
    assert (split_prompts(rounds, seed=4)[0] != first).any()


def test_no_prompt_is_judged_by_a_fit_that_has_seen_it():
    """Other outcomes in one half move the scores of the other half, and none of its own."""
    rounds = stream(600, (1.0, 2.0), 0)
    first, second = split_prompts(rounds)
    changed = np.where(first, rounds.verified, rounds.accepted)  # in the first half all survive
    other = ConfidenceRounds(rounds.logits, changed, rounds.verified, rounds.prompt)
    for before, after in zip(held_out_survival(rounds), held_out_survival(other), strict=True):
        assert (before[first] == after[first]).all()
        assert (before[second] != after[second]).any()


def test_a_resample_is_the_rounds_of_its_prompts_repeated():
    rounds = stream(300, (1.5,), 2, per_prompt=7)
    scores = survival(rounds.logits, (1.0,))[:, 0]
    labels = rounds.survived(0)
    weights = np.random.default_rng(0).multinomial(43, np.full(43, 1 / 43), size=3)
    found = _resampled_ece(scores, labels, rounds.prompt, weights)
    for row, value in zip(weights, found, strict=True):
        repeated = np.repeat(np.arange(300), row[rounds.prompt])
        assert value == pytest.approx(float(ece(scores[repeated], labels[repeated])))


def test_the_interval_lies_around_what_was_measured():
    rounds = stream(2000, (1.0, 1.0, 1.0), 5)
    scores = survival(rounds.logits, (3.0, 1.0, 1.0))
    low, high = average_ece_ci95(scores, rounds)
    measured = reliability(scores, rounds).average_ece
    assert low < measured < high < measured + 0.03
    assert average_ece_ci95(scores[:10], rounds.take(np.arange(10))) is None


# ------------------------------------------------------------------ the fit


@pytest.mark.parametrize("seed", range(3))
def test_true_temperatures_are_recovered(seed: int):
    """20,000 rounds. Later slots are told by survivors only, hence the wider bounds."""
    truth = (1.0, 2.0, 0.6, 1.5)
    found = fit_temperatures(stream(20_000, truth, seed))
    for t, found_t, bound in zip(truth, found, (0.1, 0.15, 0.3, 0.35), strict=True):
        assert abs(math.log(found_t / t)) < bound, found


def test_a_stream_is_calibrated_after_the_fit_on_prompts_not_fitted_on():
    rounds = stream(20_000, (1.0, 2.5, 0.4, 3.0), 7)
    fitted, _ = fit_setting(rounds, SamplingParams(temperature=1.0))
    assert (fitted.rounds, fitted.prompts) == (20_000, 2000)
    for after, floor in zip(fitted.ece_after, fitted.ece_floor, strict=True):
        assert after < floor + 0.006  # what half the rounds leave undecided of a temperature
    assert min(fitted.ece_before[1:]) > 0.02
    low, high = fitted.average_ece_after_ci95
    assert low < sum(fitted.ece_after) / 4 < high < 0.015


def test_a_slot_makes_up_for_the_slots_before_it():
    """Slot 1 says 1/2 at any temperature and 4/5 survive; 1/2 survive slot 2, whose logit is 1.

    Left to right, slot 2 has to bring 1/2 sigmoid(1/T) to 1/2: the lowest temperature. On its own
    it would be right at sigmoid(1/T) = 5/8, T = 1.96, and the product wrong by 0.19.
    """
    rounds = constant((0.8, 0.5), (0.0, 1.0), 1000)
    temperatures = fit_temperatures(rounds)
    assert temperatures == pytest.approx((1.0, LOWEST))  # slot 1: a tie, nearest to 1
    after = reliability(survival(rounds.logits, temperatures), rounds)
    alone = reliability(survival(rounds.logits, (1.0, 1 / math.log(5 / 3))), rounds)
    assert after.ece[1] == pytest.approx(0.0, abs=1e-4)
    assert alone.ece[1] == pytest.approx(0.5 - 0.5 * 0.625)


def test_a_slot_does_not_know_the_slots_after_it():
    rounds = stream(3000, (1.5, 0.7, 2.0), 9)
    cut = ConfidenceRounds(
        rounds.logits[:, :2], rounds.accepted.clip(max=2), rounds.verified.clip(max=2),
        rounds.prompt,
    )  # fmt: skip
    assert fit_temperatures(rounds)[:2] == fit_temperatures(cut)


def test_the_grid_is_the_published_one():
    assert (len(GRID), GRID[0], GRID[20], GRID[-1]) == pytest.approx((41, 0.1, 1.0, 10.0))
    steps = GRID[1:] / GRID[:-1]
    assert steps == pytest.approx(np.full(40, steps[0]))


def test_temperatures_stay_in_the_grid_and_unseen_slots_stay_as_they_are():
    never = constant((0.0, 0.0), (3.0, 3.0), 100)  # always confident, never right
    assert fit_temperatures(never)[0] == pytest.approx(HIGHEST)
    cut = ConfidenceRounds(
        np.array([[1.0, np.nan]] * 4), np.array([1, 0, 1, 1]), np.ones(4, int), np.arange(4)
    )
    assert fit_temperatures(cut)[1] == 1.0
    entry, _ = fit_setting(cut, SamplingParams())
    assert (entry.ece_after[1], entry.auc[1]) == (None, None)


def test_one_prompt_is_no_evidence():
    with pytest.raises(ValueError, match="at least 2"):
        fit_setting(stream(10, (1.0,), 0), SamplingParams())


# ------------------------------------------------------------------ slots that few rounds reached


def thinning(reached: tuple[int, ...], logit: float | None = None) -> ConfidenceRounds:
    """1,500 rounds of which at most `reached[j]` got to slot j; `logit` in the last two slots."""
    rounds = stream(1500, (2.0,) * len(reached), 3)
    accepted = rounds.accepted.copy()
    for slot, most in enumerate(reached):
        beyond = np.flatnonzero(accepted >= slot)[most:]
        accepted[beyond] = np.minimum(accepted[beyond], slot - 1)
    logits = rounds.logits.copy()
    if logit is not None:
        logits[:, -2:] = logit
    return ConfidenceRounds(logits, accepted, rounds.verified, rounds.prompt)


def test_rounds_that_reach_a_slot_by_hand() -> None:
    """Cut after slots 2, 2, 2, 1; the third round fails in slot 1, the others accept 2, 1, 1."""
    logits = np.zeros((4, 3))
    rounds = ConfidenceRounds(
        logits, np.array([2, 1, 0, 1]), np.array([2, 2, 2, 1]), np.array([0, 0, 1, 1])
    )
    assert rounds.reached == (4, 2, 0)


def test_slots_with_rounds_are_fitted_as_ever() -> None:
    rounds = stream(2000, (1.0, 2.0, 0.5), 8)
    temperatures = fit_temperatures(rounds)
    assert fit_slots(rounds) == (temperatures, fit_curves(rounds, temperatures))
    entry, _ = fit_setting(rounds, SamplingParams(temperature=1.0))
    assert entry.reached == rounds.reached
    assert entry.reached[0] == 2000
    assert min(entry.reached) > MIN_REACHED
    assert entry.sparse is None


def test_a_slot_that_too_few_rounds_reached_is_corrected_as_the_one_before() -> None:
    """Slots 4 and 5: nine rounds and none, and a head that says 0.27. Fitted on survivals that are
    all 0 they would say 0 and 1."""
    rounds = thinning((1500, 1500, 1500, MIN_REACHED - 1, 0), logit=-1.0)
    assert rounds.reached[3:] == (9, 0)
    own = fit_temperatures(rounds)
    temperatures, curves = fit_slots(rounds)
    assert temperatures == (*own[:3], own[2], own[2])
    first = fit_curves(rounds, own)[:3]
    assert curves == (*first, first[2], first[2])
    entry, _ = fit_setting(rounds, SamplingParams(temperature=1.0))
    assert (entry.temperatures, entry.curves) == (temperatures, curves)
    assert entry.sparse == "slots 4 to 5 reached by n = 9, 0 rounds: corrected as slot 3"
    found = entry.confidence(torch.tensor(rounds.logits)).numpy()
    assert 0.05 < found[:, 3:].min() < found[:, 3:].max() < 0.6


def test_many_rounds_that_all_fail_are_evidence() -> None:
    """Slot 3: hundreds of rounds, no survivor. Its confidence is low whatever the head says, and
    that of slot 4, which no round reached, follows the head."""
    rounds = thinning((1500, 1500, 1500, 0))
    assert rounds.reached[2] > 400
    own = fit_temperatures(rounds)
    assert own[2] in (pytest.approx(LOWEST), pytest.approx(HIGHEST))  # no loss bounds it
    temperatures, curves = fit_slots(rounds)
    assert temperatures == (*own[:2], own[1], own[1])
    assert curves[2] == fit_curves(rounds, temperatures)[2] == curves[3]
    entry, _ = fit_setting(rounds, SamplingParams(temperature=1.0))
    found = entry.confidence(torch.tensor(rounds.logits)).numpy()
    assert found[:, 2].mean() < 0.02
    assert found[:, 3].max() < 0.999
    assert np.corrcoef(found[:, 3], sigmoid(rounds.logits[:, 3]))[0, 1] > 0.9
    assert entry.sparse == "slot 4 reached by n = 0 rounds: corrected as slot 3"


def test_a_handful_of_rounds_changes_nothing() -> None:
    rounds = stream(5, (2.0, 2.0, 2.0), 0, per_prompt=3)
    assert fit_slots(rounds) == ((1.0,) * 3, (IDENTITY,) * 3)
    entry, _ = fit_setting(rounds, SamplingParams(temperature=1.0))
    assert entry.ece_after == entry.ece_before
    assert entry.sparse.startswith("slots 1 to 3 reached by n = 5, ")
    assert entry.sparse.endswith(" rounds: not corrected")


# ------------------------------------------------------------------ what temperatures leave over


def bent(n: int, curves: tuple, seed: int) -> ConfidenceRounds:
    """Rounds that survive as the curves say: one uniform for a round, compared with every s_j."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(1.0, 2.0, (n, len(curves)))
    chance = curved_survival(logits, (1.0,) * len(curves), curves)
    accepted = (generator.random((n, 1)) < chance).sum(axis=1)
    return ConfidenceRounds(logits, accepted, np.full(n, len(curves)), np.arange(n) // 10)


def test_true_curves_are_recovered():
    """Maximum likelihood on 50,000 rounds: standard errors are about 0.03, the bound is five."""
    truth = ((0.6, 1.2, -0.5), (1.4, 0.8, 0.3))
    found = fit_curves(bent(50_000, truth, 0), (1.0, 1.0))
    assert np.abs(np.array(found) - np.array(truth)).max() < 0.15, found


def test_a_curve_mends_what_no_temperature_can():
    """Bad rounds survive more often than the product says, good ones less often: Platt slope 1/3
    in the middle of the product, a shape no temperature of a slot has."""
    rounds = bent(20_000, ((1.0, 1.0, 0.0), (0.35, 0.35, 0.0)), 1)
    fitted, _ = fit_setting(rounds, SamplingParams(temperature=1.0))
    assert fitted.ece_scaled[1] > 0.03
    assert fitted.ece_after[1] < fitted.ece_floor[1] + 0.006


def test_a_curve_never_falls_and_survival_never_rises():
    """Labels that contradict the logits would bend a curve down: it goes flat instead."""
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 2, (2000, 3))
    accepted = np.where(logits.sum(axis=1) > 0, 0, 3)
    rounds = ConfidenceRounds(logits, accepted, np.full(2000, 3), np.arange(2000))
    curves = fit_curves(rounds, (1.0, 1.0, 1.0))
    assert min(min(a, b) for a, b, _ in curves) == 0.0
    scores = curved_survival(logits, (1.0, 1.0, 1.0), curves)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_a_fit_that_does_not_help_is_not_kept():
    """Streams that are calibrated already, of 60 rounds: what is fitted to them is mostly noise."""
    kept = []
    for seed in range(12):
        rounds = stream(60, (1.0, 1.0), seed)
        entry, scores = fit_setting(rounds, SamplingParams(temperature=1.0))
        assert entry.ece_after == reliability(scores, rounds).ece
        assert sum(entry.ece_after) <= min(sum(entry.ece_before), sum(entry.ece_scaled))
        kept.append(entry)
        if entry.temperatures == (1.0, 1.0):
            assert entry.curves == (IDENTITY, IDENTITY)
            assert entry.ece_after == entry.ece_scaled == entry.ece_before
            assert (scores == survival(rounds.logits, (1.0, 1.0))).all()
    assert any(entry.temperatures == (1.0, 1.0) for entry in kept)
    assert any(entry.temperatures != (1.0, 1.0) for entry in kept)  # or nothing was tried


def test_one_round_moves_a_curve_little_and_none_not_at_all():
    one = ConfidenceRounds(np.array([[0.5, np.nan]]), np.array([1]), np.array([1]), np.array([0]))
    first, second = fit_curves(one, (1.0, 1.0))
    assert second == IDENTITY
    assert max(abs(x - y) for x, y in zip(first, IDENTITY, strict=True)) < 0.5


def test_the_runtime_says_what_was_fitted():
    """The torch formula in float32 against the numpy one in float64, and causal in the slots."""
    rounds = stream(500, (1.0, 2.0, 0.5), 4)
    fitted, _ = fit_setting(rounds, SamplingParams(temperature=1.0))
    expected = curved_survival(rounds.logits, fitted.temperatures, fitted.curves)
    logits = torch.tensor(rounds.logits, dtype=torch.float32)
    found = fitted.confidence(logits)
    assert found.dtype == torch.float32
    assert found.cumprod(dim=1).numpy() == pytest.approx(expected, abs=2e-6)
    assert ((found >= 0) & (found <= 1)).all()
    # A shorter draft, and a later logit that differs: earlier confidences stay as they are.
    assert torch.equal(fitted.confidence(logits[:, :2]), found[:, :2])
    extreme = torch.tensor([[90.0, -90.0, 1e4], [-1e4, 0.0, 90.0]])
    assert torch.isfinite(fitted.confidence(extreme)).all()


# ------------------------------------------------------------------ rounds as they are recorded


def record(
    drafted: int, verified: int, accepted: int, confidence: tuple[float, ...]
) -> RoundRecord:
    return RoundRecord(
        drafted, verified, accepted, accepted + 1, ALL_ACCEPTED, 0.1, 0.1, 0.1, confidence,
        (0.0,) * drafted,
    )  # fmt: skip


def test_records_become_logits_of_the_slots_that_were_drafted():
    by_prompt = [
        [record(3, 3, 1, (0.75, 0.5, 0.25)), record(1, 1, 1, (0.9,)), record(0, 0, 0, ())],
        [],
        [record(2, 1, 1, (1.0, 0.0))],
    ]
    rounds = confidence_rounds(by_prompt, 3)
    assert rounds.prompt.tolist() == [0, 0, 2]  # the plain step says nothing
    assert (rounds.accepted.tolist(), rounds.verified.tolist()) == ([1, 1, 1], [3, 1, 1])
    assert rounds.logits[0] == pytest.approx([math.log(3), 0, -math.log(3)])
    assert np.isnan(rounds.logits).sum(axis=1).tolist() == [0, 2, 1]
    assert np.isfinite(rounds.logits[2, :2]).all()  # a saturated sigmoid has no infinite logit
    assert confidence_rounds(by_prompt, 3, [5, 6, 9]).prompt.tolist() == [5, 5, 9]


def test_the_fit_has_no_way_to_look_at_the_tokens():
    """A temperature that depended on x_k would make cuts depend on it, and decoding lossy."""
    assert {field.name for field in fields(ConfidenceRounds)} == {
        "logits", "accepted", "verified", "prompt"
    }  # fmt: skip
