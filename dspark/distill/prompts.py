"""Prompt files: JSONL in, checked conversations out, every line accounted for.

One JSON object a line, with exactly one of

    {"prompt": "text"}                                  one user turn
    {"turns": ["first", "second"]}                      user turns; the first is the prompt
    {"messages": [{"role": ..., "content": ...}, ...]}  a conversation, answers included or not

Later ``turns`` need the target's own answers in between: they are no part of the conversation, but
kept in ``later_turns`` for whoever has those answers, and counted. ``METADATA_FIELDS`` are kept
when they are scalars; of the other fields only a declaration of ``tools`` counts, since it would
change what the target is shown. Strings stay strings: only the standard JSON reader touches them,
so a date or a quoted number arrives as it was written.

A line that is no usable conversation (see ``messages.py``) is skipped and counted with its reason
and place, or, with ``strict``, is an error. Files are read line by line: neither a large file nor
one without line breaks is ever held whole. Blank lines are nothing. What changes no row is noted:
CRLF line ends, a byte order mark at the start, an id or a question that occurs again (``report``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dspark.distill.messages import (
    Message,
    SkipRow,
    conversation,
    replace_surrogates,
    user_turn,
)
from dspark.distill.report import Places, ReadReport, Recorder
from dspark.errors import UserError

Scalar = str | int | float | bool
FORMS = ("prompt", "turns", "messages")
METADATA_FIELDS = ("id", "answer", "family", "setup", "tests", "entry_point")
TOOL_FIELDS = ("tools", "functions")
LONGEST_LINE = 16 << 20
"""Bytes. A longer line is a file of another format, or one that lost its line breaks."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PromptRow:
    """One usable line: where it stood, its conversation, and the scalars it carried along."""

    file: str
    line: int
    messages: tuple[Message, ...]
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    later_turns: tuple[str, ...] = ()
    """What the user asks next, once the target has answered."""

    @property
    def has_response(self) -> bool:
        """Whether the conversation ends in an assistant turn."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The conversation up to the last user turn: what the target is asked."""
        return self.messages[:-1] if self.has_response else self.messages

    @property
    def thinks(self) -> bool:
        """Whether an assistant turn carries reasoning: it was then written with thinking on."""
        return any(message.get("reasoning_content") for message in self.messages)

    @property
    def question(self) -> str:
        """The prompt's text without regard to case and white space, to find the same one again."""
        return "\x00".join(" ".join(turn["content"].casefold().split()) for turn in self.prompt)


@dataclass(frozen=True)
class PromptSet:
    """The usable rows of all files, in file order, and the report of the rest."""

    rows: tuple[PromptRow, ...]
    report: ReadReport


def read_prompts(files: Sequence[Path], *, strict: bool = False) -> PromptSet:
    """Read prompt files.

    Raises ``UserError`` for a file that cannot be read, the first unusable row when ``strict``, or
    when no usable row is left.
    """
    prompts = scan_prompts(files, strict=strict)
    if not prompts.rows:
        names = ", ".join(str(path) for path in files) or "no files were given"
        summary = "; ".join(line.strip() for line in prompts.report.summary().splitlines())
        raise UserError(f"{names}: no usable prompt; {summary}")
    return prompts


def scan_prompts(files: Sequence[Path], *, strict: bool = False) -> PromptSet:
    """``read_prompts`` for who wants to see the report even if nothing is usable."""
    rows: list[PromptRow] = []
    seen = Recorder()
    lines = ((str(path), *item) for path in files for item in _lines(Path(path), seen))
    for file, line, data in lines:
        try:
            row = _row(file, line, data, seen)
        except SkipRow as problem:
            if strict:
                message = f"{file}:{line}: {problem}; strict reading skips nothing"
                raise UserError(message) from None
            seen.skip(file, line, problem.reason, problem.detail)
        else:
            seen.repeats(file, line, row.metadata.get("id"), row.question)
            rows.append(row)
    return PromptSet(tuple(rows), seen.report(len(rows)))


def shared_questions(rows: Sequence[PromptRow], others: Sequence[PromptRow]) -> Places:
    """Places of ``rows`` whose question ``others`` ask too: no measurement of one on the other."""
    asked = {row.question for row in others}
    return tuple((row.file, row.line) for row in rows if row.question in asked)


