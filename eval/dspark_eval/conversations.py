"""Conversations of several turns: each answer goes into the history that the next turn is asked in.

    turn 1    prompt ids of [..., user 1]
    turn j    prompt ids of [..., user 1, answer 1, ..., user j]     answers: those just decoded

An answer's text is what the chat template would have had to be given to write that answer: the
decoded tokens without what the template itself puts around an assistant turn. The history is then
rendered as any server would render it. A conversation ends early where its answer cannot be written
back (it holds a token that sets turns apart); that is counted, not hidden.

Rounds of one conversation are pooled, and intervals resample conversations: later turns depend on
earlier ones. Turn j of prompt i draws with seed + i + (j - 1) n, n prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark.distill.chat import ChatFormat, RowError
from dspark.distill.messages import Message
from dspark.distill.prompts import PromptRow
from dspark.runtime.records import Generation
from dspark_eval import metrics
from dspark_eval.speed import Decode, PromptTimings

_HOLE = "\N{WHITE SQUARE}answer\N{WHITE SQUARE}"


@dataclass(frozen=True)
class Turn:
    """What was asked, in words and as the ids that the target was shown, and the answer."""

    question: str
    prompt: list[int]
    answer: Generation


@dataclass(frozen=True)
class Conversation:
    """The turns of one prompt; `broken`: why it ended before its last turn, None if it did not."""

    turns: tuple[Turn, ...]
    broken: str | None = None

    @property
    def answers(self) -> list[Generation]:
        return [turn.answer for turn in self.turns]

    @property
    def timings(self) -> PromptTimings:
        """As `speed.summarize` reads it, one entry for each turn."""
        lengths = [len(turn.prompt) for turn in self.turns]
        return PromptTimings(lengths[0], speculative=self.answers, turn_lengths=lengths)


def converse(
    chat: ChatFormat,
    row: PromptRow,
    first: list[int],
    decode: Decode,
    seeds: Sequence[int],
) -> Conversation:
    """Ask the row's prompt, whose ids are `first`, and then as many later turns as seeds are left.

    Raises ValueError if the rounds of an answer do not add up to it.
    """
    turns: list[Turn] = []
    messages = row.prompt
    questions = (row.prompt[-1]["content"], *row.later_turns)
    for question, seed in zip(questions, seeds, strict=False):
        ids = first
        if turns:
            try:
                said = answer_text(chat, messages, turns[-1].answer)
                messages = (
                    *messages,
                    Message(role="assistant", content=said),
                    Message(role="user", content=question),
                )
                ids = chat.prompt_ids(messages)
            except RowError as problem:
                return Conversation(tuple(turns), str(problem))
        answer = decode(ids, seed)
        metrics.check_generation(answer)
        turns.append(Turn(question, ids, answer))
    return Conversation(tuple(turns))


def answer_text(chat: ChatFormat, messages: Sequence[Message], answer: Generation) -> str:
    """The content of the assistant turn that the template would write as these tokens.

    Raises RowError where the template refuses the conversation.
    """
    text = chat.decode(answer.tokens)
    before, behind = _around(chat, messages)
    text = text.removeprefix(before)
    behind = behind.rstrip()
    if answer.finish == "end":
        if behind and text.endswith(behind):
            return text.removesuffix(behind)
        # the template writes none, or another end token than the template's closes the turn
        return chat.decode(answer.tokens[:-1]).removeprefix(before)
    return text


def _around(chat: ChatFormat, messages: Sequence[Message]) -> tuple[str, str]:
    """What the template writes before and behind an answer's text, after its generation prompt."""
    shown = chat.render(messages, generation_prompt=True)
    written = chat.render(
        (*messages, Message(role="assistant", content=_HOLE)), generation_prompt=False
    )
    if not written.startswith(shown):
        raise RowError("prompt-mismatch", "an answer cannot be written back into the history")
    before, hole, behind = written[len(shown) :].partition(_HOLE)
    if not hole:
        raise RowError("template-refused", "the template changes the text of an answer")
    return before, behind


def hold_conversations(
    chat: ChatFormat,
    rows: Sequence[PromptRow],
    prompts: Sequence[list[int]],
    decode: Decode,
    *,
    seed: int,
    turns: int | None,
    advance: Callable[[], None] = lambda: None,
) -> list[Conversation]:
    """Every row in order, at most `turns` turns of each (None: all); `advance` after each row."""
    held = []
    for index, (row, first) in enumerate(zip(rows, prompts, strict=True)):
        asked = 1 + len(row.later_turns)
        count = asked if turns is None else min(turns, asked)
        seeds = [seed + index + turn * len(rows) for turn in range(count)]
        held.append(converse(chat, row, first, decode, seeds))
        advance()
    return held


def broken_notes(held: Sequence[Conversation]) -> list[str]:
    """A sentence if conversations ended early, with the first reason."""
    reasons = [conversation.broken for conversation in held if conversation.broken is not None]
    if not reasons:
        return []
    return [
        f"{len(reasons)} of {len(held)} conversations ended before their last turn; the first: "
        f"{reasons[0]}"
    ]
