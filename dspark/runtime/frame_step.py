"""The end of a frame on the device: which tokens count, and what every row goes on from.

    said     x_1..x_a, an accepted sibling, the verdict's own token
    kept     said, up to the first end token; nothing in an idle row
    left     tokens that may still come; 0 where the text has ended: the row is idle from then on

No shape here depends on a value, and nothing is read by the host: this and the passes before it are
what a captured frame replays.

Letters: B rows, L primaries sent, V vocab.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark import ops
from dspark.runtime.records import Plan, Proposal, Verdict
from dspark.runtime.tree import Rows, build_rows


@dataclass(frozen=True, eq=False)
class Kept:
    """count [B] int64, tokens that the user gets and rows to commit; left [B] int64."""

    count: Tensor
    left: Tensor


def marks(ends: Collection[int], like: Tensor) -> Tensor:
    """The end tokens of a request as a mask over the vocabulary, shaped and placed as `like` [V].

    Whatever their number, the shape is the same: a frame that was recorded takes any request.
    """
    mask = torch.zeros(len(like), dtype=torch.bool)
    mask[[token for token in ends if 0 <= token < len(mask)]] = True
    return mask.to(like.device)


def keep(tokens: Tensor, verdict: Verdict, left: Tensor, ends: Tensor) -> Kept:
    """Cut what a verdict says about primaries `tokens` [B, L] at ids that `ends` [B, V] bool marks.

    The caller has not sent more primaries than `left` - 1.
    """
    batch, sent = tokens.shape
    step = torch.arange(sent + 2, device=tokens.device)
    accepted = verdict.accepted.unsqueeze(1)
    rescued = (verdict.sibling >= 0).unsqueeze(1)
    said = torch.cat((tokens, tokens.new_zeros(batch, 2)), dim=1)
    said = torch.where(step < accepted, said, verdict.next_token.unsqueeze(1))
    said = torch.where(rescued & (step == accepted), verdict.sibling.unsqueeze(1), said)
    return Kept(*ops.up_to_the_end(said, (accepted + rescued + 1).squeeze(1), left, ends))


@dataclass(frozen=True, eq=False)
class Pass:
    """What a verify slot runs: tokens, valid [B, R], parents as `Target.forward` takes them.

    rows is the layout where siblings may be among them, None for a chain.
    """

    tokens: Tensor
    valid: Tensor
    rows: Rows | None

    @property
    def parents(self) -> Tensor | None:
        return None if self.rows is None else self.rows.forward_parents


def lay_out(
    anchor: Tensor, proposal: Proposal, plan: Plan, live: Tensor, primaries: int, sibling_rows: int
) -> Pass:
    """A pass of 1 + `primaries` + `sibling_rows` rows, whatever the plan; idle rows are padding."""
    if sibling_rows and primaries:
        rows = build_rows(anchor, proposal, plan, primaries=primaries, sibling_rows=sibling_rows)
        valid = rows.valid & live.unsqueeze(1)
        return Pass(rows.tokens, valid, Rows(rows.tokens, rows.parents, valid, rows.sibling_rows))
    tokens = torch.cat((anchor.unsqueeze(1), proposal.tokens[:, :primaries]), dim=1)
    step = torch.arange(tokens.shape[1], device=tokens.device)
    return Pass(tokens, (step <= plan.lengths.unsqueeze(1)) & live.unsqueeze(1), None)
