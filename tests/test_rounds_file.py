"""`dspark eval --rounds`: the figures of eval.json come out of the lines again."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console
from dspark.errors import UserError
from dspark_eval import acceptance
from dspark_eval.acceptance import run_eval
from dspark_eval.profiles import CONTEXT_EDGES
from dspark_eval.rounds_file import RoundsFile
from dspark_eval.settings import EvalOptions
from tests.tiny_pair import TinyPair, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    made = write_pair(tmp_path_factory.mktemp("pair"))
    chats = [{"turns": ["Let me think.", "Go on."], "id": "a"}, {"prompt": "Why?", "id": "b"}]
    lines = "".join(json.dumps(row) + "\n" for row in chats)
    made.prompts.with_name("chats.jsonl").write_text(lines, encoding="utf-8")
    return made


def options(pair: TinyPair, rounds: Path) -> EvalOptions:
    return EvalOptions(
        draft=pair.draft,
        target=pair.target,
        suites=(str(pair.prompts), str(pair.prompts.with_name("chats.jsonl"))),
        temperature=1.0,
        max_new_tokens=12,
        rounds=rounds,
        quiet=True,
    )


def test_figures_come_out_of_the_lines_again(pair: TinyPair, tmp_path: Path) -> None:
    """By the formulas alone: survival, accepted length, draft share, and rounds of each prompt."""
    document = run_eval(options(pair, tmp_path / "new" / "rounds.jsonl"))
    text = (tmp_path / "new" / "rounds.jsonl").read_text(encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in text.splitlines():
        entry = json.loads(line)
        found[entry["suite"]].append(entry)
    assert list(found) == list(document["suites"]) == ["prompts", "chats"]
    for name, rounds in found.items():
        suite = document["suites"][name]
        assert len(rounds) == suite["n_rounds"]
        emitted = sum(r["emitted"] for r in rounds)
        assert emitted / len(rounds) == pytest.approx(suite["accepted_length"], rel=1e-12)
        longest = max(r["verified"] for r in rounds)
        survival = [
            sum(r["accepted"] >= j for r in rounds) / sum(r["verified"] >= j for r in rounds)
            for j in range(1, longest + 1)
        ]
        assert survival == pytest.approx(suite["prefix_survival"])
        seconds = sum(r["draft_s"] + r["verify_s"] + r["other_s"] for r in rounds)
        share = sum(r["draft_s"] for r in rounds) / seconds
        assert share == pytest.approx(suite["draft_share"])
        by_prompt = [sum(r["prompt"] == i for r in rounds) for i in range(suite["n_prompts"])]
        assert by_prompt == suite["rounds"]
        assert all(len(r["confidence"]) == len(r["entropy"]) == r["drafted"] for r in rounds)
    assert {(r["id"], r["turn"]) for r in found["chats"]} <= {("a", 0), ("a", 1), ("b", 0)}
    assert {r["id"] for r in found["prompts"]} == {None}
    first = [r["round"] for r in found["chats"] if (r["prompt"], r["turn"]) == (0, 0)]
    assert first == list(range(len(first)))


def test_context_buckets_come_out_of_the_lines_again(pair: TinyPair, tmp_path: Path) -> None:
    """By `context` alone; answers that cross an edge, where the prompt's length gives others."""
    prompts = [{"prompt": "a 7 " * n} for n in range(47, 54)]
    chats = tmp_path / "edge.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
    asked = replace(options(pair, tmp_path / "rounds.jsonl"), suites=(str(chats),))
    document = run_eval(asked)
    text = (tmp_path / "rounds.jsonl").read_text(encoding="utf-8")
    rounds = [json.loads(line) for line in text.splitlines()]

    def buckets(key: str) -> list[tuple[int, int, float]]:
        own: dict[int, list[int]] = defaultdict(list)
        for entry in rounds:
            own[max(e for e in (0, *CONTEXT_EDGES) if e <= entry[key])].append(entry["emitted"])
        return [(low, len(e), sum(e) / len(e)) for low, e in sorted(own.items())]

    found = document["suites"]["edge"]["context_buckets"]
    assert buckets("context") == [(b["low"], b["rounds"], b["accepted_length"]) for b in found]
    assert buckets("context") != buckets("prompt_tokens")
    for entry in rounds:
        assert (entry["context"] == entry["prompt_tokens"]) == (entry["round"] == 0)


def test_every_key_of_a_round_is_defined(pair: TinyPair, tmp_path: Path) -> None:
    run_eval(options(pair, tmp_path / "rounds.jsonl"))
    keys = set(json.loads((tmp_path / "rounds.jsonl").read_text("utf-8").splitlines()[0]))
    page = (Path(__file__).parents[1] / "eval" / "README.md").read_text("utf-8")
    rows = page.split("| key of a round | |")[1].split("\n\n")[0].splitlines()[2:]
    assert keys == {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_a_place_that_cannot_be_written_is_refused_first(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--rounds .*: expected a file; this is a folder"):
        options(pair, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--rounds: .*file is a file; a folder is needed there"):
        options(pair, tmp_path / "file" / "rounds.jsonl")
    asked = options(pair, tmp_path / "closed" / "rounds.jsonl")
    monkeypatch.setattr(acceptance, "eval_pair", lambda *a: pytest.fail("something is measured"))
    monkeypatch.setattr("os.access", lambda path, mode: "closed" not in str(path))
    with pytest.raises(UserError, match=r"--rounds .*closed.*: cannot be written"):
        run_eval(asked)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="Linux has /proc")
def test_proc_takes_no_rounds_and_says_so_before_measuring(
    pair: TinyPair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "eval_pair", lambda *a: pytest.fail("something is measured"))
    words = ["eval", "--draft", pair.draft, "--target", pair.target, "--rounds", "/proc/x"]
    assert console.run(cli.app, list(map(str, words))) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: --rounds /proc/x: cannot be written")
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_a_disk_that_fills_up_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"^--rounds .*r\.jsonl: cannot be written \(No space left"):
        RoundsFile(["{}"]).write(tmp_path / "r.jsonl")


@pytest.mark.parametrize("compare", [False, True])
def test_an_interrupted_run_leaves_no_empty_folder(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compare: bool
) -> None:
    def interrupted(*given: object) -> None:
        assert (tmp_path / "new" / "out").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(acceptance, "eval_pair", interrupted)
    monkeypatch.setattr("dspark_eval.compare.compare_all", interrupted)
    ways = (
        ["--compare", pair.draft, "lookup"]
        if compare
        else ["--draft", pair.draft, "--rounds", tmp_path / "rounds" / "r.jsonl"]
    )
    words = ["eval", *ways, "--target", pair.target, "--out", tmp_path / "new" / "out"]
    assert console.run(cli.app, list(map(str, words))) == 130
    assert list(tmp_path.iterdir()) == []


def test_rounds_are_of_one_drafter(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--compare", "lookup", str(pair.draft), "--rounds", str(tmp_path / "r.jsonl")]
    assert console.run(cli.app, words) == 2
    assert "--rounds: means something for one drafter alone" in capsys.readouterr().err
