"""`dspark bench --graphs`: both ways by frames, unrecorded on a CPU, and saying so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console
from dspark.errors import UserError
from dspark.runtime.cost_model import cost_model_from_dict
from dspark.runtime.plain import plain_generate
from dspark.runtime.records import Generation, RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark_eval import bench, recorded, speed
from dspark_eval.bench import run_bench
from dspark_eval.pair import load_pair
from dspark_eval.recorded import Recorder, frame_warnings
from dspark_eval.report import print_bench
from dspark_eval.reporting.blocks import Prose
from dspark_eval.reporting.cost import cost_model as cost_section
from dspark_eval.reporting.speed import bench as section
from dspark_eval.settings import BenchOptions
from dspark_eval.speed import PromptTimings
from dspark_eval.suites import load_suites
from dspark_eval.verdicts import exit_code
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair

NEW = 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def options(pair: TinyPair, **change: Any) -> BenchOptions:
    values = {"max_new_tokens": NEW, "warmup": 1, "quiet": True, "graphs": True, **change}
    return BenchOptions(draft=pair.draft, target=pair.target, prompts=pair.prompts, **values)


def plain_texts(pair: TinyPair) -> list[list[int]]:
    """What plain decoding says, pass by pass."""
    loaded = load_pair(options(pair))
    suite = load_suites(pair.prompts, n_prompts=60, seed=options(pair).seed)[0]
    return [
        plain_generate(loaded.target, ids, max_new_tokens=NEW, sampling=SamplingParams()).tokens
        for ids in loaded.prompt_ids(suite)
    ]


@pytest.fixture(scope="module")
def measured(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("out")
    asked = options(pair, temperature=(0.0, 1.0), json=out / "b.json", plot=out / "b.png")
    document = run_bench(asked)
    assert json.loads((out / "b.json").read_text()) == json.loads(json.dumps(document))
    assert (out / "b.png").read_bytes().startswith(b"\x89PNG")
    return document


def test_both_ways_say_what_plain_decoding_says(pair: TinyPair, measured: dict[str, Any]) -> None:
    wanted = speed.hash_tokens(plain_texts(pair))
    extra = measured["extra"]
    assert extra["plain_sha256"] == extra["speculative_sha256"] == wanted
    assert measured["greedy_mismatches"] == 0
    assert extra["graphs"]["eager"]["mismatches"] == []
    sampled = measured["runs"][1]
    assert sampled["extra"]["graphs"]["eager"]["mismatches"] is None
    assert sampled["extra"]["lossless"]["impossible"] == 0


def test_the_document_says_what_ran(measured: dict[str, Any]) -> None:
    for run in measured["runs"]:
        graphs = run["extra"]["graphs"]
        assert graphs["frames"] == "unrecorded"  # a CPU records nothing
        assert any("unrecorded" in text for text in run["extra"]["warnings"])
        assert (graphs["seats"], graphs["sizes"]) == (1, [BLOCK_SIZE])
        assert (run["draft_ms"], run["verify_ms"], run["other_ms"]) == (None, None, None)
        assert 0 < graphs["frame_ms_mean"] <= run["frame_ms_p99"]
        assert graphs["eager"]["n_prompts"] == 3
        assert graphs["eager"]["plain_tokens_per_s"] > 0
        assert graphs["eager"]["frames_over_eager"] > 0
    assert measured["backends"]["verify_sample"] == "torch"
    assert measured["backends"]["settle"] == "torch"


def test_frames_that_were_recorded_are_not_warned_about() -> None:
    assert frame_warnings({"frames": "recorded"}) == []
    assert frame_warnings(None) == []


def test_a_table_and_a_report_show_whole_frames(
    measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    print_bench(measured["runs"])
    shown = capsys.readouterr().out
    assert "draft + verify" not in shown
    assert "both ways by unrecorded frames of 1 seat" in shown
    (told,) = (b for b in section("b.json", measured).blocks if hasattr(b, "rows"))
    assert f"{measured['extra']['graphs']['frame_ms_mean']:.2f}" in next(iter(told.rows))


def test_an_error_that_both_kinds_of_frames_make_ends_with_1(
    pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain and speculative texts agree with each other, and not with the target."""
    decode = recorded._decode

    def wrong(*given: Any) -> list[Generation]:
        texts = decode(*given)
        for text in texts:
            text.tokens[1] = (text.tokens[1] + 1) % 50
        return texts

    assert exit_code(run_bench(options(pair, n_prompts=1))) == 0
    monkeypatch.setattr(recorded, "_decode", wrong)
    document = run_bench(options(pair, n_prompts=1))
    assert document["greedy_mismatches"] == 0
    assert exit_code(document) == 1
    assert any("NOT LOSSLESS" in text for text in document["extra"]["warnings"])


