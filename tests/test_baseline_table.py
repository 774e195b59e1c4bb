"""The table of ways to draft: rates chosen apart, seeds in the verdict, a killed call goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dspark.assets import asset
from dspark.distill.prompts import read_prompts
from dspark.errors import UserError
from dspark_eval.baselines import jobs
from dspark_eval.baselines.jobs import best_rate, rate_runs
from dspark_eval.baselines.measure import VALIDATION_SETTINGS
from dspark_eval.baselines.plan import RATE_SEED, Plan
from dspark_eval.baselines.table import build, run_table
from dspark_eval.baselines.table_text import markdown
from dspark_eval.study.measure import SEED, SETTINGS
from dspark_eval.suites import load_suites

ROWS = {"rows_digest": "d", "rows": 40, "supervised_tokens": 2000, "seconds": 5.0}


def plan_of(out: Path, **changed: Any) -> Plan:
    given: dict[str, Any] = {"seeds": 2, "rates": (1e-3,), "device": "cpu", "jobs": 1}
    return Plan(out=out, **given | changed)


def write_measured(path: Path, emitted: list[int], rounds: list[int]) -> None:
    result = {
        "suite": "nano-problems",
        "temperature": 0.0,
        "accepted_length": sum(emitted) / sum(rounds),
        "acceptance_rate": 0.5,
        "conditional_acceptance": [0.5],
        "emitted": emitted,
        "rounds": rounds,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"parameters": 1000, "passes": "1", "results": [result]}))


def measured(out: Path, arm: str, seed: int) -> Path:
    return out / arm / f"seed-{seed}.measure.json"


def test_the_verdict_counts_prompts_and_seeds(tmp_path: Path) -> None:
    for seed, more in ((0, 0), (1, 6)):
        write_measured(measured(tmp_path, "dspark", seed), [30, 60 + more], [10, 20])
        write_measured(measured(tmp_path, "dflash", seed), [30, 60], [15, 30])
    write_measured(measured(tmp_path, "lookup", 0), [30, 60], [30, 60])
    document = build(plan_of(tmp_path))
    (setting,) = document["results"]
    arms = setting["arms"]
    assert arms["dspark"]["accepted_length_per_seed"] == [3.0, 96 / 30]
    over = arms["dflash"]["dspark_over"]
    assert over["ratio"] == pytest.approx((186 / 60) / 2)  # 30 + 60 + 30 + 66 tokens
    # dspark's seeds: log 3 and log 3.2, whose mean has sd log(3.2 / 3) / 2; dflash's are alike
    assert over["seeds_sd"] == pytest.approx(np.log(3.2 / 3) / 2)
    half = stats.t.ppf(0.975, over["freedom"]) * np.hypot(over["seeds_sd"], over["prompts_sd"])
    low = over["ratio"] * np.exp(-half)
    assert over["ratio_ci95"][0] == pytest.approx(low, rel=1e-6)
    # prompts alone say [1.50, 1.58]; two seeds that are 6 % apart say much less
    assert 1 < low < 1.3
    assert arms["dflash"]["verdict"] == "ahead"
    assert document["rate_search"] is None
    text = markdown(document)
    assert "learning rate 0.001, parameters within 0.0 %. Not equal: seconds" in text
    assert "| ahead " in text


def test_one_seed_is_no_verdict_and_lookup_has_none(tmp_path: Path) -> None:
    for arm in ("dspark", "dflash"):
        write_measured(measured(tmp_path, arm, 0), [30, 60], [10 if arm == "dspark" else 30, 20])
    write_measured(measured(tmp_path, "dspark", 1), [30, 60], [10, 20])
    write_measured(measured(tmp_path, "lookup", 0), [30, 60], [30, 60])
    arms = build(plan_of(tmp_path))["results"][0]["arms"]
    assert (arms["dflash"]["verdict"], arms["lookup"]["verdict"]) == ("one seed", "ahead")


def test_a_table_without_its_reference_says_so(tmp_path: Path) -> None:
    write_measured(measured(tmp_path, "lookup", 0), [30, 60], [30, 60])
    with pytest.raises(UserError, match="no run of dspark is measured yet"):
        build(plan_of(tmp_path))


def test_arms_of_different_rows_are_no_table(tmp_path: Path) -> None:
    for arm in ("dspark", "dflash", "ar"):
        write_measured(measured(tmp_path, arm, 0), [30, 60], [10, 20])
    for arm, digest in (("dflash", "one"), ("ar", "other")):
        folder = tmp_path / arm / "seed-0"
        folder.mkdir()
        (folder / "baseline.json").write_text(json.dumps(ROWS | {"rows_digest": digest}))
    with pytest.raises(UserError, match="arms learned from different rows"):
        build(plan_of(tmp_path))


class Machine:
    """Stands for the processes: what it is told to train is there, and is worth what `length` says.

    Dies at call `dies_at`, in the middle of it, as a killed process would.
    """

    def __init__(self, length: Callable[[str, float], int], dies_at: int | None = None) -> None:
        self.length, self.dies_at = length, dies_at
        self.called: list[list[str]] = []
        self.rate: dict[str, float] = {}

    def __call__(self, arguments: list[str], log: Path, gpu: str | None = None) -> None:
        self.called.append(list(arguments))
        if len(self.called) == self.dies_at:
            raise KeyboardInterrupt
        if arguments[0] == "dspark":
            folder = Path(arguments[arguments.index("--config") + 1]).parent
            (folder / "rows").mkdir(exist_ok=True)
            (folder / "training.json").write_text('[{"train_s": 4.0}]')
            text = (folder / "config.yaml").read_text()
            line = next(line for line in text.splitlines() if line.startswith("  lr:"))
            self.rate[str(folder)] = float(line.split("#")[0].split(":")[1])
        elif arguments[1] == "train":
            folder = Path(arguments[arguments.index("--out") + 1])
            folder.mkdir()
            self.rate[str(folder)] = float(arguments[-1].removeprefix("train.lr="))
            (folder / "baseline.json").write_text(json.dumps(ROWS))
        else:
            self.measure(arguments)

    def measure(self, arguments: list[str]) -> None:
        name, file = arguments[2], Path(arguments[arguments.index("--out") + 1])
        emitted = self.length(file.parent.name, self.rate.get(name, 0.0))
        write_measured(file, [emitted, 2 * emitted], [10, 20])

    def of(self, *words: str) -> list[list[str]]:
        return [call for call in self.called if all(word in call for word in words)]


def worth(arm: str, rate: float) -> int:
    """DSpark learns best at 1e-3, the others at 4e-3; equal lengths: the lower rate."""
    best = {"dspark": 1e-3}.get(arm, 4e-3)
    return 30 - round(abs(np.log2(rate / best))) if rate else 10


RATES = (1e-3, 2e-3, 4e-3, 8e-3)


def test_each_arm_takes_the_rate_that_was_best_for_it_on_other_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(worth)
    monkeypatch.setattr(jobs, "call_module", machine)
    plan = plan_of(tmp_path, arms=("dflash", "lookup"), rates=RATES, rate_steps=7, steps=9)
    document = run_table(plan, lambda line: None)
    assert {entry["arm"]: entry["lr"] for entry in document["arms"]} == {
        "dspark": 1e-3, "dflash": 4e-3, "lookup": None
    }  # fmt: skip
    trained = machine.of("train")
    assert [words[-3:] for words in trained] == [
        *(["train.max_steps=7", f"train.seed={RATE_SEED}", f"train.lr={r}"] for r in RATES),
        *(["train.max_steps=9", f"train.seed={seed}", "train.lr=0.004"] for seed in range(2)),
    ]
    # the trials are judged on validation prompts, the table's runs never; lookup is measured once
    files = {Path(words[words.index("--out") + 1]).name for words in machine.of("--validation")}
    assert files == {f"lr-{rate:g}.measure.json" for rate in RATES}
    assert len(machine.of("measure")) == 2 * len(RATES) + 2 * 2 + 1
    search = document["rate_search"]["arms"]
    assert [trial["accepted_length"] for trial in search["dflash"]["trials"]] == [2.8, 2.9, 3, 2.9]
    assert (search["dspark"]["at_the_edge"], search["dflash"]["at_the_edge"]) == (True, False)
    assert document["rows"] == {
        key: ROWS[key] for key in ("rows_digest", "rows", "supervised_tokens")
    }
    text = markdown(document)
    assert "the same 40 rows (2,000 tokens to learn)" in text
    assert "0.001 (at the edge)" in text
    assert (tmp_path / "dspark" / "seed-1" / "rows").is_dir()
    machine.called.clear()
    run_table(plan, lambda line: None)
    assert machine.called == []
    with pytest.raises(UserError, match="a table of other settings lives here"):
        run_table(plan_of(tmp_path, rates=RATES, steps=10), lambda line: None)


def test_a_call_that_is_killed_anywhere_goes_on_to_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(out: Path, dies_at: int | None) -> dict[str, Any]:
        plan = plan_of(out, arms=("ar", "lookup"), rates=(1e-3, 4e-3), steps=9)
        machine = Machine(worth, dies_at)
        monkeypatch.setattr(jobs, "call_module", machine)
        if dies_at is not None:
            with pytest.raises(KeyboardInterrupt):
                run_table(plan, lambda line: None)
            machine.dies_at = None
        document = run_table(plan, lambda line: None)
        repeated = len(machine.called)
        return {**document, "environment": None, "calls": repeated}

    whole = table(tmp_path / "whole", None)
    for call in range(1, whole["calls"] + 1):
        again = table(tmp_path / str(call), call)
        assert again.pop("calls") == whole["calls"] + 1  # the one that died, once more
        assert again == {key: value for key, value in whole.items() if key != "calls"}


def test_a_rate_that_ends_in_nan_is_an_answer_and_another_failure_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "step 3: gradient of fc.weight not finite; lower --lr"

    def fails_above(rate: float) -> Callable[..., None]:
        machine = Machine(worth)

        def call(arguments: list[str], log: Path, gpu: str | None = None) -> None:
            lr = float(arguments[-1].removeprefix("train.lr=")) if "train" in arguments else 0.0
            if lr > rate:
                raise UserError(f"{log}: the run failed: {said}")
            machine(arguments, log, gpu)

        return call

    plan = plan_of(tmp_path / "a", arms=("ar",), rates=RATES)
    monkeypatch.setattr(jobs, "call_module", fails_above(2e-3))
    document = run_table(plan, lambda line: None)
    assert best_rate(plan, "ar") == 2e-3
    trials = document["rate_search"]["arms"]["ar"]["trials"]
    assert [trial["accepted_length"] is None for trial in trials] == [False, False, True, True]
    assert "NaN" in markdown(document)
    monkeypatch.setattr(jobs, "call_module", fails_above(0.0))
    with pytest.raises(UserError, match="ar met NaN with each of them; try lower ones"):
        run_table(plan_of(tmp_path / "b", arms=("ar",), rates=RATES), lambda line: None)
    said = "No space left on device"
    with pytest.raises(UserError, match="No space left"):
        run_table(plan_of(tmp_path / "c", arms=("ar",), rates=RATES), lambda line: None)


def test_own_sizes_are_asked_for_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(worth)
    monkeypatch.setattr(jobs, "call_module", machine)
    text = markdown(run_table(plan_of(tmp_path, arms=("dflash",), sizes="own"), lambda line: None))
    assert all("--any-size" in call for call in machine.of("train"))
    assert "1,200 steps of 8 rows, learning rate 0.001. Not equal: the number of parameters" in text


def test_of_rates_worth_the_same_the_lower_is_taken(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, rates=(4e-3, 1e-3, 2e-3))
    for run in rate_runs(plan, "ar"):
        write_measured(run.measured, [30 if run.rate != 4e-3 else 29], [10])
    assert best_rate(plan, "ar") == 1e-3


def test_prompts_that_rates_are_chosen_by_are_neither_trained_on_nor_measured() -> None:
    ((name, temperature),) = VALIDATION_SETTINGS
    (chosen,) = load_suites(name, n_prompts=60, seed=SEED)
    asked = {row.prompt[0]["content"] for row in chosen.rows}
    files = [asset(f"prompts/{split}.jsonl") for split in ("train", "test")]
    others = {row.prompt[0]["content"] for row in read_prompts(files, strict=True).rows}
    assert len(asked) == 60
    assert not asked & others
    assert temperature == 1.0
    assert name not in {suite for suite, _ in SETTINGS}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": ("medusa",)}, "--arm medusa: expected one of dspark, dflash, eagle3, ar, lookup"),
        ({"steps": 0}, "--steps 0: expected 1 or more"),
        ({"prompts": 1}, "--prompts 1: expected 2 or more"),
        ({"rate_prompts": 1}, "--rate-prompts 1: expected 2 or more"),
        (
            {"rates": (1e-3, 1e-3)},
            "--rates 0.001 0.001: expected learning rates above 0, each once",
        ),
        ({"rates": (0.0,)}, "--rates 0: expected learning rates above 0"),
        ({"rates": ()}, "--rates : expected learning rates above 0"),
        ({"seeds": RATE_SEED + 1}, "--seeds 1001: expected at most 1000"),
        ({"draft_length": 8}, "--draft-length 8: expected at most 7"),
        ({"sizes": "paper"}, "--sizes paper: expected one of equal, own"),
        ({"overrides": {"train.seed": 1}}, "--set train.seed: the table decides it"),
        ({"overrides": {"train.lr": 1}}, "--set train.lr: the table decides it; use --rates"),
    ],
)
def test_wrong_tables_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        Plan(out=tmp_path, **change)
