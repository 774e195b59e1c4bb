"""Conversation -> token ids and loss mask, by rendering prefixes of the conversation.

Which tokens did the assistant write? No marker is searched for: a vocabulary may hold the markers
of an older format, role names may be ordinary text, and thinking tags nest. The template itself
says it. For an assistant turn i of messages m, with R the rendered and tokenised template,

    p = R(m[:i],   with generation prompt)     what the target is shown
    f = R(m[:i+1], without)                    the same with the turn written out
    supervised: positions len(p) .. len(f)-1   thinking, tags and end-of-turn token included

White space that a template puts after the end-of-turn token is not supervised: generation has
stopped before it. This is right only if p is a prefix of f and f of R(m), in token ids. Templates
that rewrite history (dropping earlier thinking) break that; such a row raises ``RowError`` and is
counted by the caller. A mask is exact or absent, never approximate.

No system message is added to what the template does by itself, and no special token is added by
the tokenizer: the template writes its own beginning-of-sequence token, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, cast

from jinja2.exceptions import TemplateError

from dspark.distill.messages import Message
from dspark.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_ERRORS: dict[str, str] = {
    "template-refused": "the chat template refuses the conversation",
    "prompt-mismatch": "an assistant turn does not continue its generation prompt "
    "(thinking switched on or off against the data?)",
    "history-rewritten": "the template writes an earlier turn differently once others follow",
    "boundary-merged": "the tokenizer merges text across the edge of an assistant turn",
}


class RowError(UserError):
    """A conversation whose loss mask cannot be exact; ``reason`` is a key of ``ROW_ERRORS``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{ROW_ERRORS[reason]}: {detail}")
        self.reason = reason


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
    use. Raises ``UserError`` when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, thinking: bool = False) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                f"{tokenizer.name_or_path or 'tokenizer'}: has no chat template; "
                "add chat_template.jinja to its folder"
            )
        self.tokenizer = tokenizer
        self.thinking = thinking
        self._special = {
            *tokenizer.all_special_ids,
            *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special),
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the template and the thinking switch: equal means equal prompts."""
        content = json.dumps([self.tokenizer.get_chat_template(), self.thinking])
        return hashlib.sha256(content.encode()).hexdigest()

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids that the target is shown before it answers; raises ``RowError``."""
        return self._encode(self._render(messages, generation_prompt=True))

    def training_row(self, messages: Sequence[Message]) -> TrainingRow:
        """Row in which every assistant turn is supervised; raises ``RowError`` (see the file)."""
        text = self._render(messages, generation_prompt=False)
        ids = self._encode(text)
        mask = [False] * len(ids)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                start, stop = self._turn(messages, place, text, ids)
                mask[start:stop] = [True] * (stop - start)
        return TrainingRow(tuple(ids), tuple(mask))

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
            f"[{styles[supervised]}]{escape(text)}[/{styles[supervised]}]"
            for supervised, text in self.spans(row)
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens written out and spaces left alone."""
        return cast(
            str,
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
        )

    def _turn(
        self, messages: Sequence[Message], place: int, text: str, ids: list[int]
    ) -> tuple[int, int]:
        """Supervised range of the assistant turn at ``place`` within the whole row."""
        prompt = self._render(messages[:place], generation_prompt=True)
        turn = self._render(messages[: place + 1], generation_prompt=False)
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

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        try:
            return cast(
                str,
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    enable_thinking=self.thinking,
                    thinking=self.thinking,
                ),
            )
        except TemplateError as problem:
            raise RowError("template-refused", str(problem)) from problem

    def _encode(self, text: str) -> list[int]:
        return cast(list[int], self.tokenizer.encode(text, add_special_tokens=False))
