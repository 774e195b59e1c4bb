"""What a user writes, as token ids: the prompt, logit biases, strings that end the text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dspark.distill.chat import ChatFormat, RowError
from dspark.distill.messages import Message
from dspark.errors import UserError
from dspark.generation.options import GenerateOptions
from dspark.runtime.rules import Processor, Rules
from dspark.runtime.text import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_prompt(prompt: str) -> str:
    """The text itself, or for "-" all of stdin without its last line break.

    Raises UserError if there is none, or if it is not UTF-8.
    """
    try:
        if prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        prompt.encode()  # bytes that are no text arrive as lone surrogates
    except UnicodeError:
        raise UserError("prompt: expected text in UTF-8") from None
    if not prompt:
        raise UserError('prompt: expected text, got nothing; give it as "text" or through stdin')
    return prompt


def prompt_ids(
    prompt: str,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat | None,
    system: str | None = None,
) -> list[int]:
    """Ids of a user's turn up to the opening of the answer; without `chat` of the bare text."""
    if chat is None:
        return list(tokenizer(prompt).input_ids)
    messages = [Message(role="user", content=prompt)]
    if system is not None:
        messages.insert(0, Message(role="system", content=system))
    try:
        return chat.prompt_ids(messages)
    except RowError as problem:
        raise UserError(f"prompt: {problem}; --raw takes any text as it is") from None


def rules_of(options: GenerateOptions, tokenizer: PreTrainedTokenizerBase) -> Rules | None:
    """The rules asked for, or None where nothing was."""
    bias = dict(_bias(text, tokenizer) for text in options.logit_bias)
    rules = Rules(bias, options.min_new_tokens, tuple(_processors(options)))
    return None if rules == Rules() else rules


def endings(
    strings: Sequence[str], tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]
) -> tuple[list[str], list[int]]:
    """Stop strings, and end tokens: the target's and those strings that are special tokens."""
    special = special_tokens(tokenizer)
    ends = [special[text] for text in strings if text in special]
    return [text for text in strings if text not in special], [*end_token_ids, *ends]


def _processors(options: GenerateOptions) -> list[Processor]:
    from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

    found: list[Processor] = []
    if options.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.no_repeat_ngram:
        found.append(NoRepeatNGramLogitsProcessor(options.no_repeat_ngram))
    return found


def _bias(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, float]:
    """ "ID:NUMBER" or "TEXT:NUMBER" -> id and number."""
    name, _, number = text.rpartition(":")
    try:
        bias = float(number if name else "")
    except ValueError:
        raise UserError(f"--logit-bias {text!r}: expected ID:NUMBER or TEXT:NUMBER") from None
    if name.isdecimal():
        return int(name), bias
    ids = tokenizer(name, add_special_tokens=False).input_ids
    if len(ids) != 1:
        parts = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in ids) or "none"
        raise UserError(f"--logit-bias: {name!r} is not one token but {parts}; give ids")
    return ids[0], bias
