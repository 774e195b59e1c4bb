"""Speed on real text: ways are compared like with like, on the prompts that both answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dspark.draft.checkpoint import save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.hf_open import hf_target
from dspark.runtime.loading import LoadedTarget
from dspark_eval.real_text import __main__ as command
from dspark_eval.real_text import speed, ways
from dspark_eval.real_text.speed import figures, measure_speed, speeds_table
from dspark_eval.real_text.ways import (
    generate_beside,
    is_recorded,
    plain_beside,
    text_beside,
)
from tests.hf_tiny import ROWS

NEW = 6
GREEDY = ["plain", "deep", "wide", "generate", "prompt_lookup", "early_exit"]
SAMPLED = ["plain, T = 1", "deep, T = 1", "wide, T = 1", "generate, T = 1"]
FRAMES = ["plain, recorded", "deep, recorded", "wide, recorded"]
FRAMES += ["plain, recorded, T = 1", "deep, recorded, T = 1", "wide, recorded, T = 1"]


def test_a_way_is_compared_with_plain_decoding_of_its_kind() -> None:
    table = {
        "plain": ("plain", "generate", "plain"),
        "early.1": ("plain", "generate", "plain"),
        "generate": ("plain", "generate", "plain"),
        "early.1, T = 1": ("plain, T = 1", "generate, T = 1", None),
        "plain, recorded": ("plain, recorded", "generate", "plain"),
        "early.1, recorded": ("plain, recorded", "generate", "plain, recorded"),
        "early.1, recorded, T = 1": ("plain, recorded, T = 1", "generate, T = 1", None),
    }
    for way, beside in table.items():
        assert (plain_beside(way), generate_beside(way), text_beside(way)) == beside
        assert is_recorded(way) == ("recorded" in way)


def test_ratios_are_of_the_prompts_that_both_answered() -> None:
    """The third prompt, which slow ways do not see, is another hundred times slower."""
    runs: dict[str, Any] = {
        "generate": [([1, 2], 8.0), ([3, 4], 8.0)],
        "plain": [([1, 2], 4.0), ([3, 4], 4.0)],
        "plain, recorded": [([1, 2], 1.0), ([3, 9], 1.0), ([5, 6], 100.0)],
        "a, recorded": [([1, 2], 0.5), ([3, 9], 0.5), ([5, 7], 25.0)],
    }
    plain, fast = figures("plain, recorded", runs), figures("a, recorded", runs)
    assert (plain["over_generate"], plain["over_generate_prompts"]) == (pytest.approx(8.0), 2)
    assert (fast["over_generate"], fast["over_generate_prompts"]) == (pytest.approx(16.0), 2)
    assert (fast["speed_up"], fast["speed_up_prompts"]) == (pytest.approx(102 / 26), 3)
    assert plain["tokens_per_second"] == pytest.approx(6 / 102)
    assert (plain["same_text_as_plain"], plain["same_text_prompts"]) == (1, 2)
    assert (fast["same_text_as_plain"], fast["same_text_prompts"]) == (2, 3)
    shown = speeds_table({"prompts": 3, "ways": {"a, recorded": fast}, "recorded": True})
    assert "| a, recorded | 3 | 0.2 | 3.92 [" in shown
    assert "16.00 [16.00, 16.00], n = 2 | 2 of 3 |" in shown
    assert "unrecorded" in speeds_table({"prompts": 3, "ways": {}, "recorded": False})


def test_what_is_not_there_is_not_compared_with() -> None:
    runs = {"plain, recorded": [([1, 2], 1.0)]}
    found = figures("plain, recorded", runs)
    assert found["over_generate"] is found["same_text_as_plain"] is None
    assert found["over_generate_prompts"] == found["same_text_prompts"] == 0
    assert found["speed_up"] == pytest.approx(1.0)


def test_a_table_of_an_earlier_study_is_still_written() -> None:
    old = {
        "tokens_per_second": 22.07, "speed_up": 1.0, "speed_up_ci95": [1.0, 1.0],
        "same_text_as_plain": 3,
    }  # fmt: skip
    shown = speeds_table({"prompts": 3, "ways": {"plain": old}})
    assert "| plain | 3 | 22.1 | 1.00 [1.00, 1.00] | - | 3 of 3 |" in shown


# ------------------------------------------------------------------ a whole run


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**ROWS["llama"][1])
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)  # texts that differ
    target = hf_target(model, name="tiny", end_token_ids=(2,))
    return LoadedTarget(target, None, Path("tiny"))  # type: ignore[arg-type]  # no text is read


@pytest.fixture
def study(tmp_path: Path, loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two drafters, and two sets of three and two prompts that are token ids."""
    for seed, arm in enumerate(("deep", "wide")):
        torch.manual_seed(seed)
        config = DraftConfig(
            hidden_size=32, num_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            intermediate_size=48, vocab_size=120, num_target_layers=4, target_layer_ids=(0, 2),
            target_tap_kind="residual", mask_token_id=3, block_size=3, markov_rank=4,
        )  # fmt: skip
        save_drafter(tmp_path / arm, DSparkDrafter(config), dtype=torch.float32)
    for name, count in (("a", 3), ("b", 2)):
        path = tmp_path / "prompts" / "test" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps({"turns": [f"{name} {n}"]}) + "\n" for n in range(count))
        )
    monkeypatch.setattr(speed, "ChatFormat", lambda tokenizer: None)
    monkeypatch.setattr(
        speed, "prompt_ids", lambda rows, chat: [[9, 5, 30 + row.line, 7] for row in rows]
    )
    return tmp_path


