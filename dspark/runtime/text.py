"""Tokens to text while they arrive, without ever showing a piece of a character.

A tokenizer's `decode` is no sum over tokens: a character may take several tokens, and the first
token of a text may lose its space. So a *window* of recent tokens is decoded, of which the first
ones have been read before:

    new text = decode(window) without its trailing U+FFFD, minus what the window gave before

U+FFFD at the end means that bytes of a character are still to come, so it waits; anywhere else it
is final. The window moves on when nothing waits, and always keeps tokens that gave text.

Where a text is valid UTF-8 the pieces add up to `decode` of all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class AddedToken(Protocol):
    """A token that was put beside the model's own, such as a mark between turns."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class Detokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> str: ...


def special_tokens(tokenizer: Detokenizer) -> dict[str, int]:
    """Tokens that are no part of a text, with their ids."""
    added = tokenizer.added_tokens_decoder
    return {token.content: number for number, token in added.items() if token.special}


class TextStream:
    """The text of one sequence of tokens; special tokens have none."""

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0  # tokens of the window that were read when it last moved
        self._given = 0  # characters of the window's text that were handed out

    def push(self, token: int) -> str:
        """The characters that became certain with this token; often none."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_BROKEN)
        new = certain[self._given :]
        self._given += len(new)
        if new and certain == text:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._given = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """What still waits, at the end of the tokens: nothing, or marks of a broken character."""
        rest = self._decode(self._window)[self._given :]
        self._given += len(rest)
        return rest

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