# ------------------------------------------------------------------ several prompts at once


def test_prompts_side_by_side_share_the_seconds_of_their_frames(pair: TinyPair) -> None:
    loaded = load_pair(options(pair))
    suite = load_suites(pair.prompts, n_prompts=60, seed=options(pair).seed)[0]
    prompts = loaded.prompt_ids(suite)
    frames = Recorder(loaded, prompts, 2, NEW).frames(SamplingParams(), recorded.Fixed())
    for decoder, decode in (
        (frames.plain_decoder, frames.plain),
        (frames.fast_decoder, frames.speculative),
    ):
        found = decode(prompts[:2], 0)
        assert [text.tokens for text in found] == plain_texts(pair)[:2]
        assert found[0].decode_s == found[1].decode_s
        assert sum(text.decode_s for text in found) == pytest.approx(sum(decoder.frame_s))


def test_a_whole_run_of_two_seats(pair: TinyPair) -> None:
    document = run_bench(options(pair, batch=2))
    assert document["batch"] == document["extra"]["graphs"]["seats"] == 2
    assert document["extra"]["speculative_sha256"] == speed.hash_tokens(plain_texts(pair))
    assert document["extra"]["graphs"]["eager"]["frames_over_eager"] is None


def test_batches_take_turns_and_every_prompt_keeps_its_seed() -> None:
    calls: list[tuple[str, list[int], int]] = []

    def way(name: str) -> speed.DecodeMany:
        def decode(prompts: Any, seed: int) -> list[Generation]:
            calls.append((name, [ids[0] for ids in prompts], seed))
            return [Generation([ids[0]], "length", 1.0, 1.0) for ids in prompts]

        return decode

    found = speed.measure([[0], [1], [2]], way("plain"), way("fast"), repeats=2, seed=100, batch=2)
    assert calls == [
        ("plain", [0, 1], 100),
        ("fast", [0, 1], 100),
        ("fast", [2], 102),
        ("plain", [2], 102),
        ("fast", [0, 1], 103),
        ("plain", [0, 1], 103),
        ("plain", [2], 105),
        ("fast", [2], 105),
    ]
    assert [[text.tokens for text in entry.plain] for entry in found] == [
        [[i]] * 2 for i in range(3)
    ]


def test_an_interval_of_batches_keeps_a_batch_together() -> None:
    """In each batch one text is 3 times faster and one as fast: batches are all alike."""

    def entry(plain_s: float, fast_s: float) -> PromptTimings:
        texts = (Generation(list(range(11)), "length", 1.0, s) for s in (plain_s, fast_s))
        plain, fast = texts
        return PromptTimings(3, [plain], [fast])

    timings = [entry(3.0, 1.0), entry(1.0, 1.0)] * 3
    together = speed.summarize(timings, seed=0, batch=2)
    assert together["speedup"] == pytest.approx(2.0)
    assert together["speedup_ci95"] == pytest.approx((2.0, 2.0))
    low, high = speed.summarize(timings, seed=0)["speedup_ci95"]
    assert low < 1.9
    assert high > 2.1
    extra = speed.details(timings, seed=0, batch=2)
    # 60 tokens in 12 s: a token of each of the two texts every 400 ms
    assert extra["plain_ms_per_token"] == pytest.approx(400.0)


def test_a_frame_of_two_texts_pays_earlier() -> None:
    """Plain, each of two texts gets 2.5 tokens a second; a round of 250 ms is worth 0.625."""
    record = RoundRecord(4, 4, 4, 5, 0, 0.0, 0.25, 0.0, (), (1.0,) * 4)
    plain = Generation(list(range(11)), "length", 1.0, 2.0)
    fast = Generation(list(range(11)), "length", 1.0, 0.25, [record] * 2)
    timings = [PromptTimings(3, [plain], [fast]) for _ in range(2)]
    assert speed.summarize(timings, seed=0, batch=2)["break_even"] == pytest.approx(0.625)
    # the same seconds, one after the other: 5 tokens a second are that text's own
    assert speed.summarize(timings, seed=0)["break_even"] == pytest.approx(1.25)


