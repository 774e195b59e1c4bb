"""Conversation -> token ids and loss mask, by rendering prefixes of the conversation.

Which tokens did the assistant write? No marker is searched for: a vocabulary may hold the markers
of an older format, role names may be ordinary text, and thinking tags nest. The template itself
says it. For an assistant turn i of messages m, with R the rendered and tokenised template,

    p = R(m[:i],   with generation prompt)     what the target is shown
    f = R(m[:i+1], without)                    the same with the turn written out
    supervised: positions len(p) .. len(f)-1   thinking, tags and end-of-turn token included

White space that a template puts after the end-of-turn token is not supervised: generation has
stopped before it. This is right only if p is a prefix of f and f of R(m), in token ids. Templates
that rewrite history (dropping earlier thinking) break the second; then each assistant turn becomes
a row of its own, f with that one turn supervised, as the target was shown it. Where no row is exact
``RowError`` is raised and counted by the caller. A mask is exact or absent, never approximate.

Text that holds a token which the template puts around turns is refused: tokenised, it would end
the turn it stands in.

No system message is added to what the template does by itself, and no special token is added by
the tokenizer: the template writes its own beginning-of-sequence token, once.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, cast

from dspark.distill.messages import Message
from dspark.distill.templates import chat_template, label
from dspark.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_ERRORS: dict[str, str] = {
    "template-refused": "the chat template refuses the conversation",
    "prompt-mismatch": "an assistant turn does not continue its generation prompt "
    "(thinking switched on or off against the data?)",
    "history-rewritten": "the template writes an earlier turn differently once others follow",
    "boundary-merged": "the tokenizer merges text across the edge of an assistant turn",
    "marker-in-text": "a turn's text holds a token that the template sets turns apart with",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x80-\x9f]")
_PROBE = (Message(role="user", content="a"),)
_ANSWER = Message(role="assistant", content="b", reasoning_content="c")


class RowError(UserError):
    """A conversation whose loss mask cannot be exact; ``reason`` is a key of ``ROW_ERRORS``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{ROW_ERRORS[reason]}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class TrainingRow:
    """Token ids of one conversation and which of them are labels.

    ids         the whole row, prompt and answer
    loss_mask   same length; True where the assistant wrote the token
    provenance  "target": the supervised ids are what the target emitted; "given": from the file
    file, line  where the prompt stood
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    provenance: str = "given"
    file: str = ""
    line: int = 0

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.loss_mask):
            raise ValueError(f"{len(self.ids)} ids but {len(self.loss_mask)} mask entries")

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(self.loss_mask)

    def truncated(self, max_length: int) -> TrainingRow:
        """The first ``max_length`` tokens."""
        if len(self.ids) <= max_length:
            return self
        return replace(self, ids=self.ids[:max_length], loss_mask=self.loss_mask[:max_length])


class ChatFormat:
    """One tokenizer, its chat template, and one setting of the thinking switch.

    Distilling, evaluating and benchmarking share it, so prompts are the same everywhere.
    ``thinking`` reaches the template as ``enable_thinking`` and as ``thinking``, the two names in
    use; ``template`` is described in ``templates.py``. Raises ``UserError`` when there is no
    template, or one that cannot render a plain question: that is no fault of any prompt file.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        thinking: bool = False,
        template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        self.template = chat_template(tokenizer, template)
        added = tokenizer.added_tokens_decoder
        self._special = {
            *tokenizer.all_special_ids,
            *(i for i, token in added.items() if token.special),
        }
        try:
            asked = self.render(_PROBE, generation_prompt=False)
            self.render(_PROBE, generation_prompt=True)
        except RowError as problem:
            raise UserError(
                f"{template or label(tokenizer)}: the chat template cannot render a plain user "
                f"turn ({problem.detail}); mend it, or name another in data.template"
            ) from None
        shown = set(self._encode(asked))
        self._markers = sorted(
            {added[i].content for i in shown & added.keys() if added[i].content.strip()}
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the template and the thinking switch: equal means equal prompts.

        A default system message is part of the template, and so of this.
        """
        content = json.dumps([self.template, self.thinking])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def has_thinking_switch(self) -> bool:
        """Whether thinking on or off makes any difference to this template."""
        other = copy.copy(self)
        other.thinking = not self.thinking
        return any(
            self.render(messages, generation_prompt=prompt)
            != other.render(messages, generation_prompt=prompt)
            for messages, prompt in ((_PROBE, True), ((*_PROBE, _ANSWER), False))
        )

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids that the target is shown before it answers; raises ``RowError``."""
        self._refuse_markers(messages)
        return self._encode(self.render(messages, generation_prompt=True))

    def training_row(self, messages: Sequence[Message]) -> TrainingRow:
        """Row in which every assistant turn is supervised; raises ``RowError`` (see the file)."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return self._row(messages, turns)

    def training_rows(self, messages: Sequence[Message]) -> list[TrainingRow]:
        """One row for all assistant turns, or one for each where the template rewrites history.

        Raises ``RowError`` if a mask cannot be exact either way.
        """
        try:
            return [self.training_row(messages)]
        except RowError as problem:
            if problem.reason != "history-rewritten":
                raise
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return [self._row(messages[: place + 1], [place]) for place in turns]

    def spans(self, row: TrainingRow) -> list[tuple[bool, str]]:
        """The row as decoded stretches in order, each with whether it is supervised."""
        out = []
        start = 0
        for supervised, run in groupby(row.loss_mask):
            stop = start + len(list(run))
            out.append((supervised, self.decode(row.ids[start:stop])))
            start = stop
        return out

    def describe_row(self, row: TrainingRow) -> str:
        """Decoded row as rich markup: supervised text reversed green, the rest dim."""
        from rich.markup import escape

        styles = {True: "reverse green", False: "dim"}
        return "".join(
            f"[{styles[supervised]}]{escape(printable(text))}[/{styles[supervised]}]"
            for supervised, text in self.spans(row)
        )

    def marked_row(self, row: TrainingRow) -> str:
        """Decoded row as plain text: supervised text between ⟦ and ⟧."""
        spans = ((supervised, printable(text)) for supervised, text in self.spans(row))
        return "".join(f"⟦{text}⟧" if supervised else text for supervised, text in spans)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens written out and spaces left alone."""
        return cast(
            str,
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
        )

    def _row(self, messages: Sequence[Message], turns: Iterable[int]) -> TrainingRow:
        self._refuse_markers(messages)
        text = self.render(messages, generation_prompt=False)
        ids = self._encode(text)
        mask = [False] * len(ids)
        for place in turns:
            start, stop = self._turn(messages, place, text, ids)
            mask[start:stop] = [True] * (stop - start)
        return TrainingRow(tuple(ids), tuple(mask))

    def _refuse_markers(self, messages: Sequence[Message]) -> None:
        for place, message in enumerate(messages):
            text = message["content"] + message.get("reasoning_content", "")
            found = [marker for marker in self._markers if marker in text]
            if found:
                raise RowError("marker-in-text", f"message {place}: {found[0]!r}")

    def _turn(
        self, messages: Sequence[Message], place: int, text: str, ids: list[int]
    ) -> tuple[int, int]:
        """Supervised range of the assistant turn at ``place`` within the whole row."""
        prompt = self.render(messages[:place], generation_prompt=True)
        turn = self.render(messages[: place + 1], generation_prompt=False)
        if not turn.startswith(prompt):
            raise RowError("prompt-mismatch", f"message {place}")
        if not text.startswith(turn):
            raise RowError("history-rewritten", f"message {place}")
        prompt_ids, turn_ids = self._encode(prompt), self._encode(turn)
        for prefix in (prompt_ids, turn_ids):
            if ids[: len(prefix)] != prefix:
                raise RowError("boundary-merged", f"message {place}")
        return len(prompt_ids), self._end_of_turn(ids, len(prompt_ids), len(turn_ids))

    def _end_of_turn(self, ids: list[int], start: int, stop: int) -> int:
        """``stop`` less the white space that follows the turn's last special token, if any."""
        end = stop
        while end > start and ids[end - 1] not in self._special:
            if self.decode(ids[end - 1 : end]).strip():
                return stop
            end -= 1
        return end if end > start else stop

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """What the template writes for ``messages``; raises ``RowError`` if it refuses them."""
        try:
            return cast(
                str,
                self.tokenizer.apply_chat_template(
                    list(messages),
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    enable_thinking=self.thinking,
                    thinking=self.thinking,
                ),
            )
        except Exception as problem:  # a template is a program: its own refusal, or any fault
            raise RowError("template-refused", str(problem)) from problem

    def _encode(self, text: str) -> list[int]:
        # not verbose: how long a text the target reads is not for the tokenizer to say
        ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return cast(list[int], ids)


def chat_formats(
    tokenizer: PreTrainedTokenizerBase, thinking: str = "off", template: str | None = None
) -> tuple[ChatFormat, ...]:
    """The format of every way in which prompts are asked, ``thinking`` being off, on or both.

    Raises ``UserError`` when thinking is asked for and the template has no such switch.
    """
    without = ChatFormat(tokenizer, template=template)
    if thinking == "off":
        return (without,)
    if not without.has_thinking_switch:
        raise UserError(
            f"data.thinking is {thinking}: the chat template of {label(tokenizer)} has no thinking "
            "switch; set it to off"
        )
    with_thinking = ChatFormat(tokenizer, thinking=True, template=template)
    return (with_thinking,) if thinking == "on" else (without, with_thinking)


def printable(text: str) -> str:
    """`text` with control characters as pictures of them: a row cannot command a terminal."""
    return _CONTROL.sub(lambda found: chr(0x2400 + ord(found[0]) % 128), text)
