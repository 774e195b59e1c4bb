"""The losslessness suite: that it passes, that it can fail, and that its statistics are right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.runtime.policies import plan_block
from dspark.runtime.records import Proposal
from dspark_eval.lossless import __main__ as command
from dspark_eval.lossless.defects import CHAIN, Defect
from dspark_eval.lossless.planners import POLICIES, PolicyPlanner, policy_named
from dspark_eval.lossless.play import play
from dspark_eval.lossless.report import DRAWS, Report, run_suite
from dspark_eval.lossless.statistics import TV, critical, detectable, fit, power, tail
from dspark_eval.lossless.suite import SETTINGS, Outcome, grid, plant
from dspark_eval.lossless.world import Tables, World, reference
from tests import laws
from tests.headings import assert_headed
from tests.laws import seeded


@pytest.mark.timeout(1800)  # about a minute; a busy machine may take ten
def test_the_short_form_passes_and_finds_every_planted_defect() -> None:
    report = run_suite(full=False)
    assert report.deviating == []
    assert report.missed == []
    assert report.power() > 0.99
    assert report.passed
    assert report.accepted["block"] > report.accepted["token"] + 0.01
    for found in report.planted:  # worth finding: the counts' noise is about 0.004
        assert found.distance > TV + 0.004, found


def test_the_grid_is_complete_and_the_short_form_covers_it() -> None:
    whole, short = grid(full=True), grid(full=False)
    assert len(set(whole)) == len(whole) == len(POLICIES) * len(SETTINGS) * 2 * 2 * 2
    assert set(short) < set(whole)
    for name in ("policy", "setting", "siblings", "batch", "method"):
        assert {getattr(c, name) for c in short} == {getattr(c, name) for c in whole}


def test_a_suite_that_misses_a_defect_or_sees_a_deviation_fails() -> None:
    right = Outcome("a case", DRAWS, 0.5, 0.003, 23)
    wrong = replace(right, p=1e-9)
    good = Report(False, 1e-5, {}, [right], [replace(right, draws=20_000)], [wrong])
    assert good.passed
    assert not replace(good, planted=[right]).passed
    assert not replace(good, cases=[wrong]).passed
    assert not replace(good, cases=[replace(right, p=None, freedom=0, wrong=1)]).passed
    assert not replace(good, cases=[replace(right, draws=50_000)]).passed  # too little power
    assert not replace(good, full=True).passed  # the same, of the real model
    assert "MISSED  a case" in replace(good, planted=[right]).text()


def test_an_honest_run_is_not_taken_for_a_defect() -> None:
    honest = Defect("nothing", CHAIN)
    assert not plant(honest, 0, 60_000).deviates(1e-5)


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_code_tells(passed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = Outcome("a case", DRAWS, 0.5 if passed else 0.0, 0.003, 23)
    defect = Outcome("a defect", DRAWS, 0.0, 0.1, 23)
    report = Report(False, 1e-5, {}, [outcome], [replace(outcome, p=0.5)], [defect])
    monkeypatch.setattr(command, "run_suite", lambda *args, **options: report)
    asked = ["--seed", "6", "--json", str(tmp_path / "report.json")]
    assert command.main(asked) == (0 if passed else 1)
    written = json.loads((tmp_path / "report.json").read_text())
    assert_headed(written, "lossless", asked, 6)
    assert written["passed"] is passed


# Statistics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 7, 23, 63])
def test_tails_and_power_are_those_of_scipy(freedom: int) -> None:
    for level in (1e-2, 1e-6, 1e-9):
        bound = critical(level, freedom)
        assert bound == pytest.approx(stats.chi2.isf(level, freedom), rel=1e-6)
        assert tail(bound, freedom) == pytest.approx(level, rel=1e-5)
        for draws in (20_000, 300_000):
            exact = stats.ncx2.sf(bound, freedom, draws * 4 * TV**2)
            assert power(draws, TV, freedom, level) == pytest.approx(exact, rel=1e-6, abs=1e-12)
    assert power(DRAWS, detectable(DRAWS, freedom, 1e-6, 0.99), freedom, 1e-6) >= 0.99


def test_p_values_of_the_right_law_are_uniform_and_a_hundredth_is_seen_in_any_shape() -> None:
    """The shape hardest to see has |e_i| = 2 d p_i, where Cauchy-Schwarz is tight."""
    numbers = np.random.default_rng(0)
    p = numbers.dirichlet(np.ones(24))
    side = np.where(np.arange(24) % 2, 1.0, -1.0)
    shift = p * side
    shift[side > 0] *= 1 / shift[side > 0].sum()
    shift[side < 0] *= -1 / shift[side < 0].sum()
    off = p + TV * shift
    assert 0.5 * np.abs(off - p).sum() == pytest.approx(TV)
    law = torch.from_numpy(p)

    def values(truth: np.ndarray, count: int) -> list[float]:
        counts = numbers.multinomial(DRAWS, truth, size=count)
        return [fit(torch.from_numpy(row), law).p for row in counts]

    assert stats.kstest(values(p, 2_000), "uniform").pvalue > 1e-3
    assert max(values(off, 300)) < 1e-6


def test_impossible_tokens_and_thin_cells() -> None:
    law = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert fit(torch.tensor([500, 500, 1]), law).p == 0
    assert fit(torch.tensor([500, 500, 0]), law).p > 0.9
    thin = torch.tensor([0.4, 0.599, 0.0005, 0.0005], dtype=torch.float64)
    assert fit(torch.tensor([400, 599, 1, 0]), thin).freedom == 1


# The world --------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "greedy"])
def test_the_reference_is_that_of_numpy(setting: str) -> None:
    logits = World.sampled().target[0, 3]
    expected = laws.reference(logits, SETTINGS[setting])
    assert reference(logits, SETTINGS[setting]).numpy() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("siblings", [False, True])
@pytest.mark.parametrize("name", list(POLICIES))
def test_plans_are_what_the_policy_says_of_each_group(name: str, siblings: bool) -> None:
    """Remembered or not, and that they differ: some blocks are cut and others are not."""
    made: list[Proposal] = []
    policy = policy_named(name, siblings)
    planner = PolicyPlanner(policy, 3)
    tables = Tables(World.sampled(), torch.arange(300) % 3)

    def keep(proposal: Proposal) -> Proposal:
        made.append(proposal)
        return proposal

    setup = replace(CHAIN, planner=planner, siblings=2, tamper=keep)
    plan = play(tables, setup, seeded()).plan
    for first in range(0, 300, 3):
        part = slice(first, first + 3)
        one = Proposal(made[0].tokens[part], None, made[0].confidence[part], made[0].entropy[part])
        alone = plan_block(policy, one)
        assert torch.equal(alone.lengths, plan.lengths[part])
        assert torch.equal(alone.siblings, plan.siblings[part])
    if siblings or name not in ("fixed", "throughput-delayed"):
        assert len(plan.lengths.unique()) > 1
    assert (plan.siblings.sum() > 0) == siblings