def timed(
    loaded: LoadedTarget,
    study: Path,
    slow: int | None,
    arms: Any = ("deep", "wide"),
    loops: bool = True,
) -> Any:
    return measure_speed(
        loaded,
        study,
        study / "prompts",
        arms,
        asked={},
        per_set=3,
        slow_per_set=slow,
        max_new_tokens=NEW,
        loops=loops,
    )


def counts(document: dict[str, Any]) -> dict[str, int]:
    return {name: each["prompts"] for name, each in document["ways"].items()}


def test_every_way_answers_and_frames_say_what_the_loops_say(
    loaded: LoadedTarget, study: Path
) -> None:
    found = timed(loaded, study, None)
    assert counts(found) == dict.fromkeys([*GREEDY, *SAMPLED, *FRAMES], 5)
    assert found["refused"] == {}
    assert found["recorded"] is False  # a CPU records nothing
    assert found["command"] == "python -m dspark_eval.real_text"
    assert {"schema_version", "environment", "seed", "warnings"} < set(found)
    assert json.loads((study / "speed.json").read_text()) == json.loads(json.dumps(found))
    for name, each in found["ways"].items():
        assert each["over_generate_prompts"] == each["speed_up_prompts"] == 5
        if not name.endswith("T = 1"):  # greedy, float32: all of these say the same
            assert (each["same_text_as_plain"], each["same_text_prompts"]) == (5, 5), name
    assert found["ways"]["generate, T = 1"]["over_generate"] == pytest.approx(1.0)


@pytest.mark.parametrize(("slow", "answered"), [(1, 2), (0, 0)])
def test_slow_ways_answer_the_first_prompts_of_each_set(
    loaded: LoadedTarget, study: Path, slow: int, answered: int
) -> None:
    found = timed(loaded, study, slow, arms=("deep",))
    named = ["plain, recorded", "deep, recorded", "plain, recorded, T = 1"]
    wanted = dict.fromkeys([*named, "deep, recorded, T = 1"], 5)
    late = ["plain", "deep", "plain, T = 1", "deep, T = 1", "generate", "generate, T = 1"]
    late += ["prompt_lookup", "early_exit"]
    assert counts(found) == {**wanted, **dict.fromkeys(late if answered else [], answered)}
    fast = found["ways"]["deep, recorded"]
    assert (fast["speed_up_prompts"], fast["over_generate_prompts"]) == (5, answered)


def test_without_loops_drafters_are_timed_in_frames_alone(
    loaded: LoadedTarget, study: Path
) -> None:
    found = timed(loaded, study, 1, arms=("deep",), loops=False)
    late = ["plain", "plain, T = 1", "generate", "generate, T = 1", "prompt_lookup", "early_exit"]
    assert {name for name, each in found["ways"].items() if each["prompts"] == 2} == set(late)
    assert found["ways"]["deep, recorded"]["prompts"] == 5
    assert not {"deep", "deep, T = 1"} & set(found["ways"])