def _row(file: str, line: int, data: bytes | None, seen: Recorder) -> PromptRow:
    """The conversation of one line; raises ``SkipRow``."""
    value = _json_value(data)
    messages, later = _parse(value)
    messages, metadata, replaced = _repair(messages, value)
    cleaned = [replace_surrogates(turn) for turn in later]
    if replaced or any(count for _, count in cleaned):
        seen.note("lone-surrogates", file, line)
    if later:
        seen.note("later-turns", file, line)
    return PromptRow(file, line, messages, metadata, tuple(text for text, _ in cleaned))


def _lines(path: Path, seen: Recorder) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line number, bytes), None for a line that is too long; blank lines left out."""
    for number, data in enumerate(_raw_lines(path), start=1):
        if number == 1 and data.startswith(_BYTE_ORDER_MARK):
            seen.note("byte-order-mark", str(path), number)
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if len(data) > LONGEST_LINE:
            yield number, None
        elif data.strip():
            if data.endswith(b"\r\n"):
                seen.note("crlf", str(path), number)
            yield number, data.rstrip(b"\r\n")


def _raw_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file with their ends, of longer ones the beginning."""
    try:
        with path.open("rb") as stream:
            yield from _beginnings(stream)
    except OSError as problem:
        raise UserError(f"{path}: cannot be read ({problem.strerror})") from problem


def _beginnings(stream: BinaryIO) -> Iterator[bytes]:
    """Bytes are split at LF only, so U+2028 in a string is safe."""
    at_start = True
    while data := stream.readline(LONGEST_LINE + 1):
        if at_start:
            yield data
        at_start = data.endswith(b"\n")


def _json_value(data: bytes | None) -> object:
    if data is None:
        raise SkipRow("line-too-long")
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise SkipRow("not-utf8", f"byte {problem.start + 1} of the line") from problem
    except json.JSONDecodeError as problem:
        raise SkipRow("not-json", f"{problem.msg}, column {problem.colno}") from problem
    except (ValueError, RecursionError) as problem:  # huge integers, absurd nesting
        raise SkipRow("not-json", str(problem)) from problem


def _parse(value: object) -> tuple[tuple[Message, ...], list[str]]:
    """Conversation of one JSON value, and the turns that come after it."""
    if not isinstance(value, dict):
        raise SkipRow("not-an-object", type(value).__name__)
    forms = [form for form in FORMS if value.get(form) is not None]
    if not forms:
        raise SkipRow("text-form") if isinstance(value.get("text"), str) else SkipRow("no-prompt")
    if len(forms) > 1:
        raise SkipRow("several-forms", " and ".join(forms))
    declared = [name for name in TOOL_FIELDS if value.get(name)]
    if declared:
        raise SkipRow("tool-use", f"field {declared[0]}")
    content = value[forms[0]]
    if forms[0] == "messages":
        return conversation(content), []
    if forms[0] == "prompt":
        return user_turn(content), []
    if not isinstance(content, list) or not all(isinstance(turn, str) for turn in content):
        raise SkipRow("bad-content", "turns must be a list of texts")
    if not content:
        raise SkipRow("empty-conversation")
    return user_turn(content[0]), content[1:]


def _repair(
    messages: tuple[Message, ...], value: object
) -> tuple[tuple[Message, ...], dict[str, Scalar], int]:
    """Replace lone surrogates in the conversation and the metadata; return them and the count."""
    total = 0
    clean: list[Message] = []
    for message in messages:
        content, count = replace_surrogates(message["content"])
        total += count
        fixed = Message(role=message["role"], content=content)
        if "reasoning_content" in message:
            fixed["reasoning_content"], count = replace_surrogates(message["reasoning_content"])
            total += count
        clean.append(fixed)
    metadata: dict[str, Scalar] = {}
    for name in METADATA_FIELDS:
        item = value.get(name) if isinstance(value, dict) else None
        if isinstance(item, str):
            metadata[name], count = replace_surrogates(item)
            total += count
        elif isinstance(item, (int, float)):
            metadata[name] = item
    return tuple(clean), metadata, total
