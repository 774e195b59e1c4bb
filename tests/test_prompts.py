"""Prompt files: what is kept, what is skipped under which name, what is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.distill.messages import SKIP_REASONS, replace_surrogates
from dspark.distill.prompts import (
    LONGEST_LINE,
    PromptSet,
    read_prompts,
    scan_prompts,
    shared_questions,
)
from dspark.distill.report import NOTES
from dspark.errors import UserError

USER = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "reply"}
SYSTEM = {"role": "system", "content": "be brief"}


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(tmp_path: Path, *rows: object) -> PromptSet:
    return read_prompts([write(tmp_path / "p.jsonl", list(rows))])


def test_the_three_forms_become_conversations(tmp_path: Path) -> None:
    prompts = read(
        tmp_path,
        {"prompt": "a", "id": 7, "answer": "12", "family": "ages", "extra": {"deep": [1]}},
        {"turns": ["b", "later"]},
        {"messages": [SYSTEM, USER, ANSWER], "prompt": None, "id": ["not", "a", "scalar"]},
    )
    first, second, third = prompts.rows
    assert first.messages == ({"role": "user", "content": "a"},)
    assert first.metadata == {"id": 7, "answer": "12", "family": "ages"}
    assert (first.line, second.line, third.line) == (1, 2, 3)
    assert second.messages == ({"role": "user", "content": "b"},)
    assert prompts.report.later_turns == 1
    assert third.has_response
    assert third.prompt == (SYSTEM, USER)
    assert third.metadata == {}
    assert not first.has_response
    assert first.prompt == first.messages


UNUSABLE: list[tuple[object, str]] = [
    ([], "not-an-object"),
    ("text", "not-an-object"),
    ({"id": 1}, "no-prompt"),
    ({"prompt": None}, "no-prompt"),
    ({"prompt": "a", "messages": [USER]}, "several-forms"),
    ({"id": 1, "text": "<|im_start|>user\nhi<|im_end|>"}, "text-form"),
    ({"messages": []}, "empty-conversation"),
    ({"turns": []}, "empty-conversation"),
    ({"prompt": " \n"}, "empty-prompt"),
    ({"turns": [""]}, "empty-prompt"),
    ({"messages": [SYSTEM]}, "system-only"),
    ({"messages": [ANSWER, USER]}, "assistant-first"),
    ({"messages": [SYSTEM, ANSWER]}, "assistant-first"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty-assistant"),
    ({"messages": [USER, USER, ANSWER]}, "adjacent-user"),
    ({"messages": [USER, ANSWER, ANSWER]}, "adjacent-assistant"),
    ({"messages": [USER, SYSTEM]}, "misplaced-system"),
    ({"messages": [{"role": "human", "content": "x"}]}, "unknown-role"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "tool-use"),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f"}]}]}, "tool-use"),
    ({"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, "tool-use"),
    ({"prompt": "a", "functions": [{"name": "f"}]}, "tool-use"),
    ({"messages": ["hi"]}, "bad-message"),
    ({"messages": [{"content": "x"}]}, "bad-message"),
    ({"messages": {"role": "user"}}, "bad-message"),
    ({"messages": [{"role": "user"}]}, "bad-content"),
    ({"prompt": 5}, "bad-content"),
    ({"turns": "one"}, "bad-content"),
    ({"turns": ["one", 2]}, "bad-content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]},
        "unsupported-part",
    ),
]


UNREADABLE = [
    (b'{"prompt": "a"', "not-json", "Expecting ',' delimiter, column 15"),
    (b"prompt: a", "not-json", "Expecting value, column 1"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "not-json", "Unexpected UTF-8 BOM"),  # not the file's start
    (b'{"prompt": "a\x00b"}', "not-json", "Invalid control character"),
    (b'{"prompt": "\xff"}', "not-utf8", "byte 13 of the line"),
    (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "not-json", "Exceeds the limit"),
    (b"[" * 200_000, "not-json", "recursion"),
    (b'{"prompt": "' + b"a" * LONGEST_LINE + b'"}', "line-too-long", ""),
]


def test_every_reason_has_an_input() -> None:
    found = {reason for _, reason in UNUSABLE} | {reason for _, reason, _ in UNREADABLE}
    assert found == set(SKIP_REASONS)


@pytest.mark.parametrize(("row", "reason"), UNUSABLE)
def test_unusable_rows_are_counted_under_their_own_reason(
    tmp_path: Path, row: object, reason: str
) -> None:
    prompts = read(tmp_path, {"prompt": "before"}, row, {"prompt": "after"})
    assert [item.messages[0]["content"] for item in prompts.rows] == ["before", "after"]
    assert [(item.line, item.reason) for item in prompts.report.skipped] == [(2, reason)]
    assert f"1 skipped, {reason}" in prompts.report.summary()


@pytest.mark.parametrize(("row", "reason"), UNUSABLE)
def test_strict_turns_the_first_unusable_row_into_an_error(
    tmp_path: Path, row: object, reason: str
) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "before"}, row])
    with pytest.raises(UserError) as caught:
        read_prompts([path], strict=True)
    assert str(caught.value).startswith(f"{path}:2: {SKIP_REASONS[reason]}")
    assert "\n" not in str(caught.value)


def test_three_bad_rows_in_a_thousand_do_not_stop_the_job(tmp_path: Path) -> None:
    rows: list[object] = [{"messages": [USER, ANSWER]} for _ in range(1000)]
    rows[9] = {"messages": [USER, ANSWER, ANSWER]}
    rows[499] = {"messages": [USER, USER]}
    rows[999] = {"messages": [{"role": "narrator", "content": "x"}]}
    report = read(tmp_path, *rows).report
    assert (report.read, report.kept) == (1000, 997)
    lines = {reason: [at.line for at in found] for reason, found in report.by_reason().items()}
    assert lines == {"adjacent-user": [500], "adjacent-assistant": [10], "unknown-role": [1000]}
    assert "p.jsonl:1000" in report.summary()


def test_long_lists_of_lines_are_cut_in_the_summary(tmp_path: Path) -> None:
    rows = [{"messages": []} for _ in range(20)]
    summary = read(tmp_path, {"prompt": "a"}, *rows).report.summary()
    assert "2, 3, 4, 5, 6, 7, 8, 9 and 12 more" in summary


def test_mixed_types_and_late_fields_do_not_matter(tmp_path: Path) -> None:
    rows: list[object] = [{"id": i, "prompt": "a"} for i in range(50)]
    rows[30] = {"id": "thirty", "prompt": "a"}
    parts = [{"type": "text", "text": "one "}, "two ", {"text": "three"}]
    rows[40] = {"messages": [{"role": "user", "content": parts}], "tools": [], "x": [{}]}
    prompts = read(tmp_path, *rows)
    assert len(prompts.rows) == 50
    assert prompts.rows[30].metadata["id"] == "thirty"
    assert prompts.rows[40].messages[0]["content"] == "one two three"


@pytest.mark.parametrize(
    "text", ["2024-05-01", "2024-05-01T10:00:00Z", "42", "1e3", "null", "0x1F"]
)
def test_strings_stay_strings(tmp_path: Path, text: str) -> None:
    rows = [{"messages": [USER, {"role": "assistant", "content": text}]}] * 3
    for row in read(tmp_path, *rows).rows:
        assert row.messages[1]["content"] == text


def test_bom_crlf_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}\r\n{"prompt": "c"}')
    rows = read_prompts([path]).rows
    assert [(row.messages[0]["content"], row.line) for row in rows] == [
        ("a", 1),
        ("b", 4),
        ("c", 5),
    ]


UNICODE = "emoji 👩‍🚀 nul \x00 rtl \u202eabc\u202c line\u2028sep nbsp\u00a0 é e\u0301"


@pytest.mark.parametrize("ascii_only", [True, False])
def test_unusual_characters_round_trip(tmp_path: Path, ascii_only: bool) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": UNICODE}, ensure_ascii=ascii_only), encoding="utf-8")
    prompts = read_prompts([path])
    assert prompts.rows[0].messages[0]["content"] == UNICODE
    assert prompts.report.repaired == ()


def test_lone_surrogates_become_replacement_characters_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a \\ud83d b \\ude00", "id": "\\udfff"}\n{"prompt": "\\ud83d\\ude00"}\n'
        '{"messages": [{"role": "user", "content": "q"},'
        ' {"role": "assistant", "content": "r", "reasoning_content": "\\ud800"}]}\n'
    )
    prompts = read_prompts([path])
    assert prompts.rows[0].messages[0]["content"] == "a \ufffd b \ufffd"
    assert prompts.rows[0].metadata["id"] == "\ufffd"
    assert prompts.rows[1].messages[0]["content"] == "😀"
    assert prompts.rows[2].messages[1]["reasoning_content"] == "\ufffd"
    assert [line for _, line in prompts.report.repaired] == [1, 3]
    assert "2 with lone surrogates" in prompts.report.summary()


@given(st.text(st.characters(exclude_categories=())))
def test_repaired_text_is_always_utf8(text: str) -> None:
    fixed, count = replace_surrogates(text)
    assert fixed.encode("utf-8").decode("utf-8") == fixed
    assert len(fixed) == len(text)
    assert count == sum("\ud800" <= c <= "\udfff" for c in text)
    assert [a for a, b in zip(fixed, text, strict=True) if a != b] == ["\ufffd"] * count


@pytest.mark.parametrize(("line", "reason", "detail"), UNREADABLE)
def test_a_line_that_cannot_be_read_is_counted_and_strict_refuses_it(
    tmp_path: Path, line: bytes, reason: str, detail: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b'\n{"prompt": "after"}\n')
    prompts = read_prompts([path])
    assert [row.line for row in prompts.rows] == [1, 4]
    (skipped,) = prompts.report.skipped
    assert (skipped.line, skipped.reason) == (3, reason)
    assert detail in skipped.detail
    assert f"1 skipped, {reason}: {SKIP_REASONS[reason]} ({path}:3" in prompts.report.summary()
    with pytest.raises(UserError) as caught:
        read_prompts([path], strict=True)
    assert str(caught.value).startswith(f"{path}:3: {SKIP_REASONS[reason]}")
    assert detail in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_longest_line_is_counted_with_its_end_and_what_follows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.distill.prompts.LONGEST_LINE", 40)
    just = json.dumps({"prompt": "x" * 25}).encode()
    path = tmp_path / "p.jsonl"
    assert len(just) + len(b"\n") == 40
    for length in (40, 41, 80, 81, 82, 83, 100):
        long = b"y" * length + b"\n"
        path.write_bytes(just + b"\n" + long + just + b"\n" + long.rstrip(b"\n") + b"z")
        report = read_prompts([path]).report
        assert [(at.line, at.reason) for at in report.skipped] == [
            (2, "line-too-long"),
            (4, "line-too-long"),
        ]
        assert report.kept == 2


def test_a_file_of_another_kind_is_one_line_that_says_why(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    for content, said in (
        ("[\n" + '{"prompt": "a"},\n' * 2 + "]\n", "4 skipped, not-json"),
        ('[{"prompt": "a"}, {"prompt": "b"}]', "1 skipped, not-an-object"),
        ("prompt,answer\na,b\n", "first: Expecting value, column 1"),
        ('{"prompt": "a"}\n'.encode("utf-16").decode("latin-1"), "not-utf8"),
    ):
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match="no usable prompt") as caught:
            read_prompts([path])
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_changes_no_row_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "What is  2+2?", "id": 1},
        {"prompt": "what is 2+2?", "id": "1"},
        {"turns": ["other", "later"], "id": 1},
        {"messages": [USER, ANSWER], "id": None},
        {"messages": [USER], "answer": "x"},
    ]
    text = "\r\n".join(json.dumps(line) for line in lines)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    report = read_prompts([path, write(tmp_path / "q.jsonl", [{"prompt": "z", "id": 1}])]).report
    assert {note: [line for _, line in places] for note, places in report.noted.items()} == {
        "later-turns": [3],
        "repeated-id": [3],  # a text is not a number, and another file may count from 1 again
        "repeated-question": [2, 5],  # the answer is not the question
        "byte-order-mark": [1],
        "crlf": [1, 2, 3, 4],
    }
    assert set(report.noted) | {"lone-surrogates"} == set(NOTES)
    assert (report.kept, report.skipped) == (6, ())
    assert "4 end in CRLF" in report.summary()
    assert report.to_dict()["noted"]["crlf"]["count"] == 4


def test_questions_in_two_files_are_found_whatever_their_case_and_answers(tmp_path: Path) -> None:
    train = read(tmp_path, {"prompt": "a b"}, {"messages": [SYSTEM, USER, ANSWER]}, {"prompt": "c"})
    test = [{"messages": [{"role": "user", "content": " A  B"}]}, {"messages": [SYSTEM, USER]}]
    others = scan_prompts([write(tmp_path / "test.jsonl", test)]).rows
    assert [line for _, line in shared_questions(train.rows, others)] == [1, 2]
    assert shared_questions(train.rows, scan_prompts([]).rows) == ()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts([tmp_path / "absent.jsonl"])
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts([tmp_path])
    with pytest.raises(UserError, match="no usable prompt"):
        read_prompts([])
    (tmp_path / "empty.jsonl").write_bytes(b"\xef\xbb\xbf\n")
    with pytest.raises(UserError, match="no usable prompt"):
        read_prompts([tmp_path / "empty.jsonl"])


def test_a_file_of_formatted_text_says_that_the_form_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ready-formatted `text` is not supported"):
        read(tmp_path, {"id": 1, "text": "<s>hi</s>"}, {"id": 2, "text": "<s>ho</s>"})


def test_several_files_keep_their_order_and_names(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"messages": []}])
    b = write(tmp_path / "b.jsonl", [{"prompt": "2"}])
    prompts = read_prompts([b, a])
    assert [(row.file, row.line) for row in prompts.rows] == [(str(b), 1), (str(a), 1)]
    assert prompts.report.skipped[0].file == str(a)
