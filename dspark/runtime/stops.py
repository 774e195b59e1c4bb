"""Stop strings: where a text ends that no end token ended.

A text stops at the first token that completes a stop string in what the user would have read by
then. The search runs over detokenised text, one token at a time, whatever the tokens arrive in,
so that a match in the middle of an accepted block ends the text exactly where one-token decoding
would have ended it:

    tokens   up to and including the token that completes the match (as an end token is included)
    text     up to where the match begins; of several completed at once, the leftmost

Nothing after that token exists: not in the ids, the text, the records or the cache. A token may
reach past the stop string; its own text is cut with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark.errors import UserError
from dspark.runtime.text import Detokenizer, TextStream, special_tokens


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a text, and the tokenizer that makes text of tokens.

    Raises UserError for an empty string, and for one that is a special token of the tokenizer:
    those are no part of any text; an end token id does what is meant.
    """

    strings: Sequence[str]
    tokenizer: Detokenizer = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strings", tuple(dict.fromkeys(self.strings)))
        if "" in self.strings:
            raise UserError("stop: expected strings of at least one character, got an empty one")
        special = special_tokens(self.tokenizer).keys() & set(self.strings)
        if special:
            raise UserError(
                f"stop: {min(special)!r} is a special token, which is never part of the text; "
                "give its id as an end token"
            )

    def start(self, *, min_new_tokens: int = 0) -> StopSearch:
        """The search of one text, which looks at nothing in its first `min_new_tokens` tokens."""
        return StopSearch(self, min_new_tokens)


class StopSearch:
    """Follows one text token by token.

    text   all that is readable so far, cut at the match
    found  the stop string that ended it, or None
    """

    def __init__(self, stops: StopStrings, min_new_tokens: int) -> None:
        self.text = ""
        self.found: str | None = None
        self._strings = stops.strings
        self._stream = TextStream(stops.tokenizer)
        self._longest = max(map(len, stops.strings), default=0)
        self._exempt = min_new_tokens  # tokens left that may not take part in a match
        self._floor = 0  # characters of those

    def push(self, tokens: Sequence[int]) -> int | None:
        """Read more tokens; how many of them (at least 1) remain if they end the text, else None.

        Not to be called again once it has returned a number.
        """
        for count, token in enumerate(tokens, start=1):
            if self._step(token):
                return count
        return None

    @property
    def held(self) -> int:
        """Characters at the end of `text` that may turn out to be the start of a stop string."""
        if self.found is not None:
            return 0
        room = min(self._longest - 1, len(self.text) - self._floor)
        for size in range(room, 0, -1):
            tail = self.text[-size:]
            if any(string.startswith(tail) for string in self._strings):
                return size
        return 0

    def finish(self) -> str:
        """No more tokens: the text with what an unfinished character left, if no stop ended it."""
        if self.found is None:
            self.text += self._stream.flush()
        return self.text

    def _step(self, token: int) -> bool:
        start = max(self._floor, len(self.text) - self._longest + 1)
        piece = self._stream.push(token)
        self.text += piece
        if self._exempt > 0:
            self._exempt -= 1
            self._floor = len(self.text)
        elif piece:
            return self._search(start)
        return False

    def _search(self, start: int) -> bool:
        hits = [
            (at, string)
            for string in self._strings
            if (at := self.text.find(string, max(start, 0))) >= 0
        ]
        if hits:
            at, self.found = min(hits, key=lambda hit: hit[0])
            self.text = self.text[:at]
        return bool(hits)
