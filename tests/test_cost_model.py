"""The cost model: interpolation by hand, the file, what reads it, and a profile of a tiny pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import UserError
from dspark.inspection_inputs import read_cost_table
from dspark.runtime.cost_model import (
    BatchCosts,
    CostModel,
    cost_model_from_dict,
    curve,
    interpolate,
    load_cost_model,
)
from dspark_eval import step_times
from dspark_eval.pair import load_pair
from dspark_eval.settings import EvalOptions
from dspark_eval.step_times import profile_pair, same_machine
from tests.tiny_pair import BLOCK_SIZE, write_pair

ONE = BatchCosts(1, 10.0, {1: 1.0, 3: 2.0}, {1: 10.0, 2: 12.0, 4: 13.0}, 0.5)
FOUR = BatchCosts(4, 16.0, {1: 3.0, 3: 6.0}, {1: 16.0, 2: 20.0, 4: 25.0}, 2.0)
MODEL = CostModel((ONE, FOUR), "nano", "mine", 100, {"device": "cpu"}, {"torch": "2"})


def test_a_round_is_draft_verify_and_the_rest():
    """Draft 3 of 4 rows: 2 + 13 + 0.5 = 15.5, as fast as plain at 1.55 tokens; between points the
    line, past the last the last slope: 2 slots 1.5, 3 rows 12.5, 6 rows 14."""
    assert MODEL.round_s(3, 4) == 15.5
    assert MODEL.break_even(3, 4) == pytest.approx(1.55)
    assert MODEL.round_s(2, 3) == pytest.approx(1.5 + 12.5 + 0.5)
    assert MODEL.round_s(3, 6) == pytest.approx(2 + 14 + 0.5)
    assert MODEL.round_s(0, 1) == MODEL.plain_s() == 10
    assert MODEL.step_times() == {1: 10.0, 2: 13.5, 4: 15.5}


def test_a_batch_that_was_not_measured_lies_between_those_that_were():
    """Two is a third of the way from one to four."""
    assert MODEL.plain_s(2) == pytest.approx(12)
    assert MODEL.round_s(3, 4, 2) == pytest.approx((2 + 4 / 3) + (13 + 4) + (0.5 + 0.5))
    assert MODEL.round_s(3, 4, 4) == 6 + 25 + 2
    assert CostModel((ONE,), "", "", 1).plain_s(8) == 10  # nothing else is known


def test_a_falling_slope_is_not_followed_past_the_last_point():
    assert interpolate({1: 5.0, 2: 4.0}, 9) == 4.0
    assert interpolate({2: 4.0, 4: 8.0}, 0) == 0.0
    assert interpolate({3: 7.0}, 100) == 7.0


def test_the_file_goes_there_and_back(tmp_path: Path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(MODEL.to_dict()), encoding="utf-8")
    read = load_cost_model(path)
    assert read.to_dict() == MODEL.to_dict()
    assert read.batches == (ONE, FOUR)
    assert read_cost_table(path) == MODEL.step_times()  # as `dspark inspect` reads it
    assert json.loads(json.dumps(MODEL.summary())) == MODEL.summary()


def changed(**change: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(MODEL.to_dict())), **change}


def with_batch(**change: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        raw = changed()
        raw["batches"][0].update(change)
        return raw

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(schema_version=2), "schema_version: 2 given"),
        (lambda: changed(batches=[]), "batches: a list"),
        (lambda: changed(target=None), "target, drafter"),
        (with_batch(batch=0), "needs `batch`"),
        (with_batch(batch=4), "occurs twice"),
        (with_batch(plain_s=0), "batch 1: plain_s: 0 given"),
        (with_batch(plain_s="fast"), "batch 1: plain_s: 'fast' given"),
        (with_batch(verify_s={}), "batch 1: verify_s: an object"),
        (with_batch(verify_s={"2": 1.0}), "verify_s of 1 row"),
        (with_batch(draft_s={"x": 1.0}), "batch 1: draft_s: an object"),
        (with_batch(draft_s={"1": float("inf")}), r"draft_s\[1\]: inf given"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        cost_model_from_dict(make())


def test_another_file_is_no_cost_model(tmp_path: Path):
    path = tmp_path / "bench.json"
    path.write_text('{"plain_tokens_per_s": 3}', encoding="utf-8")
    with pytest.raises(UserError, match="no cost model; `dspark bench --profile"):
        load_cost_model(path)
    path.write_text(json.dumps(changed(batches=3)), encoding="utf-8")
    with pytest.raises(UserError, match=r"bench.json: batches: .*measure again"):
        load_cost_model(path)


def test_a_profile_measures_every_length_and_leaves_no_pass_out(tmp_path, monkeypatch):
    """On a scripted clock that ticks by one with every reading: each pass takes one tick."""
    pair = write_pair(tmp_path)
    loaded = load_pair(EvalOptions(draft=pair.draft, target=pair.target))
    ticks = iter(range(10**6))
    monkeypatch.setattr(step_times, "seconds", lambda device: float(next(ticks)))
    calls: list[int] = []
    prompts = [[3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14]]
    model = profile_pair(
        loaded, prompts, batches=(1, 2), repeats=2, advance=lambda: calls.append(1)
    )
    assert len(calls) == step_times.total_repeats((1, 2), 2) == 6
    for costs, batch in zip(model.batches, (1, 2), strict=True):
        assert costs.batch == batch
        assert sorted(costs.draft) == list(range(1, BLOCK_SIZE + 1))
        assert sorted(costs.verify)[: BLOCK_SIZE + 1] == list(range(1, BLOCK_SIZE + 2))
        assert max(costs.verify) == 1 + BLOCK_SIZE + 2 * BLOCK_SIZE
        assert {*costs.draft.values(), *costs.verify.values(), costs.plain, costs.other} == {1.0}
    assert model.break_even(BLOCK_SIZE, 1 + BLOCK_SIZE) == 3
    assert curve([1.0, 2.0]) == {1: 1.0, 2: 2.0}
    assert same_machine(model, dict(model.environment))
    assert not same_machine(model, {**model.environment, "threads": 77})


def test_real_times_are_positive_and_plausible(tmp_path):
    pair = write_pair(tmp_path)
    loaded = load_pair(EvalOptions(draft=pair.draft, target=pair.target))
    (costs,) = profile_pair(loaded, [[3, 4, 5, 6]], batches=(1,), repeats=1).batches
    values = [*costs.draft.values(), *costs.verify.values(), costs.plain, costs.other]
    assert all(0 < value < 5 for value in values)


def test_one_thread_of_a_cpu_is_timed_by_what_it_was_given():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert step_times.timed_by(torch.device("cpu")) == "thread"
        torch.set_num_threads(2)
        assert step_times.timed_by(torch.device("cpu")) == "wall"
        assert step_times.timed_by(torch.device("cuda")) == "wall"
    finally:
        torch.set_num_threads(before)
