"""What crosses the boundaries of the runtime, as frozen dataclasses.

One round: the drafter makes a `Proposal`, the target turns it into a `Verdict`, the loop writes
a `RoundRecord`; a finished request is a `Generation`. Letters: B batch, G draft length, V vocab.

Counting rules (they make every published rate computable from the records alone):

* `len(generation.tokens) == 1 + sum(r.emitted for r in rounds)`: the 1 is the first anchor, which
  comes from the prompt's last row and belongs to no round.
* `accepted <= verified <= drafted`, and `emitted` is `accepted + 1` (the correction or the bonus),
  or just `accepted` when an accepted token ended the text: then nothing follows it, and `verified`
  is cut at it as well, so that no rate sees what the user never gets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

ALL_ACCEPTED = 0
"""`Verdict.level`: every verified token accepted up to the block's end, bonus drawn from p."""
CORRECTED = 2
"""`Verdict.level`: a token was rejected, its place taken by a draw from the residual."""
CUT = 3
"""`Verdict.level`: the block was cut before its end and everything verified was accepted."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """What one draft pass proposes after the anchor.

    tokens      [B, G] int64
    probs       [B, G, V] float32, the very distributions the tokens were drawn from;
                None: each token is a point mass (temperature 0, or a deterministic draft)
    confidence  [B, G] float32, predicted chance that the token is accepted given that all before
                it are; known before the token itself. None: the drafter has no confidence head
    entropy     [B, G] float32, nats, of the drafter at temperature 1 before any filter
    """

    tokens: Tensor
    probs: Tensor | None
    confidence: Tensor | None
    entropy: Tensor


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the target says about a proposal.

    accepted    [B] int64, length of the accepted prefix
    next_token  [B] int64, the token after it: the next anchor
    level       [B] int64, ALL_ACCEPTED | CORRECTED | CUT
    """

    accepted: Tensor
    next_token: Tensor
    level: Tensor


@dataclass(frozen=True)
class RoundRecord:
    """Counts and wall-clock seconds of one round of one request.

    drafted     tokens the drafter produced, the work that was paid for (0: a plain step)
    verified    of those, tokens the target judged, cut at an accepted end token
    accepted    length of the accepted prefix, cut at an accepted end token
    emitted     tokens the user received: accepted + 1, or accepted if an accepted token ended
    level       the verdict's level; ALL_ACCEPTED when an accepted token ended the text (no bonus)
    draft_s     block pass, heads, draws, and feeding taps to the draft context
    verify_s    target pass over [anchor, tokens], logits, verdict
    other_s     the rest: commit, end-token search, streaming callback
    confidence  per drafted token; empty if the drafter has no confidence head
    entropy     per drafted token
    """

    drafted: int
    verified: int
    accepted: int
    emitted: int
    level: int
    draft_s: float
    verify_s: float
    other_s: float
    confidence: tuple[float, ...]
    entropy: tuple[float, ...]


@dataclass(frozen=True)
class Generation:
    """One finished request.

    tokens     new tokens only, the end token included when there was one
    rounds     one record per round; empty for plain decoding
    finish     "end": an end token was emitted; "length": max_new_tokens were
    prefill_s  prompt to first token, that token included
    decode_s   everything after the first token
    """

    tokens: list[int]
    finish: Literal["end", "length"]
    prefill_s: float
    decode_s: float
    rounds: list[RoundRecord] = field(default_factory=list)
