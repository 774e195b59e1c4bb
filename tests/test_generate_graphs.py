"""`dspark generate --graphs`: the same greedy text, token by token as frames bring it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console
from dspark.generation.reader import Reader
from dspark.runtime.records import Emitted
from tests import chat_tokenizers, generate_setup, tiny_pair
from tests.generate_setup import QUESTION, Run
from tests.hf_tiny import tiny_hf

pair, run = generate_setup.pair, generate_setup.run
document = generate_setup.document
Document = Callable[..., dict[str, Any]]

NOTE = "note: --graphs: this device records no frames; unrecorded ones ran\n"


@pytest.fixture
def framed(run: Run, pair: tiny_pair.TinyPair) -> Document:
    """The JSON document of a run with frames, which on a CPU says that none was recorded."""

    def call(*args: str) -> dict[str, Any]:
        drafter = [] if "--plain" in args else ["--draft", pair.draft]
        words = [QUESTION, "--json", "--graphs", "--max-new-tokens", "24", *args, *drafter]
        code, out, err = run(*words)
        assert (code, err) == (0, NOTE)
        return dict(json.loads(out))

    return call


@pytest.mark.parametrize(
    "asked",
    [[], ["--plain"], ["--draft-length", "2"], ["--policy", "entropy"], ["--policy", "auto"]],
)
def test_frames_change_no_greedy_text(
    document: Document, framed: Document, asked: list[str]
) -> None:
    plain, fast = document("--plain"), framed(*asked)
    assert fast["tokens"] == plain["tokens"]
    assert fast["text"] == plain["text"]
    assert fast["finish"] == plain["finish"]
    assert [emitted["token"] for emitted in fast["emitted"]] == fast["tokens"]
    assert "".join(emitted["text"] for emitted in fast["emitted"]) == fast["text"]
    if asked != ["--plain"]:
        assert 1 + sum(record["emitted"] for record in fast["rounds"]) == len(fast["tokens"])


def test_the_document_says_that_nothing_was_recorded(document: Document, framed: Document) -> None:
    assert document()["graphs"] is None
    found = framed("--draft-length", "3")
    assert found["graphs"] == {"frames": "unrecorded", "sizes": [3]}
    assert framed("--plain")["graphs"] == {"frames": "unrecorded", "sizes": [0]}
    assert found["draft_share"] is None  # nobody knows in a frame
    for record in found["rounds"]:
        assert record["draft_s"] is record["verify_s"] is record["other_s"] is None
        assert record["frame_s"] > 0


def test_a_stop_string_ends_the_text_where_it_does_without_frames(
    document: Document, framed: Document
) -> None:
    free = document("--plain")
    middle = next(
        e["text"] for e in free["emitted"][8:] if e["text"].strip("\N{REPLACEMENT CHARACTER}")
    )
    cut, wanted = framed("--stop", middle), document("--plain", "--stop", middle)
    assert cut["finish"] == wanted["finish"] == "stop"
    for key in ("text", "tokens", "stop"):
        assert cut[key] == wanted[key]


def test_a_seed_repeats_a_sampled_text(framed: Document) -> None:
    def sampled(seed: int) -> list[int]:
        return list(framed("--temperature", "1", "--seed", str(seed))["tokens"])

    assert sampled(1) == sampled(1) != sampled(2)


def test_marks_table_and_picture(run: Run, pair: tiny_pair.TinyPair, tmp_path: Path) -> None:
    picture = tmp_path / "shown.svg"
    shown = ("--show-draft", "--stats", "--svg", picture, "--max-new-tokens", "12")
    code, out, err = run(QUESTION, "--draft", pair.draft, "--graphs", *shown)
    assert code == 0
    assert "corrected by the target" in out
    assert re.search(r"confidence, % +frame ms", err)
    assert "of the time drafting" not in err
    assert "--graphs" in picture.read_text().replace("&#45;", "-")


def test_text_comes_while_frames_run(
    run: Run, pair: tiny_pair.TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C behind the fourth frame keeps what four frames said."""
    read, rounds = Reader.read, []

    def interrupting(self: Reader, emitted: Sequence[Emitted]) -> None:
        read(self, emitted)
        rounds.append(self.text)
        if len(rounds) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Reader, "read", interrupting)
    code, out, _ = run(QUESTION, "--draft", pair.draft, "--graphs")
    assert code == 130
    assert out.startswith(rounds[-1])
    assert len(rounds) == 4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--verification", "block"], "--verification block: recorded frames do not"),
        (["--min-new-tokens", "3"], "--min-new-tokens: recorded frames do not"),
        (["--logit-bias", "7:1"], "--logit-bias: recorded frames do not"),
        (["--repetition-penalty", "1.5"], "--repetition-penalty: recorded frames do not"),
        (["--no-repeat-ngram", "3"], "--no-repeat-ngram: recorded frames do not"),
        (["--siblings", "2"], "--siblings: recorded frames do not"),
        (["--siblings", "0"], "--siblings: recorded frames do not"),
        (["--bands"], "--bands: recorded frames do not"),
        (["--policy", "throughput"], "`dspark bench --graphs --profile`"),
        (["--max-new-tokens", f"{10**30}"], f"--max-new-tokens {10**30}: target"),
        (["--max-new-tokens", f"{10**9}"], f"--max-new-tokens {10**9}: target"),
        (["--draft-length", "99"], "--draft-length 99: this drafter was trained with block size"),
    ],
)
def test_what_frames_cannot_do_is_one_line_and_exit_code_2(
    run: Run, pair: tiny_pair.TinyPair, asked: list[str], said: str
) -> None:
    code, out, err = run(QUESTION, "--draft", pair.draft, "--graphs", *asked)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_settings_beyond_what_a_number_holds_sample_all_the_same(
    run: Run, pair: tiny_pair.TinyPair
) -> None:
    """Above float32 every token is as likely as another; below it the best one stays."""
    words = [QUESTION, "--draft", pair.draft, "--graphs", "--max-new-tokens", "9"]
    best = run(*words)[1]
    wide = ("--temperature", "1e39", "--top-k", f"{10**30}")
    assert run(*words, *wide)[0] == 0
    for narrow in (("1e-320", "1"), ("1e39", "5e-324")):
        assert run(*words, "--temperature", narrow[0], "--top-p", narrow[1])[1] == best


