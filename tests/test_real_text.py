"""The study on real text: nothing measured is trained on, equal seconds, honest comparisons."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers

from dspark.distill.batches import make_batch
from dspark.distill.chat import TrainingRow
from dspark.distill.messages import user_turn
from dspark.distill.prompts import PromptRow
from dspark.distill.taps import target_features
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.nano.generate import problem
from dspark.runtime.hf_open import hf_target
from dspark.runtime.hf_target import RowTarget
from dspark.runtime.plain import DRAWS, generate_batch
from dspark.runtime.sampling import SamplingParams
from dspark.taps import TapSet
from dspark_eval.real_text import schedule, wide
from dspark_eval.real_text.__main__ import main
from dspark_eval.real_text.answers import Asked, check_asked
from dspark_eval.real_text.arms import CHOSEN, REFERENCE, TRIED, find_arm
from dspark_eval.real_text.chosen import choose, real_name
from dspark_eval.real_text.comparing import compare
from dspark_eval.real_text.prompts import Unseen, refuse_seen, training_prompts
from dspark_eval.real_text.reuse import is_there
from dspark_eval.real_text.schedule import Job, Study, jobs
from dspark_eval.real_text.speed import is_timed
from dspark_eval.real_text.start import layers_between, start_from_layers
from dspark_eval.real_text.states import HeldStates
from dspark_eval.real_text.training import _start_with
from dspark_eval.real_text.wide import generate_wide
from dspark_eval.real_text.writing import beginning, read_written, shared_endings
from tests.hf_tiny import ROWS
from tests.table_target import TableTarget

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MEASURED = "A farmer has 12 red hens and buys 5 more at the market. How many hens are there now?"


def _write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    others = [problem(1, index, "test").question + SUFFIX for index in range(9)]
    _write(tmp_path / "test" / "sums.jsonl", [MEASURED + SUFFIX, *others])
    own = [f"Tell me about the number {n} and why {n * 7} follows it in my list." for n in range(5)]
    copies = [MEASURED + SUFFIX, MEASURED.replace("12", "31").replace("5", "8"), MEASURED.upper()]
    honest = "What is the capital of the country that lies north of the Alps?" + SUFFIX
    _write(tmp_path / "train" / "mixed.jsonl", [*own, *copies, honest])
    return tmp_path


def test_no_test_prompt_nor_a_near_copy_is_trained_on(folder: Path) -> None:
    chosen = training_prompts(folder, samples=3, generated=40)
    texts = [row.messages[0]["content"] for row in chosen.training]
    held = [row.messages[0]["content"] for row in chosen.held_out]
    assert chosen.dropped["mixed"] == 3  # as it stands, with other numbers, in capitals
    assert not any("red hens" in text.lower() for text in texts + held)
    # a shared form is no copy: the honest question has the suffix of every test prompt
    asked = [text for text in texts if text.endswith(SUFFIX)]
    assert len(asked) == 3
    assert not set(held) & set(texts)
    assert len(texts) >= 3 * 5 + 40 - chosen.dropped.get("generator", 0)
    refuse_seen(chosen.training, Unseen([folder / "test" / "sums.jsonl"]))


@pytest.mark.parametrize(
    "text", [MEASURED + SUFFIX, MEASURED.replace("12", "31"), "Hello! " + MEASURED]
)
def test_training_on_a_test_prompt_is_refused(folder: Path, text: str) -> None:
    unseen = Unseen([folder / "test" / "sums.jsonl"])
    rows = [PromptRow("given.jsonl", 7, user_turn("Something else entirely, as it were."))]
    refuse_seen(rows, unseen)
    with pytest.raises(UserError, match=r"given\.jsonl:8: shares .* of its word trigrams"):
        refuse_seen([*rows, PromptRow("given.jsonl", 8, user_turn(text))], unseen)


def test_later_turns_of_a_test_prompt_count_too(tmp_path: Path) -> None:
    later = "Now write the same story again from the point of view of the lighthouse keeper."
    (tmp_path / "chat.jsonl").write_text(json.dumps({"turns": ["Write a story.", later]}) + "\n")
    assert Unseen([tmp_path / "chat.jsonl"]).closest(later)[0] == 1.0


def _llama() -> RowTarget:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**ROWS["llama"][1])
    target = hf_target(transformers.LlamaForCausalLM(config), name="tiny", end_token_ids=(2,))
    assert isinstance(target, RowTarget)
    return target


def test_held_states_are_the_targets_and_zero_at_padding() -> None:
    target, taps = _llama(), TapSet((0, 2), "residual")
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in (9, 4, 17, 12):
        ids = torch.randint(3, 120, (length,), generator=generator).tolist()
        rows.append(TrainingRow(tuple(ids), (False,) + (True,) * (length - 1)))
    states = HeldStates(target, taps, rows)
    batch = make_batch(rows, [2, 1, 3], anchors=2, seed=0, epoch=0)
    found, wanted = states(batch), target_features(target, batch, taps)
    assert torch.allclose(found.taps, wanted.taps, atol=1e-5)
    assert torch.allclose(found.hidden, wanted.hidden, atol=1e-5)
    assert found.taps.shape == (3, 17, 64)
    assert float(found.taps[1, 4:].abs().max()) == 0.0
    assert float(states(make_batch(rows, [], anchors=2, seed=0, epoch=0)).taps.abs().max()) == 0.0


def test_a_drafters_layer_starts_as_the_targets(tmp_path: Path) -> None:
    target = _llama()
    config = DraftConfig(
        hidden_size=32, num_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=120, num_target_layers=4, target_layer_ids=(0, 2),
        target_tap_kind="residual", mask_token_id=3, block_size=4, markov_rank=4,
    )  # fmt: skip
    drafter = DSparkDrafter(config)
    start_from_layers(drafter, target)
    assert layers_between(4, 2) == [1, 3]
    theirs, own = target.parts.layers[3], drafter.layers[1]
    x = torch.randn(7, 32)
    normed = theirs.input_layernorm(x)
    for name in ("q_proj", "k_proj", "v_proj"):
        wanted = getattr(theirs.self_attn, name)(normed)
        found = getattr(own.self_attn, name)(own.input_layernorm(x))
        assert torch.allclose(found, wanted, atol=1e-5)
    mlp = own.mlp(own.post_attention_layernorm(x))
    assert torch.allclose(mlp, theirs.mlp(theirs.post_attention_layernorm(x)), atol=1e-5)
    narrow = DraftConfig(**{**vars(config), "intermediate_size": 40})
    with pytest.raises(UserError, match="needs equal shapes"):
        start_from_layers(DSparkDrafter(narrow), target)


def test_a_wider_mlp_starts_as_the_targets(tmp_path: Path) -> None:
    """The channels that the target has not write nothing at first, and can learn to."""
    target = _llama()
    config = DraftConfig(
        hidden_size=32, num_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, vocab_size=120, num_target_layers=4, target_layer_ids=(0, 2),
        target_tap_kind="residual", mask_token_id=3, block_size=4, markov_rank=4,
    )  # fmt: skip
    drafter = DSparkDrafter(config)
    start_from_layers(drafter, target)
    own, theirs = drafter.layers[1].mlp, target.parts.layers[3].mlp
    x = torch.randn(7, 32)
    assert torch.allclose(own(x), theirs(x), atol=1e-5)
    assert float(own.gate_proj.weight[48:].detach().abs().min()) > 0


def test_two_drafters_are_compared_on_the_same_prompts() -> None:
    def cell(emitted: list[int], rounds: list[int], temperature: float) -> dict:
        return {
            "set": "s", "temperature": temperature, "prompts": len(rounds),
            "emitted": emitted, "rounds": rounds, "loops": [False, True, False],
        }  # fmt: skip

    reference = [cell([20, 40, 30], [10, 20, 15], 0.0), cell([20, 40, 30], [10, 20, 15], 1.0)]
    better = [cell([30, 60, 45], [10, 20, 15], 0.0), cell([20, 40, 30], [10, 20, 15], 1.0)]
    found = compare(better, reference)
    assert found["0"]["ratio"] == pytest.approx(1.5)  # in every prompt, so in every resample
    assert found["0"]["ci95"] == pytest.approx([1.5, 1.5])
    assert found["1"]["ratio"] == pytest.approx(1.0)
    assert found["all"]["ratio"] == pytest.approx(1.25)  # tokens over rounds, both pooled
    looped = compare([cell([20, 900, 30], [10, 20, 15], 0.0)], reference[:1])
    assert looped["without loops"]["ratio"] == pytest.approx(1.0)
    assert looped["all"]["ratio"] > 1.0
    with pytest.raises(UserError, match="other prompts"):
        compare([cell([1], [1], 0.0)], reference)
    marked = [{**reference[0], "prompts_sha256": digest} for digest in "ab"]
    with pytest.raises(UserError, match="other prompts"):
        compare(marked[:1], marked[1:])


def test_a_prompt_asked_at_two_temperatures_counts_as_one_prompt() -> None:
    """The same counts twice say no more than once: the interval is not narrower by sqrt 2."""

    def cells(emitted: list[int]) -> list[dict]:
        return [
            {"set": "s", "temperature": temperature, "prompts": len(emitted), "emitted": emitted,
             "rounds": [10] * len(emitted), "loops": [False] * len(emitted)}
            for temperature in (0.0, 1.0)
        ]  # fmt: skip

    found = compare(cells([20, 40, 60, 25, 55, 35]), cells([30] * 6))
    assert found["all"]["ratio"] == pytest.approx(found["0"]["ratio"])
    assert found["all"]["ci95"] == pytest.approx(found["0"]["ci95"])
    assert found["without loops"] == found["all"]


def test_jobs_wait_for_what_they_need_and_are_skipped_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    said: list[str] = []

    def call(arguments: list[str], log: Path, gpu: str | None = None) -> None:
        ran.append([arguments[1], *arguments[3:], f"gpu {gpu}"])
        if "bad" in arguments:
            raise UserError("it broke")

    monkeypatch.setattr(schedule, "call_module", call)
    study = Study(tmp_path, ["--common"], 50.0, said.append, ["--set", "a=1"], ["--last"])
    ended = study.run(
        [
            [Job("b", 1, ("measure", "b"), ("a",)), Job("big", 0, ("x",), least=60.0)],
            [Job("a", 0, ("train", "a")), Job("bad", 0, ("bad", "bad"))],
            [Job("after", 0, ("y",), ("bad",))],
        ]
    )
    assert ended == {"a": True, "b": True, "bad": False, "big": False, "after": False}
    assert ["train", "--common", "a", "--set", "a=1", "--last", "gpu 0"] in ran
    assert ran.index(["measure", "--common", "b", "--last", "gpu 1"]) > 0
    assert [call[0] for call in ran].count("y") == 0
    assert any("after: skipped, bad was not done" in line for line in said)
    assert any("big: skipped" in line and "60 needed" in line for line in said)


@pytest.mark.parametrize("gpus", [1, 2])
def test_those_that_are_compared_train_beside_each_other_and_nothing_else(gpus: int) -> None:
    every = {job.name: job for lane in jobs(gpus, 200.0, TRIED) for job in lane}

    def comes_after(name: str, other: str) -> bool:
        before = {*every[name].needs, *every[name].after}
        return any(each == other or comes_after(each, other) for each in before)

    compared = {f"train-{arm}" for arm in (REFERENCE, *TRIED)}
    assert len({every[name].gpu for name in compared}) == 1
    for arm in compared:
        for name in every:
            ordered = comes_after(name, arm) or comes_after(arm, name)
            assert ordered != (name in compared), (name, arm)
    for name in every:  # nothing runs beside speed
        assert name == "speed" or comes_after("speed", name) or comes_after(name, "speed")


def test_a_job_waits_for_others_that_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(arguments: list[str], log: Path, gpu: str | None = None) -> None:
        if "bad" in arguments:
            time.sleep(0.2)
            raise UserError("it broke")

    monkeypatch.setattr(schedule, "call_module", call)
    study = Study(tmp_path, [], 50.0, lambda line: None)
    lanes = [[Job("last", 0, ("x",), after=("bad",))], [Job("bad", 0, ("bad", "bad"))]]
    assert study.run(lanes) == {"bad": False, "last": True}


def test_a_job_that_is_left_out_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(schedule, "call_module", lambda words, log, gpu: ran.append(words[1]))
    study = Study(tmp_path, [], 50.0, lambda line: None, without=["a"])
    assert study.run([[Job("a", 0, ("x",)), Job("b", 0, ("y",))]]) == {"a": False, "b": True}
    assert ran == ["y"]


def test_a_training_of_flexible_length_keeps_the_one_it_had(tmp_path: Path) -> None:
    job = Job("train-long", 0, ("train",), flexible=True)
    study = Study(tmp_path, [], 400.0, lambda line: None)
    left = study._room(job)
    assert 0 < left < 400 - schedule.MEASURING
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "trained.json").write_text(json.dumps({"seconds_asked": 31.0}))
    assert study._room(job) == 31.0


def test_runs_that_start_together_wait_for_each_other(tmp_path: Path) -> None:
    _write(tmp_path / "a" / "x", [])
    started = time.monotonic()
    later = threading.Timer(0.5, _start_with, (tmp_path / "b", [tmp_path / "a", tmp_path / "b"]))
    later.start()
    _start_with(tmp_path / "a", [tmp_path / "a", tmp_path / "b"])
    assert 0.5 <= time.monotonic() - started < 30
    later.join()


def test_a_batch_row_draws_the_same_alone_past_the_first_numbers() -> None:
    target = TableTarget.random(9, 2, scale=1.0)
    options = {"max_new_tokens": 2 * DRAWS + 5, "sampling": SamplingParams(1.0), "seed": 5}
    ends = {"end_token_ids": (0,)}
    prompts = [[3, 1], [4], [1, 5, 2], [6]]
    together = generate_batch(target, prompts, **options, **ends)
    assert len({len(text) for text in together}) > 1
    for index, prompt in enumerate(prompts):
        assert generate_batch(target, [prompt], **options, **ends, indices=[index]) == [
            together[index]
        ]


def test_answers_of_other_settings_are_not_taken_for_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = Asked(max_new_tokens=192, samples=5, generated=500, written=9, parts=3)
    (tmp_path / "rows.0.json").write_text(json.dumps({"settings": asdict(known)}))
    check_asked(tmp_path, known)
    assert main(["answer", str(tmp_path), "--written", "9", "--samples", "3"]) == 2
    assert "answered with" in capsys.readouterr().err


def test_results_of_other_settings_are_not_taken_for_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "done.json"
    asked = {"seconds": 200.0, "settings": {"train.lr": 1e-3}}
    assert not is_there(path, asked)
    path.write_text(json.dumps({"asked": asked}))
    assert is_there(path, asked)
    with pytest.raises(UserError, match=r"made with seconds 200\.0, not 40\.0"):
        is_there(path, {**asked, "seconds": 40.0})
    (tmp_path / "deepspec").mkdir()
    (tmp_path / "deepspec" / "trained.json").write_text(json.dumps({"asked": asked}))
    assert main(["train", str(tmp_path), "--arm", "deepspec", "--seconds", "40"]) == 2
    assert "made with" in capsys.readouterr().err


def test_times_of_a_run_that_ended_early_are_measured_again(tmp_path: Path) -> None:
    asked = {"per_set": 2}
    assert not is_timed(tmp_path, asked)
    for prompts in (3, 4):
        record = {"asked": asked, "prompts": prompts, "asked_prompts": 4}
        (tmp_path / "speed.json").write_text(json.dumps(record))
        assert is_timed(tmp_path, asked) == (prompts == 4)
    with pytest.raises(UserError, match="made with per_set 2, not 3"):
        is_timed(tmp_path, {"per_set": 3})


def test_the_best_candidate_is_chosen_by_prompts_kept_aside(tmp_path: Path) -> None:
    assert choose(tmp_path) is None
    with pytest.raises(UserError, match=r"none of wide, .* is trained"):
        real_name(tmp_path, "chosen")
    for name, length in (("deep", 2.5), ("wide", 2.7), ("deepspec", 2.9)):
        (tmp_path / name).mkdir()
        record = {"held_out": {"accepted_length": length}}
        (tmp_path / name / "trained.json").write_text(json.dumps(record))
    assert choose(tmp_path) == "wide"  # the reference is no candidate
    assert real_name(tmp_path, "chosen") == "wide"
    assert real_name(tmp_path, "small") == "small"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_wide_answers_are_those_of_the_batch_loop(temperature: float) -> None:
    """Rows of unlike length, over more than one width, some of which end early."""
    target = _llama()
    for parameter in target.parts.model.parameters():
        parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)  # sharper: texts that do end
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, 110, (n,), generator=generator).tolist() for n in (5, 1, 70, 33, 12)
    ]
    options = {"max_new_tokens": 80, "sampling": SamplingParams(temperature), "seed": 5}
    wanted = generate_batch(target, prompts, **options)
    assert generate_wide(target, prompts, **options) == wanted
    assert generate_wide(target, prompts[1:3], indices=[1, 2], **options) == wanted[1:3]
    if temperature:
        assert len({len(text) for text in wanted}) > 2


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    target, sizes = _llama(), []
    run = wide._Batch.run

    def tight(self: wide._Batch, *given: object) -> list[list[int]]:
        sizes.append(len(self._prompts))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        return run(self, *given)

    options = {"max_new_tokens": 6, "sampling": SamplingParams(1.0), "seed": 5}
    prompts = [[5, 6], [7], [8, 9, 10], [11], [12]]
    wanted = generate_wide(target, prompts, **options)
    monkeypatch.setattr(wide._Batch, "run", tight)
    assert generate_wide(target, prompts, **options) == wanted
    assert sizes == [5, 2, 2, 1]


def test_beginnings_and_the_form_of_a_set() -> None:
    rows = [PromptRow("a", at, user_turn(f"What is {at}?{SUFFIX}")) for at in range(3)]
    rows += [PromptRow("b", at, user_turn(f"Tell me of {at}.")) for at in range(3)]
    assert shared_endings(rows) == {"a": SUFFIX, "b": ""}
    text = "One two  three\nfour five six seven eight nine ten."
    for seed in range(20):
        start = beginning(text, random.Random(seed))
        assert text.startswith(start)
        assert 1 <= len(start.split()) < 10
        assert not start[-1].isspace()
    assert beginning("Hello", random.Random(0)) == "Hello"


def test_written_prompts_of_another_number_are_refused(tmp_path: Path) -> None:
    lines = [{"asked": 7}, {"turns": ["Count to nine."]}, {"turns": ["Count to ten."]}]
    (tmp_path / "written.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read_written(tmp_path, 7)
    assert [row.messages[0]["content"] for row in rows] == ["Count to nine.", "Count to ten."]
    with pytest.raises(UserError, match="7 prompts were asked for, not 8"):
        read_written(tmp_path, 8)


def test_training_asks_for_the_arm_that_nobody_named() -> None:
    with pytest.raises(UserError, match="--arm: name the drafter to train, one of deepspec"):
        find_arm(CHOSEN)
