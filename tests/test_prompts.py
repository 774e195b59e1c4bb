"""Prompt files: what is kept, what is skipped under which name, what is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.distill.messages import SKIP_REASONS, replace_surrogates
from dspark.distill.prompts import PromptSet, read_prompts
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


UNUSABLE = [
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


def test_every_reason_has_an_input() -> None:
    assert {reason for _, reason in UNUSABLE} == set(SKIP_REASONS)


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
    rows[40] = {"messages": [{"role": "user", "content": parts}], "tools": [{"name": "f"}]}
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b"prompt: a", "not JSON"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not JSON"),  # a mark belongs to the file's start
        (b'{"prompt": "a\x00b"}', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "JSON that cannot be read"),
        (b"[" * 200_000, "JSON that cannot be read"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_line_that_is_not_json_is_one_error_with_its_line(
    tmp_path: Path, line: bytes, expected: str, strict: bool
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        read_prompts([path], strict=strict)
    assert str(caught.value).startswith(f"{path}:3: {expected}")
    assert "\n" not in str(caught.value)


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
