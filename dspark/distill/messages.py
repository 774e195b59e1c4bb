"""What one conversation may look like, and the name of every way in which it may not.

A message is the dictionary that chat templates take: ``role``, ``content`` and, for an assistant
turn that thought first, ``reasoning_content``. A conversation is

    [system]  user  assistant  user  assistant ...  [user]

with text in every turn. Nothing is guessed: a conversation outside this grammar is skipped under
a reason of its own, because merging two user turns or dropping a leading assistant turn would
train the drafter on a dialogue that never took place. The one repair is lossless in spirit:
lone UTF-16 surrogates, legal in JSON but not in UTF-8, become U+FFFD and are counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

SKIP_REASONS: dict[str, str] = {
    "line-too-long": "the line is longer than 16 MiB",
    "not-utf8": "the line is not UTF-8; save the file as UTF-8",
    "not-json": "the line is not JSON; expected one JSON object a line",
    "not-an-object": "the line is JSON but not an object",
    "no-prompt": "none of the fields prompt, turns and messages is there",
    "several-forms": "more than one of the fields prompt, turns and messages is there",
    "text-form": "ready-formatted `text` is not supported; give prompt, turns or messages",
    "empty-conversation": "there is no message at all",
    "empty-prompt": "a user turn has no text",
    "empty-assistant": "an assistant turn has no text",
    "system-only": "there is a system message and nothing else",
    "assistant-first": "the assistant speaks before any user",
    "adjacent-user": "two user turns follow each other",
    "adjacent-assistant": "two assistant turns follow each other",
    "misplaced-system": "a system message stands after the first place",
    "unknown-role": "a role other than system, user and assistant",
    "tool-use": "tool declarations, calls and results are not supported",
    "bad-message": "a message is not an object with role and content",
    "bad-content": "content is neither text nor a list of parts",
    "unsupported-part": "a content part is not text",
}


class _Turn(TypedDict):
    role: str
    content: str


class Message(_Turn, total=False):
    """One turn, exactly as a chat template takes it."""

    reasoning_content: str


class SkipRow(Exception):
    """A row that cannot be used; ``reason`` is a key of ``SKIP_REASONS``."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(SKIP_REASONS[reason] + (f" ({detail})" if detail else ""))
        self.reason = reason
        self.detail = detail


def user_turn(text: object) -> tuple[Message, ...]:
    """The conversation that asks ``text`` and nothing else."""
    if not isinstance(text, str):
        raise SkipRow("bad-content", f"expected text, got {type(text).__name__}")
    return check_order((Message(role="user", content=text),))


def conversation(raw: object) -> tuple[Message, ...]:
    """Read a ``messages`` field: needed keys only, lists of text parts flattened, order checked."""
    if not isinstance(raw, list):
        raise SkipRow("bad-message", f"expected a list of messages, got {type(raw).__name__}")
    return check_order(tuple(_message(item, place) for place, item in enumerate(raw)))


def check_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return ``messages`` when they follow the grammar of this file, else raise ``SkipRow``."""
    if not messages:
        raise SkipRow("empty-conversation")
    turns = list(messages[1:] if messages[0]["role"] == "system" else messages)
    if not turns:
        raise SkipRow("system-only")
    if turns[0]["role"] == "assistant":
        raise SkipRow("assistant-first")
    previous = ""
    for turn in turns:
        role = turn["role"]
        if role == "system":
            raise SkipRow("misplaced-system")
        if role == previous:
            raise SkipRow(f"adjacent-{role}")
        if not (turn["content"] + turn.get("reasoning_content", "")).strip():
            raise SkipRow("empty-prompt" if role == "user" else "empty-assistant")
        previous = role
    return tuple(messages)


_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> tuple[str, int]:
    """``text`` with every lone surrogate as U+FFFD, and how many there were."""
    return _SURROGATE.subn("\ufffd", text)


def _message(item: object, place: int) -> Message:
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise SkipRow("bad-message", f"message {place}")
    role = item["role"]
    if role in ("tool", "function") or item.get("tool_calls") or item.get("function_call"):
        raise SkipRow("tool-use", f"message {place}")
    if role not in ("system", "user", "assistant"):
        raise SkipRow("unknown-role", f"message {place}: {role!a}")
    message = Message(role=role, content=_text(item.get("content"), place))
    reasoning = item.get("reasoning_content")
    if role == "assistant" and reasoning is not None:
        message["reasoning_content"] = _text(reasoning, place)
    return message


def _text(content: object, place: int) -> str:
    """Text of a content field; text parts are joined without a separator, as templates do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise SkipRow("bad-content", f"message {place}: {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise SkipRow("unsupported-part", f"message {place}: {kind!a}")
        texts.append(text)
    return "".join(texts)
