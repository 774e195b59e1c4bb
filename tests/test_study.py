"""Studies: their arms, equal parameters and seconds, what is run, gone on with and refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console
from dspark.distill.config import load_config
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark.runtime.loading import load_target
from dspark_eval.equal_size import count_parameters
from dspark_eval.study import runs
from dspark_eval.study.arms import STUDIES, Arm, Study, find_study
from dspark_eval.study.plan import Plan
from dspark_eval.study.processes import Devices, call_module, together
from dspark_eval.study.runs import pace, run_folder, run_study
from tests.tiny_pair import TinyPair, write_pair

every_study = pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)

TWO = Study("two", "Which?", (Arm("base", {}), Arm("wide", {"drafter.num_layers": 1}, "one layer")))


def plan(out: Path, study: Study = TWO, **change: Any) -> Plan:
    return Plan(**{"study": study, "out": out, "steps": 10, "seeds": (0,), **change})


# ------------------------------------------------------------------ arms and plans


@every_study
def test_all_settings_of_all_arms_are_valid(study: Study, tmp_path: Path) -> None:
    names = [arm.name for arm in study.arms]
    assert len(set(names)) == len(names)
    made = plan(tmp_path, study)
    for arm in study.arms:
        config = load_config(None, made.settings(arm))
        assert config.train.max_steps == 10
        assert (config.eval.prompts, config.eval.calibrate) == (0, False)


@every_study
@pytest.mark.slow
def test_every_arm_has_the_parameters_of_the_first(study: Study, tmp_path: Path) -> None:
    loaded = load_target("nano")
    made = plan(tmp_path, study)
    goal = count_parameters(load_config(None, made.settings(study.reference)), loaded)
    for arm in study.arms:
        settings = runs._matched(made, arm, loaded, lambda line: None)
        assert count_parameters(load_config(None, settings), loaded) == pytest.approx(
            goal, rel=0.02
        ), arm.name


def test_an_arm_is_widened_or_narrowed_and_the_reference_left_alone(tmp_path: Path) -> None:
    """One layer instead of two: what the layer held comes back as MLP width, to a multiple of 8."""
    loaded = load_target("nano")
    study = Study("s", "?", (Arm("base", {"drafter.intermediate_size": 100}), TWO.arms[1]))
    made = plan(tmp_path, study)
    said: list[str] = []
    base, wide = (runs._matched(made, arm, loaded, said.append) for arm in study.arms)
    assert base["drafter.intermediate_size"] == 100
    width = wide["drafter.intermediate_size"]
    assert width > 200
    assert width % 8 == 0
    assert said == [
        f"wide: {count_parameters(load_config(None, wide), loaded)} parameters, MLP width {width}"
    ]
    assert "drafter.intermediate_size" not in runs._matched(
        plan(tmp_path, replace(study, match=False)), study.arms[1], loaded, said.append
    )


def test_what_cannot_be_matched_is_said(tmp_path: Path) -> None:
    study = Study("s", "?", (Arm("base", {}), Arm("huge", {"drafter.num_layers": 12})))
    with pytest.raises(UserError, match=r"arm huge: .* make its other parts smaller"):
        runs._matched(plan(tmp_path, study), study.arms[1], load_target("nano"), print)


def test_only_some_arms_and_always_the_reference() -> None:
    study = find_study("family").only(("mla", "kda-0"))
    assert [arm.name for arm in study.arms] == ["attention", "mla", "kda-0"]
    with pytest.raises(UserError, match="--arm kda0: expected one of attention, "):
        study.only(("kda0",))
    with pytest.raises(UserError, match=r"families: no such study; expected one of family, "):
        find_study("families")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"jobs": 0}, "--jobs 0"),
        ({"prompts": 1}, "--prompts 1: expected 2"),
        ({"seeds": ()}, "--seeds"),
        ({"contexts": (0,)}, "--contexts 0"),
        ({"long": -1}, "--long -1"),
        ({"draft_length": 9}, "--draft-length 9: expected at most 8, the block size of arm base"),
        ({"device": "gpu"}, "target.device is 'gpu'"),
        ({"overrides": {"train.max_steps": 5}}, "--set train.max_steps: .* use --steps"),
        ({"overrides": {"train.lrr": 5}}, "did you mean train.lr"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_runs(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        plan(tmp_path, **change)


def test_an_arm_keeps_its_settings_against_those_of_the_command_line(tmp_path: Path) -> None:
    made = plan(tmp_path, overrides={"drafter.num_layers": 3, "train.lr": 0.5})
    base, wide = (made.settings(arm) for arm in TWO.arms)
    assert (base["drafter.num_layers"], wide["drafter.num_layers"]) == (3, 1)
    assert base["train.lr"] == wide["train.lr"] == 0.5


# ------------------------------------------------------------------ what is run


class Calls:
    """Stands for the processes: writes the files that each would leave."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.lock = threading.Lock()

    def __call__(self, arguments: list[str], log: Path, gpu: str | None = None) -> None:
        with self.lock:
            self.made.append(f"{log.stem} {log.parent.parent.name}/{log.parent.name}")
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.stem == "distill":
            steps = load_config(log.parent / "config.yaml").train.max_steps
            (log.parent / "rows").mkdir(exist_ok=True)
            record = {"step": steps, "train_s": 1.0}
            atomic_write_json(log.parent / "training.json", [record])
        if log.stem == "measure":
            result = {"accepted_length": 2.0}
            atomic_write_json(log.parent / "measure.json", {"results": [result]})
        if log.stem == "long":
            atomic_write_json(log.parent / "long.json", {"prompts": int(arguments[-1])})
        if log.stem == "drafting":
            entries = [{"context": int(n)} for n in arguments[3:]]
            atomic_write_json(log.parent / "drafting.json", entries)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(runs, "call_module", calls)
    monkeypatch.setattr(runs, "_matched", lambda plan, arm, loaded, say: plan.settings(arm))
    monkeypatch.setattr(runs, "load_target", lambda name: None)
    return calls


