"""Prompt files: JSONL in, checked conversations out, every line accounted for.

One JSON object a line, with exactly one of

    {"prompt": "text"}                                  one user turn
    {"turns": ["first", "second"]}                      user turns; the first is the prompt
    {"messages": [{"role": ..., "content": ...}, ...]}  a conversation, answers included or not

Later ``turns`` would need the target's own answers in between, so they are left out, as in
DeepSpec's evaluation, and counted. ``id``, ``answer`` and ``family`` are kept when they are
scalars; every other field is ignored. Strings stay strings: only the standard JSON reader touches
them, so a date or a quoted number arrives as it was written.

A line that is not JSON is an error with its file and line. A line that is JSON but no usable
conversation (see ``messages.py``) is skipped and counted with its line, or, with ``strict``, an
error as well. Blank lines, CRLF line ends and a byte order mark at the start are fine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark.distill.messages import (
    SKIP_REASONS,
    Message,
    SkipRow,
    conversation,
    replace_surrogates,
    user_turn,
)
from dspark.errors import UserError

Scalar = str | int | float | bool
FORMS = ("prompt", "turns", "messages")
METADATA_FIELDS = ("id", "answer", "family")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINES_SHOWN = 8


@dataclass(frozen=True)
class PromptRow:
    """One usable line: where it stood, its conversation, and the scalars it carried along."""

    file: str
    line: int
    messages: tuple[Message, ...]
    metadata: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def has_response(self) -> bool:
        """Whether the conversation ends in an assistant turn."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The conversation up to the last user turn: what the target is asked."""
        return self.messages[:-1] if self.has_response else self.messages


@dataclass(frozen=True)
class SkippedLine:
    """A line that was JSON but not usable; ``reason`` is a key of ``SKIP_REASONS``."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class ReadReport:
    """What became of every non-blank line."""

    read: int
    kept: int
    skipped: tuple[SkippedLine, ...]
    repaired: tuple[tuple[str, int], ...]  # lines in which lone surrogates became U+FFFD
    later_turns: int  # rows whose second and later turns were left out

    def by_reason(self) -> dict[str, tuple[SkippedLine, ...]]:
        """Skipped lines by reason, in the order of ``SKIP_REASONS``."""
        grouped = {
            reason: tuple(line for line in self.skipped if line.reason == reason)
            for reason in SKIP_REASONS
        }
        return {reason: lines for reason, lines in grouped.items() if lines}

    def summary(self) -> str:
        """One line of totals, then one line for each thing that a reader should know."""
        out = [f"{self.read} rows read, {self.kept} kept, {len(self.skipped)} skipped"]
        for reason, lines in self.by_reason().items():
            places = _places([(line.file, line.line) for line in lines])
            out.append(f"  {len(lines)} skipped, {reason}: {SKIP_REASONS[reason]} ({places})")
        if self.repaired:
            places = _places(self.repaired)
            out.append(f"  {len(self.repaired)} with lone surrogates, now U+FFFD ({places})")
        if self.later_turns:
            out.append(f"  {self.later_turns} with more than one turn: only the first is used")
        return "\n".join(out)


@dataclass(frozen=True)
class PromptSet:
    """The usable rows of all files, in file order, and the report of the rest."""

    rows: tuple[PromptRow, ...]
    report: ReadReport


def read_prompts(files: Sequence[Path], *, strict: bool = False) -> PromptSet:
    """Read prompt files.

    Raises ``UserError`` for a file that cannot be read, a line that is not JSON, the first
    unusable row when ``strict``, or when no usable row is left.
    """
    rows: list[PromptRow] = []
    skipped: list[SkippedLine] = []
    repaired: list[tuple[str, int]] = []
    later_turns = 0
    lines = ((str(path), *item) for path in files for item in _json_lines(Path(path)))
    for file, line, value in lines:
        try:
            messages, dropped_turns = _parse(value)
        except SkipRow as problem:
            if strict:
                message = f"{file}:{line}: {problem}; strict reading skips nothing"
                raise UserError(message) from None
            skipped.append(SkippedLine(file, line, problem.reason))
            continue
        messages, metadata, replaced = _repair(messages, value)
        if replaced:
            repaired.append((file, line))
        later_turns += dropped_turns
        rows.append(PromptRow(file, line, messages, metadata))
    read = len(rows) + len(skipped)
    report = ReadReport(read, len(rows), tuple(skipped), tuple(repaired), later_turns)
    if not rows:
        names = ", ".join(str(path) for path in files) or "no files were given"
        summary = "; ".join(line.strip() for line in report.summary().splitlines())
        raise UserError(f"{names}: no usable prompt; {summary}")
    return PromptSet(tuple(rows), report)


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield (line number, value); bytes are split at LF only, so U+2028 in a string is safe."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise UserError(f"{path}: cannot be read ({problem.strerror})") from problem
    lines = content.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, _json_value(path, number, line)


def _json_value(path: Path, number: int, data: bytes) -> object:
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise UserError(
            f"{path}:{number}: not UTF-8 (byte {problem.start + 1} of the line); "
            "save the file as UTF-8"
        ) from problem
    except json.JSONDecodeError as problem:
        raise UserError(
            f"{path}:{number}: not JSON ({problem.msg}, column {problem.colno}); "
            "expected one JSON object a line with prompt, turns or messages"
        ) from problem
    except (ValueError, RecursionError) as problem:  # huge integers, absurd nesting
        raise UserError(f"{path}:{number}: JSON that cannot be read ({problem})") from problem


def _parse(value: object) -> tuple[tuple[Message, ...], bool]:
    """Conversation of one JSON value, and whether later turns were left out."""
    if not isinstance(value, dict):
        raise SkipRow("not-an-object", type(value).__name__)
    forms = [form for form in FORMS if value.get(form) is not None]
    if not forms:
        raise SkipRow("text-form") if isinstance(value.get("text"), str) else SkipRow("no-prompt")
    if len(forms) > 1:
        raise SkipRow("several-forms", " and ".join(forms))
    content = value[forms[0]]
    if forms[0] == "messages":
        return conversation(content), False
    if forms[0] == "prompt":
        return user_turn(content), False
    if not isinstance(content, list) or not all(isinstance(turn, str) for turn in content):
        raise SkipRow("bad-content", "turns must be a list of texts")
    if not content:
        raise SkipRow("empty-conversation")
    return user_turn(content[0]), len(content) > 1


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


def _places(lines: Sequence[tuple[str, int]]) -> str:
    """``file:3, file:9, ... and 12 more`` with the file named once while it stays the same."""
    parts = []
    last = None
    for file, line in lines[:_LINES_SHOWN]:
        parts.append(str(line) if file == last else f"{file}:{line}")
        last = file
    more = len(lines) - _LINES_SHOWN
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")
