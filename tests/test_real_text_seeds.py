"""More seeds of the study on real text: pairs in the same crowd, intervals that know of seeds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark.distill.chat import TrainingRow
from dspark.errors import UserError
from dspark.taps import TapSet
from dspark_eval.real_text import __main__ as steps
from dspark_eval.real_text import schedule
from dspark_eval.real_text.comparing import compare, compare_seeds, seeds_table
from dspark_eval.real_text.repeats import repeats
from dspark_eval.real_text.runs import Run, find_run, reference_of, waits_for
from dspark_eval.real_text.schedule import Job, Study
from dspark_eval.real_text.speed import figures, from_the, in_turn, speeds_table
from dspark_eval.real_text.states import StatesOnce
from dspark_eval.real_text.table import earlier
from dspark_eval.real_text.ways import plain_beside
from tests.test_real_text import _llama, _write


def test_runs_are_named_by_recipe_time_and_seed() -> None:
    for name in ("early", "early.2", "early-long", "wide-fast-long.3", "long", "deepspec.1"):
        assert find_run(name).name == name
    assert find_run("wide-fast-long.3") == Run("wide-fast", 3, long=True)
    assert find_run("early-long.3").counterpart.name == "deepspec-long.3"
    assert find_run("long") == Run("long")  # a recipe of that name
    assert find_run("early").settings == {}  # as ever: records of before stay valid
    assert find_run("early.2").settings == {"train.seed": 2}
    for wrong in ("early.0", "early.x", "early.", "nobody.1"):
        with pytest.raises(UserError):
            find_run(wrong)


def test_a_seed_waits_for_its_own_and_for_longer_ones_only_at_first() -> None:
    beside = ["deepspec", "early", "deepspec-long", "early-long"]
    first = [run.name for run in waits_for(find_run("early.1"), beside, 1)]
    assert first == ["deepspec.1", "early.1", "deepspec-long.1", "early-long.1"]
    assert [run.name for run in waits_for(find_run("early.2"), beside, 1)] == [
        "deepspec.2",
        "early.2",
    ]


def test_states_are_computed_once_for_all_seeds() -> None:
    target = _llama()
    held = StatesOnce(target, [TrainingRow((5, 6, 7, 8), (False, True, True, True))])
    first = held.states(TapSet((0, 2), "residual"))
    assert held.states(TapSet((0, 2), "residual")) is first
    other = held.states(TapSet((1,), "residual"))
    assert other is not first
    assert held.states(TapSet((0, 2), "residual")) is not first  # two do not fit side by side


def test_seeds_train_one_after_the_other_on_the_same_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple] = []

    def train_for(loaded, held, held_out, config, seconds, folder, *, asked, beside, **rest):  # type: ignore[no-untyped-def]
        trained.append((folder.name, config, held, asked, [path.name for path in beside]))
        (folder / "trained.json").parent.mkdir(parents=True)
        (folder / "trained.json").write_text(json.dumps({"asked": asked}))

    monkeypatch.setattr(steps, "train_for", train_for)
    monkeypatch.setattr(steps, "_target", lambda options: SimpleNamespace(target=None))
    monkeypatch.setattr(steps, "read_rows", lambda out, prompts: ([], []))
    monkeypatch.setattr(steps, "arm_config", lambda arm, loaded, more, chosen: more)
    words = ["train", str(tmp_path), "--arm", "early", "--seeds", "1", "2", "--beside"]
    assert steps.main([*words, "deepspec", "early-long"]) == 0
    names, configs, held, asked, beside = zip(*trained, strict=True)
    assert names == ("early.1", "early.2")
    assert configs == ({"train.seed": 1}, {"train.seed": 2})
    assert held[0] is held[1]
    assert [each["settings"]["train.seed"] for each in asked] == [1, 2]
    assert beside == (["deepspec.1", "early-long.1"], ["deepspec.2"])
    assert steps.main([*words[:-1], "--seeds", "1", "2", "3"]) == 0  # only what is missing
    assert [name for name, *_ in trained] == ["early.1", "early.2", "early.3"]


def test_a_seeds_drafter_is_measured_while_its_process_trains_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def call(arguments: list[str], log: Path, gpu: str | None = None) -> None:
        events.append(f"{arguments[1]} starts")
        if arguments[1] == "train":
            _write(tmp_path / "a.1" / "trained.json", [])
            until = time.monotonic() + 10
            while "measure starts" not in events and time.monotonic() < until:
                time.sleep(0.05)
        events.append(f"{arguments[1]} ends")

    monkeypatch.setattr(schedule, "call_module", call)
    monkeypatch.setattr(schedule, "POLL", 0.05)
    study = Study(tmp_path, [], 50.0, lambda line: None)
    train = Job("train-a", 0, ("train",))
    waiting = [
        Job(f"measure-a.{seed}", 0, ("measure",), file=f"a.{seed}/trained.json", maker="train-a")
        for seed in (1, 2)
    ]
    ended = study.run([[train], waiting])
    # the second seed never came, though its process has ended
    assert ended == {"train-a": True, "measure-a.1": True, "measure-a.2": False}
    assert events.index("measure starts") < events.index("train ends")


def test_longer_runs_train_for_the_same_seconds(tmp_path: Path) -> None:
    study = Study(tmp_path, [], 400.0, lambda line: None)
    both = [Job(f"train-{name}", 0, ("train",), flexible=True, spare=100.0) for name in "ab"]
    first = study._room(both[0])
    time.sleep(0.05)
    assert study._room(both[1]) == first == pytest.approx(300, abs=1)
    brief = Study(tmp_path, [], 400.0, lambda line: None, longest=12.0)
    assert brief._room(both[0]) == 12.0


def test_repeats_start_together_and_measure_every_run() -> None:
    every = {job.name: job for lane in repeats("early", [1, 2], 200.0, None) for job in lane}
    trainings = [job for name, job in every.items() if name.startswith("train-")]
    assert len(trainings) == 4  # of the same moment, so in the same crowd
    assert {job.after for job in trainings} == {("answer", "warm")}
    beside = {job.arguments[job.arguments.index("--beside") + 1 :] for job in trainings}
    assert beside == {("deepspec", "early", "deepspec-long", "early-long")}
    assert {job.flexible for job in trainings if "-long" in job.name} == {True}
    measured = {job.arguments[2] for name, job in every.items() if name.startswith("measure-")}
    runs = {f"{arm}{rest}" for arm in ("deepspec", "early") for rest in (".1", ".2", "-long.1")}
    assert measured == runs
    names = {name for name in every if name.startswith("measure-")}
    assert set(every["speed"].after) == names  # nothing runs beside it


def _cells(emitted: list[int], rounds: int) -> list[dict]:
    return [
        {"set": "s", "temperature": temperature, "prompts": len(emitted), "emitted": emitted,
         "rounds": [rounds] * len(emitted), "loops": [False] * len(emitted)}
        for temperature in (0.0, 1.0)
    ]  # fmt: skip


def test_seeds_are_pooled_in_pairs() -> None:
    cells = {
        "deepspec.1": _cells([20, 30, 40], 10), "deepspec.2": _cells([22, 33, 44], 10),
        "early.1": _cells([30, 45, 60], 10), "early.2": _cells([33, 49, 66], 10),
        "early.3": _cells([900, 900, 900], 10),  # without a counterpart
        "early-long.1": _cells([90, 90, 90], 10), "deepspec-long.1": _cells([60, 60, 60], 10),
    }  # fmt: skip
    found = compare_seeds(cells)
    assert list(found) == ["early"]  # one pair of longer ones says nothing of seeds
    assert found["early"]["runs"] == [("early.1", "deepspec.1"), ("early.2", "deepspec.2")]
    assert found["early"]["all"]["ratio"] == pytest.approx((135 + 148) / (90 + 99))
    assert found["early"]["0"]["per_seed"][1] == pytest.approx((3.0, 3.3))
    low, high = found["early"]["all"]["ratio_ci95"]
    one = compare(cells["early.1"], cells["deepspec.1"])["all"]["ci95"]
    assert high - low > 3 * (one[1] - one[0])  # two seeds know little of the next
    assert "| early | all | 2 | 4.50, 4.93 | 3.00, 3.30 |" in seeds_table(found)
    assert reference_of("early-long.1", cells) == "deepspec-long.1"
    assert reference_of("early.3", cells) == "deepspec"
    assert reference_of("deepspec-long.1", cells) == "deepspec.1"
    assert reference_of("deepspec.1", cells) is None


def test_earlier_results_bring_their_runs_of_the_same_recipes() -> None:
    answers = [{"settings": {"samples": 5}, "seconds": 1.0}]
    known = {"answers": answers, "arms": {"deepspec": 1, "early": 2, "late": 3, "long": 4}}
    assert earlier(known, {"early.1": 5, "deepspec.1": 6}, answers) == {"deepspec": 1, "early": 2}
    with pytest.raises(UserError, match="asked for otherwise"):
        earlier(known, {}, [{"settings": {"samples": 4}}])


def test_prompts_of_all_sets_are_timed_in_turn() -> None:
    assert in_turn([[[1], [2]], [[3]], [[4], [5], [6]]]) == [[1], [3], [4], [2], [5], [6]]


def test_each_way_of_speed_is_first_in_turn_and_beside_plain_at_its_temperature() -> None:
    ways = ["plain", "a", "a, T = 1"]
    turns = [from_the(turn, ways) for turn in range(6)]
    assert all(sorted(turn) == sorted(ways) for turn in turns)
    for place in range(3):
        assert sorted(turn[place] for turn in turns) == sorted(2 * ways)
    assert [plain_beside(way) for way in ways] == ["plain", "plain", "plain, T = 1"]


def test_speed_is_over_plain_on_the_same_prompts() -> None:
    plain = [([1, 2, 3, 4], 2.0), ([5, 6], 2.0), ([7], 1.0)]
    runs = {"plain": plain, "early.1": [(text, seconds / 2) for text, seconds in plain]}
    found = figures("early.1", runs)
    assert found["speed_up"] == pytest.approx(2.0)
    assert found["speed_up_ci95"] == pytest.approx((2.0, 2.0))
    assert found["same_text_as_plain"] == 3
    text = speeds_table({"prompts": 3, "ways": {"early.1": found}})
    assert "| early.1 | 3 | 2.8 | 2.00 [2.00, 2.00] | - | 3 of 3 |" in text