def test_a_run_that_is_killed_keeps_what_it_has(
    loaded: LoadedTarget, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, answers = speed._timed, []

    def killed(*given: Any) -> tuple[list[int], float]:
        answers.append(given)
        if len(answers) > 2 * len([*GREEDY, *SAMPLED, *FRAMES]):
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(speed, "_timed", killed)
    with pytest.raises(KeyboardInterrupt):
        timed(loaded, study, None)
    found = json.loads((study / "speed.json").read_text())
    assert (found["prompts"], found["asked_prompts"]) == (2, 5)
    assert set(counts(found).values()) == {2}


def test_a_drafter_without_frames_is_left_out_and_said(
    loaded: LoadedTarget,
    study: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = ways.GraphDecoder

    def refusing(target: Any, drafter: Any, **options: Any) -> Any:
        if drafter is not None:
            raise UserError("this head has no frame")
        return real(target, drafter, **options)

    monkeypatch.setattr(ways, "GraphDecoder", refusing)
    found = timed(loaded, study, None, arms=("deep",))
    assert found["refused"] == dict.fromkeys(
        ["deep, recorded", "deep, recorded, T = 1"], "this head has no frame"
    )
    assert "deep, recorded: left out: this head has no frame" in capsys.readouterr().out
    assert {"plain", "deep", "plain, recorded"} < set(found["ways"])


def test_more_prompts_and_longer_answers_than_by_default_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "_target", lambda options: None)
    monkeypatch.setattr(command, "measure_speed", lambda *given, **named: asked.append(named))
    for more in ([], ["--per-set", "20", "--new-tokens", "256", "--slow-per-set", "4"]):
        assert command.main(["speed", str(tmp_path), *more]) == 0
    assert command.main(["speed", str(tmp_path), "--without-loops"]) == 0
    names = ("per_set", "slow_per_set", "max_new_tokens", "loops")
    assert [tuple(each[name] for name in names) for each in asked] == [
        (2, None, 64, True), (20, 4, 256, True), (2, None, 64, False)
    ]  # fmt: skip


def test_several_drafters_are_timed_beside_their_counterparts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference's recipe of the same seed and time stands before its drafter, once."""
    given: list[list[str]] = []
    monkeypatch.setattr(command, "_target", lambda options: None)
    monkeypatch.setattr(command, "measure_speed", lambda *a, **named: given.append(a[3]))
    for name in ("early.2", "deepspec.2", "wide.2", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trained.json").write_text("{}")
    assert command.main(["speed", str(tmp_path), "--arm", "early.2", "small", "wide.2"]) == 0
    assert command.main(["speed", str(tmp_path), "--arm", "deepspec.2", "early.2"]) == 0
    assert given == [["deepspec.2", "early.2", "small", "wide.2"], ["deepspec.2", "early.2"]]
    assert command.main(["speed", str(tmp_path), "--arm", "early.2", "middle"]) == 2
    assert "middle: not trained yet; run the step train --arm middle" in capsys.readouterr().err
    assert command.main(["measure", str(tmp_path), "--arm", "early.2", "small"]) == 2
    assert "--arm: measure takes one drafter; got 2" in capsys.readouterr().err
    assert len(given) == 2


def test_fewer_than_no_slow_prompts_are_refused(loaded: LoadedTarget, study: Path) -> None:
    with pytest.raises(UserError, match="--slow-per-set: expected 0 or more; got -1"):
        timed(loaded, study, -1)


def test_where_no_frame_can_be_had_the_slow_ways_are_measured(
    loaded: LoadedTarget, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They answer what they answer, and nobody is left for the other prompts."""

    def refusing(*given: Any, **options: Any) -> Any:
        raise UserError("this target has no frames")

    monkeypatch.setattr(ways, "GraphDecoder", refusing)
    found = timed(loaded, study, 1, arms=("deep",))
    assert set(counts(found).values()) == {2}
    assert found["prompts"] == found["asked_prompts"] == 2
    assert speed.is_timed(study, {})
    with pytest.raises(UserError, match="this target has no frames"):
        timed(loaded, study, 0, arms=("deep",))
