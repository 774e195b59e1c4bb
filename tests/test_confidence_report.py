"""Reliability of each position and of survival, on forecasts whose honesty is known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dspark.runtime.confidence import confidence_rounds
from dspark.runtime.sampling import SamplingParams
from dspark_eval.confidence import confidence_report, position_reliability
from tests.test_metrics import record

SLOTS = 3


def played(n: int, real: np.ndarray, said: np.ndarray, seed: int = 0):
    """n rounds: position k is accepted with chance real[i, k], the drafter says said[i, k]."""
    hits = np.random.default_rng(seed).random((n, SLOTS)) < real
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    return [
        replace(record(SLOTS, int(a)), confidence=tuple(c))
        for a, c in zip(accepted, said, strict=True)
    ]


def chances(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.3, 0.95, (n, SLOTS))


def report(rounds, calibration=None):
    drafter = SimpleNamespace(
        config=SimpleNamespace(block_size=SLOTS), calibration=calibration, confidence_head=object()
    )
    pair = SimpleNamespace(drafter=drafter)
    by_prompt = [rounds[i::40] for i in range(40)]
    return confidence_report(pair, SamplingParams(), by_prompt)


def test_an_honest_forecast_scores_its_floor_and_the_auc_of_its_spread():
    """12,000 rounds. ECE within 0.01 of that of a perfect forecast; the mean is the mean."""
    p = chances(12_000)
    rounds = confidence_rounds([played(12_000, p, p)], SLOTS)
    for slot in range(SLOTS):
        found = position_reliability(rounds, slot)
        assert found["ece"] == pytest.approx(found["ece_floor"], abs=0.01)
        assert found["mean"] == pytest.approx(found["observed"], abs=0.02)
        # uniform p on [.3, .95]: AUC of label ~ p against p, by its double integral
        grid = np.linspace(0.3, 0.95, 400)
        pairs = grid[:, None] * (1 - grid[None, :])
        exact = (pairs * (grid[:, None] > grid[None, :])).sum() / pairs.sum()
        assert found["auc"] == pytest.approx(exact, abs=0.02)
        brier = (grid * (1 - grid)).mean()
        assert found["brier"] == pytest.approx(brier, abs=0.01)


def test_a_position_is_judged_only_where_it_was_reached():
    """Rounds that fell at slot 1 say nothing of slot 2: by hand on four."""
    rows = [record(3, a) for a in (0, 1, 2, 3)]
    rounds = confidence_rounds([rows], SLOTS)
    found = [position_reliability(rounds, slot) for slot in range(SLOTS)]
    assert [f["rounds"] for f in found] == [4, 3, 2]
    assert [f["observed"] for f in found] == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert sum(found[1]["diagram"]["rounds"]) == 3
    assert sum(found[1]["diagram"]["survived"]) == 2
    assert sum(found[1]["diagram"]["predicted_sum"]) == pytest.approx(1.5)


def test_overconfidence_is_told_apart_from_a_bad_order():
    """c twice as far from 0 in logits: a larger ECE, the same AUC."""
    p = chances(8_000)
    bold = 1 / (1 + ((1 - p) / p) ** 2)
    honest, proud = (report(played(8_000, p, said)) for said in (p, bold))
    for slot in range(SLOTS):
        good, bad = (found["positions"][slot] for found in (honest, proud))
        assert bad["ece"] > good["ece"] + 0.05
        assert bad["auc"] == pytest.approx(good["auc"])
    low, high = honest["average_ece_ci95"]
    assert low <= honest["average_ece"] <= high < proud["average_ece_ci95"][0]
    assert honest["calibrated_for"] is None


def test_survival_bins_add_up_to_the_rounds_and_slots_without_any_are_empty():
    p = chances(500)
    found = report(played(500, p, p))
    for bins in found["diagram"]:
        assert sum(bins["rounds"]) == 500
        assert len(bins["survived"]) == 15
    short = report([record(1, 1)] * 80)
    assert short["positions"][2]["rounds"] == 0
    assert short["positions"][2]["ece"] is None
    assert short["ece"][2] is None
    assert report([record(0, 0)] * 50) is None
