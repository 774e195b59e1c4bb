"""Questions behind a context longer than any row that a drafter was trained on.

The same questions are asked after n tokens of context of two kinds:

    chat     earlier turns of one chat: questions and worked answers of the generator's validation
             split, as many whole turns as it takes to reach n tokens
    padded   the text's first token n times, then the question as ever

Earlier turns are what a chat has, but the shipped target was trained on single questions and gets
wrong nearly all answers after even one; repeated first tokens it reads unharmed. So `chat` tells
how a drafter follows a target in text that neither knows, `padded` what length alone does. Exact
answers stand beside every figure.

All prompts of such a set begin alike. What they share is read once and kept in a prefix cache, from
which every prompt goes on as if it had been read from the start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from dspark.distill.chat import ChatFormat
from dspark.distill.messages import Message
from dspark.nano.generate import row as nano_row
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.proposal import Drafter
from dspark.runtime.records import Generation
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval.drafting import Drafted

CHAT, PADDED = "chat", "padded"
LENGTHS = (512, 2048, 8192, 16384)
SHORTEST_SHARED = 256
"""Prompts that share less are read one by one: a copy is not worth it."""
NO_LIMIT = 1 << 62
"""Bytes: a budget for one text has nothing to choose."""

_PROBE = (Message(role="user", content="?"),)


@dataclass(frozen=True)
class LongContext:
    """What stands before each question: `tokens` tokens (chat: at least) of a kind."""

    kind: str
    tokens: int


def prompts_in_context(
    chat: ChatFormat, context: LongContext | None
) -> Callable[[Sequence[Message]], list[int]]:
    """A function from a prompt to its ids behind the context; it raises what `prompt_ids` does."""
    if context is None:
        return chat.prompt_ids
    if context.kind == CHAT:
        turns = earlier_turns(chat, context.tokens)
        return lambda prompt: chat.prompt_ids((*turns, *prompt))

    def padded(prompt: Sequence[Message]) -> list[int]:
        ids = chat.prompt_ids(prompt)
        return ids[:1] * context.tokens + ids

    return padded


def earlier_turns(chat: ChatFormat, tokens: int) -> tuple[Message, ...]:
    """The fewest turns whose question and worked answer are `tokens` tokens or more together."""
    alone = len(chat.prompt_ids(_PROBE))
    turns: list[Message] = []

    def length(pairs: int) -> int:
        while len(turns) < 2 * pairs:
            turns.extend(
                Message(role=turn["role"], content=turn["content"])
                for turn in nano_row(0, len(turns) // 2, "validation").messages
            )
        return len(chat.prompt_ids((*turns[: 2 * pairs], *_PROBE))) - alone

    most = 0 if tokens == 0 else 1
    while length(most) < tokens:
        most *= 2
    pairs = bisect_left(range(most + 1), tokens, key=length)
    return tuple(turns[: 2 * pairs])


# ------------------------------------------------------------------ one reading for all prompts


def shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """Leading tokens that all prompts have in common, each keeping one of its own at least."""
    most = min(map(len, prompts)) - 1
    columns = zip(*(prompt[:most] for prompt in prompts), strict=True)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def speculative_after(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    drafted: Drafted,
) -> Callable[[list[int], int], Generation]:
    """Draft and verify for these prompts and no others: (prompt, seed) to an answer."""
    shared, held = shared_length(prompts), None
    if shared >= SHORTEST_SHARED:
        # what a prompt adds is shorter than `least_tokens`: the shared beginning alone is kept
        held = PrefixCache(target, drafter, NO_LIMIT, least_tokens=shared)
        drafted.decode(target, drafter, sampling, 1, held)(list(prompts[0][:shared]), 0)
    return drafted.decode(target, drafter, sampling, max_new_tokens, held)