def run(made: Plan, calls: Calls) -> list[str]:
    calls.made.clear()
    run_study(made, lambda line: None)
    return sorted(calls.made)


def test_what_is_finished_is_not_repeated(calls: Calls, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = plan(out)
    assert run(made, calls) == [
        "distill base/seed-0", "distill out/first", "distill wide/seed-0",
        "measure base/seed-0", "measure wide/seed-0",
    ]  # fmt: skip
    assert run(made, calls) == []
    (out / "wide" / "seed-0" / "measure.json").unlink()
    assert run(made, calls) == ["measure wide/seed-0"]
    more = replace(made, seeds=(0, 1), long=3, contexts=(64,))
    assert run(more, calls) == [
        "distill base/seed-1", "distill wide/seed-1",
        "drafting base/seed-0", "drafting wide/seed-0",
        "long base/seed-0", "long base/seed-1", "long wide/seed-0", "long wide/seed-1",
        "measure base/seed-1", "measure wide/seed-1",
    ]  # fmt: skip
    assert run(more, calls) == []
    assert run(replace(more, contexts=(64, 128)), calls) == [
        "drafting base/seed-0", "drafting wide/seed-0"
    ]  # fmt: skip
    assert load_config(run_folder(out, "wide", 1) / "config.yaml").train.seed == 1


def test_another_study_in_the_folder_is_refused(calls: Calls, tmp_path: Path) -> None:
    run(plan(tmp_path), calls)
    before = read_json(tmp_path / "study.json")
    for other, expected in (
        (plan(tmp_path, steps=11), "with steps 10, not 11"),
        (plan(tmp_path, replace(TWO, name="three")), "with study 'two', not 'three'"),
        (plan(tmp_path, prompts=5), "with prompts 60, not 5"),
        (plan(tmp_path, overrides={"train.lr": 0.5}), "arm base was run with train.lr None"),
    ):
        with pytest.raises(UserError, match=f"{expected}.*choose another --out"):
            run(other, calls)
        assert calls.made == []
    assert read_json(tmp_path / "study.json") == before


def test_a_call_with_fewer_arms_leaves_the_others_in_the_table(
    calls: Calls, tmp_path: Path
) -> None:
    run(plan(tmp_path), calls)
    run(plan(tmp_path, replace(TWO, arms=TWO.arms[:1])), calls)
    assert [arm["name"] for arm in read_json(tmp_path / "study.json")["arms"]] == ["base", "wide"]


# ------------------------------------------------------------------ equal seconds


def test_a_pace_is_of_the_second_half() -> None:
    """100 steps in 8 s, the last 50 of them in 2 s: a run is slow while states are first read."""
    records = [{"step": s, "train_s": t} for s, t in ((10, 3.0), (50, 6.0), (60, 6.5), (100, 8.0))]
    assert pace(records) == pytest.approx(2 / 50)


def test_arms_get_the_seconds_of_the_reference(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 steps of 0.2 s are 2 s: 25 steps of 0.08 s, and at least one of a step that takes 9 s."""
    study = Study("s", "?", (Arm("base", {}), Arm("quick", {}), Arm("slow", {})))
    paces = {"base": 0.2, "quick": 0.08, "slow": 9.0}
    monkeypatch.setattr(runs, "_pace", lambda runs, name, settings: paces[name])
    run(plan(tmp_path, study, equal_seconds=True), calls)
    steps = {name: read_json(tmp_path / name / "seed-0" / "training.json")[-1]["step"]
             for name in paces}  # fmt: skip
    assert steps == {"base": 10, "quick": 25, "slow": 1}


# ------------------------------------------------------------------ processes


def test_one_failure_stops_no_other_and_is_raised() -> None:
    done = []

    def fail() -> None:
        raise UserError("first")

    with pytest.raises(UserError, match="first"):
        together([fail, lambda: done.append(1), lambda: done.append(2)], 1)
    assert done == [1, 2]
    assert together([lambda: 1, lambda: 2, lambda: 3], 2) == [1, 2, 3]


def test_whoever_comes_gets_the_least_busy_gpu() -> None:
    devices = Devices(["4", "7"])
    with devices.one() as first, devices.one() as second:
        assert (first, second) == ("4", "7")
    with devices.one() as first:
        assert first == "4"
        with devices.one() as second:
            assert second == "7"
        with devices.one() as third:  # the other one is still in use
            assert third == "7"
    with Devices(["0"]).one() as only:
        assert only is None


def test_a_process_that_fails_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with pytest.raises(UserError, match=r"x\.log: the run failed: .*No module named not_there"):
        call_module(["not_there"], log)
    call_module(["this"], log)
    assert "Beautiful is better than ugly" in log.read_text()


# ------------------------------------------------------------------ the command

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        code = console.run(cli.app, ["study", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_help_names_every_study_and_an_example(command: Run) -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert f"{', '.join(STUDIES)}." in " ".join(out.split())
    assert "Example: dspark study" in out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("families", "--out", "x"), "families: no such study"),
        (("family",), "--out"),
        (("family", "--out", "x", "--arm", "kda-0", "nope"), "--arm nope"),
        (("family", "--out", "x", "--seeds", "0"), "--seeds"),
        (("family", "--out", "x", "--set", "train.lr"), "section.key=value"),
    ],
)
def test_wrong_input_is_one_line(command: Run, args: tuple[str, ...], expected: str) -> None:
    code, out, err = command(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
    assert not Path("x").exists()


def test_ctrl_c_says_that_the_same_line_goes_on(
    command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(plan: Plan, say: Callable[[str], None]) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_study", stop)
    line = f"family --out {tmp_path} --seeds 2"
    code, out, err = command(*line.split())
    assert (code, out) == (130, "")
    assert err == f"interrupted; what is finished is kept, to go on: dspark study {line}\n"


def test_a_key_of_one_backbone_is_set_for_its_arms_alone(tmp_path: Path) -> None:
    study = find_study("family").only(("kda-0", "mla"))
    plan = Plan(study, tmp_path, overrides={"drafter.kda_gate_rank": 8, "train.lr": 1e-3})
    found = {arm.name: load_config(None, plan.settings(arm)) for arm in study.arms}
    assert {name: config.drafter.kda_gate_rank for name, config in found.items()} == {
        "attention": 32, "mla": 32, "kda-0": 8,
    }  # fmt: skip
    assert all(config.train.lr == 1e-3 for config in found.values())


@pytest.mark.slow
def test_a_whole_study_of_a_tiny_target(command: Run, tmp_path: Path) -> None:
    """Two arms, really trained, measured, timed; a second call only prints the table again."""
    pair: TinyPair = write_pair(tmp_path)
    rows = [{"prompt": f"What is {n} + 4?"} for n in range(12)]
    pair.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "study"
    args = (
        "family", "--out", str(out), "--target", str(pair.target), "--arm", "kda-gla",
        "--steps", "3", "--seeds", "1", "--prompts", "2", "--draft-length", "4",
        "--device", "cpu", "--contexts", "16", "--json",
        "--set", f"data.prompts=[{pair.prompts}]", "data.max_new_tokens=12", "data.held_out=2",
        "drafter.head_dim=16", "drafter.num_heads=2", "drafter.num_kv_heads=1",
        "drafter.markov_rank=8", "drafter.kda_gate_rank=4", "drafter.mask_token_id=0",
    )  # fmt: skip
    code, text, err = command(*args)
    assert code == 0, err
    table = json.loads(text)
    assert [row["arm"] for row in table["rows"]] == ["attention", "kda-gla"]
    for row in table["rows"]:
        assert row["steps"] == 3
        assert all(1 <= result["accepted_length"] <= 5 for result in row["results"])
        assert [entry["context"] for entry in row["drafting"]] == [16]
    sizes = [row["parameters"] for row in table["rows"]]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
    code, again, err = command(*args)
    assert (code, again) == (0, text)
    assert "0 runs" in err