def test_a_step_of_texts_that_end_apart_is_a_step_of_all_seats() -> None:
    """10 steps of 0.4 s for a text of 11 tokens and one of 3, then 10 for one alone: 0.4 s each."""
    record = RoundRecord(4, 4, 4, 5, 0, 0.0, 0.8, 0.0, (), (1.0,) * 4)
    timings = [
        PromptTimings(
            3,
            [Generation(list(range(tokens)), "length", 1.0, seconds)],
            [Generation(list(range(tokens)), "length", 1.0, 1.0, [record])],
        )
        for tokens, seconds in ((11, 2.0), (3, 2.0), (11, 4.0))
    ]
    assert speed.summarize(timings, seed=0, batch=2)["break_even"] == pytest.approx(2.0)
    extra = speed.details(timings, seed=0, batch=2)
    assert extra["plain_ms_per_token"] == pytest.approx(400.0)


# ------------------------------------------------------------------ policies and their times


def test_policies_go_by_the_times_of_frames(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = replace(pair, draft=tmp_path / "draft")
    write_pair(tmp_path)
    document = run_bench(options(own, policy="throughput", profile=True))
    assert document["policy"] == "throughput"
    assert document["greedy_mismatches"] == 0
    written = json.loads((own.draft / "frame_costs.json").read_text())
    assert not (own.draft / "cost_model.json").exists()  # those are of other rounds
    model = cost_model_from_dict(written)
    (costs,) = model.batches
    assert sorted(costs.verify) == [1, 2, 3, BLOCK_SIZE + 1]
    assert model.round_s(BLOCK_SIZE, 3) == costs.verify[3] > 0
    assert costs.plain == costs.verify[1]
    print_bench([document])
    assert f"frame times, batch 1: plain {1e3 * costs.plain:.2f} ms" in capsys.readouterr().out
    told = cost_section("frame_costs.json", written).blocks[0]
    assert isinstance(told, Prose)
    assert "Medians of unrecorded frames" in told.text
    again = run_bench(options(own, policy="auto"))
    assert again["extra"]["graphs"]["sizes"][0] == 0  # plain frames among drafts
    assert again["greedy_mismatches"] == 0
    assert not any("measured" in text for text in again["extra"]["warnings"])
    file = own.draft / "frame_costs.json"
    wider = run_bench(options(own, policy="throughput", batch=2))
    assert any("measured with a batch of 1;" in text for text in wider["extra"]["warnings"])
    eager = run_bench(options(own, policy="throughput", graphs=False, cost_model=file))
    assert any("of recorded frames" in text for text in eager["extra"]["warnings"])


def test_the_folder_of_step_times_is_made_before_they_are_measured(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be made is said before the long work, and not behind it."""

    def begin(*given: object) -> None:
        assert (tmp_path / "new").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench_pair", begin)
    with pytest.raises(KeyboardInterrupt):
        run_bench(options(pair, profile=True, cost_model=tmp_path / "new" / "costs.json"))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--graphs", "--verification", "block"], "--verification block: recorded frames do not"),
        (["--graphs", "--relaxed"], "--relaxed: recorded frames do not"),
        (["--graphs", "--bands"], "--bands: recorded frames do not"),
        (["--graphs", "--policy", "throughput"], "`dspark bench --graphs --profile`"),
        (["--graphs", "--batch", "0"], "--batch: expected 1 or more"),
        (["--batch", "2"], "--batch: expected 1, or --graphs"),
        (["--graphs", "--batch", "2", "--peer"], "--peer: decodes one prompt at a time"),
    ],
)
def test_what_frames_cannot_do_is_one_line_and_exit_code_2(
    pair: TinyPair,
    asked: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "say_if_busy", lambda: None)  # this machine may well be
    words = ["bench", "--target", pair.target, "--draft", pair.draft, "--prompts", pair.prompts]
    code = console.run(cli.app, [*map(str, words), *asked])
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_batch_and_a_wrong_one_are_named() -> None:
    with pytest.raises(UserError, match="--batch"):
        BenchOptions(draft="runs/mine", batch=2)
    assert BenchOptions(draft="runs/mine", batch=2, graphs=True).batch == 2
