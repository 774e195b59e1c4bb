"""What crosses the boundaries of the runtime, as frozen dataclasses.

One round: the drafter makes a `Proposal`, a policy a `Plan` of it, the target a `Verdict`, the loop
writes a `RoundRecord`; a finished request is a `Generation`. Letters: B batch, G draft length,
m siblings per position, V vocab.

Counting rules (they make every published rate computable from the records alone):

* `len(generation.tokens) == 1 + sum(r.emitted for r in rounds)`: the 1 is the first anchor, which
  comes from the prompt's last row and belongs to no round.
* `accepted <= verified <= drafted` count primaries. `emitted` is `accepted + 1` (the correction or
  the bonus), one more where a sibling was accepted (its own bonus follows it), and fewer where an
  end token came first: then nothing follows it, and `verified` is cut at an accepted end token as
  well, so that no rate sees what the user never gets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dspark.runtime.sampling import BadLogits

ALL_ACCEPTED = 0
"""`Verdict.level`: every verified token accepted up to the block's end, bonus drawn from p."""
SIBLING = 1
"""`Verdict.level`: a primary was rejected, one of its siblings accepted and followed by a bonus."""
CORRECTED = 2
"""`Verdict.level`: primary and siblings were rejected, their place taken by what is left of p."""
CUT = 3
"""`Verdict.level`: the block was cut before its end and everything verified was accepted."""

Finish = Literal["end", "stop", "length", "fault"]
"""What ended a text."""

EmittedKind = Literal["first", "accepted", "sibling", "corrected", "bonus", "plain"]
"""Where a token came from, see `Emitted`."""

Band = Literal["high", "mid", "low"]
"""Confidence of a position, by the thresholds of the policy in use."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """What one draft pass proposes after the anchor.

    tokens      [B, G] int64, the primaries
    probs       [B, G, V] float32, the very distributions the tokens were drawn from;
                None: each token is a point mass (temperature 0, or a deterministic draft)
    confidence  [B, G] float32, predicted chance that the token is accepted given that all before
                it are; known before the token itself. None: the drafter has no confidence head
    entropy     [B, G] float32, nats, of the drafter at temperature 1 before any filter
    siblings    [B, G, m] int64, what else could stand at each position, in the order to be tried;
                drawn from `probs` without replacement and without the primary, or with `probs`
                None the next best tokens; -1 where no token was left. None: none were asked for
    fault       [B] int64, see `dspark.runtime.faults`; None: the logits are known to be fine
    """

    tokens: Tensor
    probs: Tensor | None
    confidence: Tensor | None
    entropy: Tensor
    siblings: Tensor | None = None
    fault: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What of a proposal is sent to the target.

    lengths   [B] int64 in 0..G: primaries; the block is cut after them
    siblings  [B, G] int64 in 0..m: how many of the siblings at each position; none behind the cut

    Lossless only if whoever decides to send x_k saw nothing that depends on x_k: the decision may
    use x_1..x_{k-1}, confidence and entropy up to k. The number of siblings at k may depend on
    anything but the siblings themselves and the draws of the verdict.
    """

    lengths: Tensor
    siblings: Tensor

    @classmethod
    def whole(cls, proposal: Proposal, siblings: int = 0) -> Plan:
        """Everything that was drafted, with the same number of siblings at each position."""
        batch, length = proposal.tokens.shape
        full = proposal.tokens.new_full((batch,), length)
        return cls(full, torch.full_like(proposal.tokens, siblings))

    @classmethod
    def chain(cls, proposal: Proposal, lengths: Tensor) -> Plan:
        """The first `lengths` [B] primaries and no siblings."""
        return cls(lengths, torch.zeros_like(proposal.tokens))


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the target says about a proposal.

    accepted     [B] int64, length of the accepted prefix of primaries
    next_token   [B] int64, the last token of the round: the next anchor
    level        [B] int64, ALL_ACCEPTED | SIBLING | CORRECTED | CUT
    sibling      [B] int64, the sibling accepted between the two, or -1
    sibling_row  [B] int64, its row in the block, or -1
    fault        [B] int64, see `dspark.runtime.faults`; 0 where all logits were finite
    distance     [B, K] float32 of the K primaries sent, total variation between the law of what
                 came out of a position and the target's, 0 where the position was not relaxed or
                 not reached; None: nothing was relaxed, the law is the target's
    """

    accepted: Tensor
    next_token: Tensor
    level: Tensor
    sibling: Tensor
    sibling_row: Tensor
    fault: Tensor
    distance: Tensor | None = None


@dataclass(frozen=True)
class Emitted:
    """One token as the user receives it.

    kind        where it came from: "first" from the prompt's last row, "accepted" and "sibling"
                from the drafter, "corrected" and "bonus" from the target's verdict, "plain" from a
                step without a draft
    confidence  the drafter's for an accepted primary; None for everything else
    """

    token: int
    kind: EmittedKind
    confidence: float | None = None


@dataclass(frozen=True)
class RoundRecord:
    """Counts and wall-clock seconds of one round of one request.

    drafted     tokens the drafter produced, the work that was paid for (0: a plain step)
    verified    of those, primaries the target judged, cut at an accepted end token
    accepted    length of the accepted prefix of primaries, cut at an accepted end token
    emitted     tokens the user received; see the counting rules above
    level       the verdict's level; ALL_ACCEPTED when an accepted token ended the text (no bonus)
    draft_s     block pass, heads, draws, and feeding taps to the draft context
    verify_s    target pass over the rows, logits, verdict
    other_s     the rest: commit, end-token search, streaming callback
    confidence  per drafted token; empty if the drafter has no confidence head
    entropy     per drafted token
    rows        rows of the target's pass: anchor, primaries, siblings, padding; None: drafted + 1
    sibling     whether an accepted sibling was emitted
    bands       per drafted position, as the policy saw it; empty if it has none
    distance    per emitted position, see `Verdict.distance`; empty unless acceptance was relaxed
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
    rows: int | None = None
    sibling: bool = False
    bands: tuple[Band, ...] = ()
    distance: tuple[float, ...] = ()

    @property
    def target_rows(self) -> int:
        """Rows of the target's pass: `rows`, by default those of an uncut chain."""
        return self.drafted + 1 if self.rows is None else self.rows


@dataclass(frozen=True)
class Generation:
    """One finished request.

    tokens     new tokens only, the end token included when there was one
    rounds     one record per round; empty for plain decoding
    finish     "end": an end token was emitted; "stop": a stop string was completed; "length":
               max_new_tokens were emitted; "fault": no token could be chosen any more
    fault      what ended it then: only many requests at once end like that, a single one raises it
    prefill_s  prompt to first token, that token included
    decode_s   everything after the first token
    """

    tokens: list[int]
    finish: Finish
    prefill_s: float
    decode_s: float
    rounds: list[RoundRecord] = field(default_factory=list)
    fault: BadLogits | None = None
