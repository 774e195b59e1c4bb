"""`dspark data`: what it counts and shows is what a distillation would do with the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark import cli, console
from dspark.distill.chat import ChatFormat, TrainingRow, printable
from dspark.distill.responses import ResponseSettings, build_rows
from dspark.distill.review import anchor_count, review_files, sample, spread
from dspark.draft.anchors import sample_anchors
from dspark.runtime.loading import load_target, load_tokenizer

Run = Callable[..., tuple[int, str, str]]
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "The answer is 4."}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str | Path) -> tuple[int, str, str]:
        code = console.run(cli.app, [str(arg) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return write(
        tmp_path / "mixed.jsonl",
        {"messages": [USER, ANSWER], "id": 1},
        {"prompt": "Name a number.", "id": 1},
        "{torn",
        {"prompt": ""},
        {"messages": [USER, {"role": "assistant", "content": "4<|end_of_msg|>"}]},
        {"prompt": "long " * 400},
        {"messages": [USER, {"role": "assistant", "content": "word " * 400}]},
        {"messages": [{"role": "user", "content": "long " * 400}, ANSWER]},
    )


def test_check_counts_every_line_once(run: Run, mixed: Path) -> None:
    code, out, err = run("data", "check", mixed, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    (file,) = found["files"]
    lines = {
        reason: [int(at.rpartition(":")[2]) for at in entry["lines"]]
        for reason, entry in (*file["skipped"].items(), *file["dropped"].items())
    }
    assert lines == {
        "not-json": [3],
        "empty-prompt": [4],
        "marker-in-text": [5],
        "prompt-too-long": [6],
        "too-few-supervised": [8],
    }
    assert found["bad"] == file["bad"] == 5
    assert (file["read"], file["kept"]) == (8, 6)
    assert (file["rows"], file["prompts_to_answer"], file["cut"]) == (2, 1, 1)
    assert file["noted"]["repeated-id"]["count"] == 1
    assert file["row_tokens"]["max"] == 320
    assert 0 < file["supervised_share"] < 1


def test_check_agrees_with_the_rows_of_a_distillation(mixed: Path) -> None:
    loaded = load_target("nano")
    settings = ResponseSettings(
        responses="given", max_length=320, min_supervised=4, max_new_tokens=4
    )
    _, (review,) = review_files([mixed], loaded.tokenizer, settings)
    rows = build_rows(loaded.target, loaded.tokenizer, review.prompts.rows, settings)
    assert tuple(row for row in rows.rows if row.provenance == "given") == review.answered
    assert rows.dropped == review.dropped
    assert rows.cut == review.cut
    (answered,) = (row for row in rows.rows if row.provenance == "target")
    ((prompt, ids),) = review.asked
    assert answered.line == prompt.line
    assert answered.ids[: len(ids)] == ids


def test_check_says_in_words_what_json_says(run: Run, mixed: Path) -> None:
    code, out, _ = run("data", "check", mixed)
    assert code == 0
    assert f"{mixed}: 8 rows read, 6 kept, 2 skipped" in out
    for line in (
        "1 skipped, not-json: the line is not JSON",
        "1 dropped, marker-in-text",
        "1 dropped, prompt-too-long",
        "1 with an id that an earlier line of the file has",
        "2 rows with answers",
        "1 cut at the end",
        "1 prompt for the target",
    ):
        assert line in out


def test_strict_exits_with_two_after_the_report(run: Run, mixed: Path, tmp_path: Path) -> None:
    code, out, err = run("data", "check", mixed, "--strict")
    assert code == 2
    assert "8 rows read" in out
    assert err == "error: 5 bad lines and rows; --strict accepts none\n"
    clean = write(tmp_path / "clean.jsonl", {"messages": [USER, ANSWER]}, {"prompt": "x"})
    assert run("data", "check", clean, "--strict")[0] == 0


def test_several_files_are_bare_arguments(run: Run, mixed: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", {"prompt": "x"})
    code, out, _ = run("data", "check", mixed, other, "--target", "nano", "--json")
    assert code == 0
    assert [file["file"] for file in json.loads(out)["files"]] == [str(mixed), str(other)]


def test_questions_that_are_measured_on_are_bad(run: Run, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", {"prompt": "2+2?"}, {"prompt": "3+3?"})
    test = write(tmp_path / "test.jsonl", {"messages": [{**USER, "content": " 2+2? "}]})
    code, out, err = run("data", "check", train, "--against", test, "--strict")
    assert code == 2
    assert f"1 ask what the other files ask too ({train}:1)" in out
    assert "1 bad" in err
    assert run("data", "check", test, "--strict")[0] == 0


@pytest.mark.parametrize("command", ["check", "inspect"])
def test_wrong_input_is_one_line(run: Run, mixed: Path, tmp_path: Path, command: str) -> None:
    nothing = write(tmp_path / "nothing.jsonl", "nope")
    for args, said in (
        ((tmp_path / "absent",), "cannot be read"),
        ((), "Missing argument"),
        ((mixed, "--target", "nowhere"), "no such target"),
        ((mixed, "--thinking", "maybe"), "expected off, on, both"),
        ((mixed, "--thinking", "on"), "no thinking switch"),
        ((mixed, "--template", "absent"), "no such file; expected one, or a shipped name"),
        ((mixed, "--max-length", "3"), "max_length is 3"),
        ((nothing,), "no "),
    ):
        code, _, err = run("data", command, *args)
        assert code == 2, args
        assert said in err
        assert err.count("\n") == 1


def test_a_file_of_answers_without_contrast_stops(run: Run, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    file = write(tmp_path / "f.jsonl", {"messages": [USER, ANSWER]})
    hides = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    template.write_text(hides)
    code, _, err = run("data", "check", file, "--template", template)
    assert code == 2
    assert f"{file}:1: 0 % of the tokens of this file are supervised" in err
    template.write_text("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}")
    code, _, err = run("data", "check", file, "--template", template)
    assert code == 2
    assert "100 % of the tokens" in err


def test_inspect_shows_supervised_text_between_marks_in_a_pipe(run: Run, mixed: Path) -> None:
    code, out, _ = run("data", "inspect", mixed, "--rows", "2")
    assert code == 0
    assert f"{mixed}:1  " in out
    assert "⟦The answer is 4.<|end_of_msg|>⟧" in out
    assert "2 rows with answers, 1 prompt, 2 lines skipped, 3 rows dropped" in out
    assert run("data", "inspect", mixed, "--rows", "0")[0] == 2


def test_inspect_as_json_is_the_row_itself(run: Run, mixed: Path) -> None:
    code, out, _ = run("data", "inspect", mixed, "--rows", "9", "--json")
    assert code == 0
    (file,) = json.loads(out)["files"]
    assert (file["file"], file["answered"], file["asked"], file["bad"]) == (str(mixed), 2, 1, 5)
    tokenizer, _ = load_tokenizer("nano")
    chat = ChatFormat(tokenizer)
    for row in file["rows"]:
        assert len(row["ids"]) == row["tokens"]
        assert "".join(span["text"] for span in row["spans"]) == chat.decode(row["ids"])
        supervised = [span["text"] for span in row["spans"] if span["supervised"]]
        assert bool(supervised) == (row["supervised"] > 0) == (row["anchors"] > 0)
    assert file["rows"][0]["line"] == 1
    (text,) = [s["text"] for s in file["rows"][0]["spans"] if s["supervised"]]
    assert text == "The answer is 4.<|end_of_msg|>"


def test_inspect_colours_supervised_text_on_a_terminal(
    run: Run, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = run("data", "inspect", mixed, "--rows", "1")
    assert "\x1b[7;32mThe answer is 4.<|end_of_msg|>\x1b[0m" in out
    assert "⟦" not in out


def test_prompts_without_answers_are_shown_as_the_target_sees_them(
    run: Run, tmp_path: Path
) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "hello"})
    _, out, _ = run("data", "inspect", file)
    tokenizer, _ = load_tokenizer("nano")
    chat = ChatFormat(tokenizer)
    assert "for the target to answer" in out
    assert chat.decode(chat.prompt_ids([{"role": "user", "content": "hello"}])) in out


def test_a_row_cannot_command_the_terminal(run: Run, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a\x1b[2Jb\x9b31m\x00 \n\tend\x7f"}
    file = write(tmp_path / "p.jsonl", {"messages": [USER, answer]})
    _, out, _ = run("data", "inspect", file)
    assert not {"\x1b", "\x9b", "\x00"} & set(out)
    assert "a␛[2Jb" in out
    assert printable("é\n\t ") == "é\n\t "


def test_anchors_are_those_that_training_can_draw() -> None:
    import torch

    masks = [(False, True, True, True), (True,), (True, False, True, True), (False, False)]
    for mask in masks:
        row = TrainingRow(tuple(range(len(mask))), mask)
        drawn = sample_anchors(torch.tensor([mask]), 8, torch.Generator().manual_seed(0))
        assert anchor_count(row) == int(drawn.valid.sum())


def test_samples_are_spread_over_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *({"prompt": f"q {i}"} for i in range(10)))
    tokenizer, _ = load_tokenizer("nano")
    _, (review,) = review_files([file], tokenizer, ResponseSettings())
    assert [row.line for row in sample(review, 3)] == [1, 4, 7]
    assert len(sample(review, 99)) == 10
    assert spread([]) is None
    assert spread([3, 1, 2]) == {"min": 1, "median": 2, "max": 3}


@pytest.mark.parametrize("command", ["check", "inspect"])
def test_help_has_an_example(run: Run, command: str) -> None:
    code, out, _ = run("data", command, "--help")
    assert code == 0
    assert f"Example: dspark data {command}" in " ".join(out.split())
