"""One request: what was asked for, and its text as the rounds bring it.

A `Text` is the host's side of a running request. It knows nothing of tensors: a round hands it an
`Outcome`, it decides which of the tokens the user gets, and says how many rows to commit.

    emitted    x_1..x_a, an accepted sibling, the verdict's own token; cut where the text ends
    committed  as many rows as tokens were emitted: [anchor, and all of them but the last]

Draws come from two generators per request, one for its drafts and one for everything else, so that
neither the batch it runs in nor a round without a draft shifts the other's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dspark.runtime.ending import Ending
from dspark.runtime.prefill import TokenCallback, check_request, end_ids
from dspark.runtime.records import (
    ALL_ACCEPTED,
    CORRECTED,
    Band,
    Emitted,
    EmittedKind,
    Generation,
    RoundRecord,
)
from dspark.runtime.rules import RequestRules, Rules
from dspark.runtime.sampling import BadLogits, request_generator
from dspark.runtime.stops import StopStrings
from dspark.runtime.target import Target

RoundCallback = Callable[[Sequence[Emitted]], None]
"""Receives what `TokenCallback` does, with where each token came from."""


@dataclass(frozen=True)
class Request:
    """What one text is asked to be.

    prompt_ids      at least one id of the target
    max_new_tokens  exact, unless an end token or a stop string comes first
    rules, stop     see `dspark.runtime.rules` and `dspark.runtime.stops`
    end_token_ids   replace the target's; empty: nothing ends the text but its length
    seed, index     name the request's random numbers; `index` tells apart those of one seed
    on_tokens       gets the first token, then those of each round
    on_round        the same, with kinds and confidences
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    rules: Rules | None = None
    stop: StopStrings | None = None
    end_token_ids: Collection[int] | None = None
    seed: int = 0
    index: int = 0
    on_tokens: TokenCallback | None = None
    on_round: RoundCallback | None = None

    @property
    def max_length(self) -> int:
        """Positions that a cache needs: a round never verifies past the last token."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True)
class Outcome:
    """What the host learns of one round of one row: numbers of its `Verdict` and `Proposal`.

    length  primaries that were sent to the target
    """

    accepted: int
    next_token: int
    level: int
    sibling: int
    sibling_row: int
    length: int
    tokens: Sequence[int]
    confidence: Sequence[float]
    entropy: Sequence[float]
    distance: Sequence[float]

    def emission(self) -> list[int]:
        """What the round says, before it is known where the text ends."""
        if self.sibling < 0:
            return [*self.tokens[: self.accepted], self.next_token]
        return [*self.tokens[: self.accepted], self.sibling, self.next_token]

    def path(self, rows: int) -> list[int]:
        """The first `rows` rows to commit: the anchor, accepted primaries, the sibling."""
        whole = list(range(self.accepted + 1))
        return (whole if self.sibling < 0 else [*whole, self.sibling_row])[:rows]

    def kinds(self) -> list[Emitted]:
        """`emission` with where each token came from."""
        said = [
            Emitted(token, "accepted", confidence)
            for token, confidence in zip_longest(
                self.tokens[: self.accepted], self.confidence[: self.accepted]
            )
        ]
        if self.sibling >= 0:
            said.append(Emitted(self.sibling, "sibling"))
        last: EmittedKind = "corrected" if self.level == CORRECTED else "bonus"
        return [*said, Emitted(self.next_token, last if self.tokens else "plain")]

    def record(self, emitted: int, spent: Spent, bands: Sequence[Band] = ()) -> RoundRecord:
        """The round as it goes on record, once it is known how many tokens the user got."""
        ended = emitted <= self.accepted  # an accepted primary was the text's last token
        return RoundRecord(
            drafted=len(self.tokens),
            verified=emitted if ended else self.length,
            accepted=min(self.accepted, emitted),
            emitted=emitted,
            level=ALL_ACCEPTED if ended else self.level,
            draft_s=spent.draft_s,
            verify_s=spent.verify_s,
            other_s=spent.other_s,
            confidence=tuple(self.confidence),
            entropy=tuple(self.entropy),
            rows=spent.rows,
            sibling=self.sibling >= 0 and not ended,
            bands=tuple(bands),
            distance=tuple(self.distance[:emitted]),
        )


@dataclass(frozen=True)
class Spent:
    """Seconds of a round as `RoundRecord` counts them, and rows of the target's pass."""

    draft_s: float
    verify_s: float
    other_s: float
    rows: int


class Text:
    """A request as it runs: tokens, records, and where it ends.

    Raises UserError for a wrong request.
    """

    def __init__(self, target: Target, request: Request) -> None:
        check_request(target, request.prompt_ids, request.max_new_tokens)
        self.request = request
        self.ends = end_ids(target, request.end_token_ids)
        rules, stop = request.rules, request.stop
        self.rules: RequestRules | None = None
        if rules is not None:
            self.rules = rules.bind(request.prompt_ids, self.ends, target.vocab_size, target.device)
        search = stop.start(min_new_tokens=rules.min_new_tokens if rules else 0) if stop else None
        self._ending = Ending(self.ends, request.max_new_tokens, search)
        device = target.device
        self.judge_draws = request_generator(request.seed, request.index, device)
        self.draft_draws = request_generator(request.seed, -1 - request.index, device)
        self.tokens: list[int] = []
        self.rounds: list[RoundRecord] = []
        self.fault: BadLogits | None = None

    @property
    def finished(self) -> bool:
        return self._ending.finish is not None or self.fault is not None

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def position(self) -> int:
        """Place in the text of the next token: 0 is the first of the prompt."""
        return len(self.request.prompt_ids) + len(self.tokens)

    def first(self, token: int) -> None:
        """The prompt's last row gave the first anchor."""
        self._emit(self._ending.cut([token]), lambda: [Emitted(token, "first")])

    def take(self, outcome: Outcome) -> int:
        """Emit what a round said, as far as the text goes: how many tokens that were."""
        kept = self._ending.cut(outcome.emission())
        self._emit(kept, lambda: outcome.kinds()[: len(kept)])
        return len(kept)

    def fail(self, fault: BadLogits) -> None:
        """No token can be chosen any more: the text ends with what it has."""
        self.fault = fault

    def generation(self, prefill_s: float, decode_s: float) -> Generation:
        """The finished text."""
        finish = self._ending.finish if self.fault is None else "fault"
        assert finish is not None, "the text has not ended"
        return Generation(self.tokens, finish, prefill_s, decode_s, self.rounds, self.fault)

    def _emit(self, tokens: list[int], kinds: Callable[[], list[Emitted]]) -> None:
        self.tokens += tokens
        if self.rules is not None:
            self.rules.extend(tokens)
        if self.request.on_tokens is not None:
            self.request.on_tokens(list(tokens))
        if self.request.on_round is not None:
            self.request.on_round(kinds())