def test_the_times_of_frames_are_read_and_not_those_of_other_rounds(
    run: Run, pair: tiny_pair.TinyPair, tmp_path: Path
) -> None:
    own = tiny_pair.write_pair(tmp_path)
    costs = {
        "kind": "dspark cost model", "schema_version": 1, "target": "t", "drafter": "d",
        "context_tokens": 9, "batches": [
            {"batch": 1, "plain_s": 1.0, "draft_s": {"1": 0.0}, "verify_s": {"1": 1.0, "5": 2.0},
             "other_s": 0.0}
        ],
    }  # fmt: skip
    asked = (QUESTION, "--draft", own.draft, "--policy", "throughput", "--max-new-tokens", "4")
    (own.draft / "cost_model.json").write_text(json.dumps(costs))
    assert run(*asked)[0] == 0
    assert run(*asked, "--graphs")[0] == 2
    (own.draft / "frame_costs.json").write_text(json.dumps(costs))
    assert run(*asked, "--graphs")[0] == 0


def _write_hf(folder: Path, name: str) -> Path:
    """A tiny model of transformers with a chat template, as a target's folder."""
    tokenizer, model = chat_tokenizers.smollm2(), tiny_hf(name)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_target_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = _write_hf(tmp_path / "llama", "llama")
    words = ["generate", QUESTION, "--plain", "--json", "--target", str(target)]
    found = []
    for more in ([], ["--graphs"]):
        assert console.run(cli.app, [*words, "--max-new-tokens", "16", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"]
    assert len(set(found[0]["tokens"])) > 3
    assert found[1]["graphs"] == {"frames": "unrecorded", "sizes": [0]}


def test_a_target_whose_frames_cannot_be_recorded_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = _write_hf(tmp_path / "lfm2", "lfm2")
    words = ["generate", QUESTION, "--plain", "--target", str(target), "--max-new-tokens", "4"]
    assert console.run(cli.app, words) == 0
    capsys.readouterr()
    assert console.run(cli.app, [*words, "--graphs"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "cannot be recorded" in shown.err
    assert shown.err.endswith("leave --graphs out\n")
