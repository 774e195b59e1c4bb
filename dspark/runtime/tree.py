"""The rows of a verify pass: the anchor, the primaries, and behind them the siblings as leaves.

    row      0        1 .. L          L+1 ..
    token    anchor   x_1 .. x_L      siblings of x_1, then those of x_2, ...
    parent   -1       0 .. L-1        k-1 for a sibling of x_k

A sibling of x_k stands where x_k stands: it sees the anchor and x_1..x_{k-1}. Without siblings the
rows are a chain, which is what a target runs when it is given no parents.

Letters: B batch, L primaries sent, m siblings per position, S sibling rows, R = 1 + L + S rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.runtime.records import Plan, Proposal, Verdict


@dataclass(frozen=True, eq=False)
class Rows:
    """What a verify pass runs.

    tokens        [B, R] int64
    parents       [B, R] int64, row index of the parent; -1 for the anchor, 0 for padding
    valid         [B, R] bool; primaries behind a cut and unused sibling rows are padding, token 0
    sibling_rows  [B, L, m] int64, row of each sibling, -1 where it is not sent
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    sibling_rows: Tensor

    @property
    def primaries(self) -> int:
        """L."""
        return self.sibling_rows.shape[1]

    @property
    def forward_parents(self) -> Tensor | None:
        """What `Target.forward` takes: None for a chain."""
        return self.parents if self.tokens.shape[1] > 1 + self.primaries else None

    def path(self, verdict: Verdict, limit: Tensor | None = None) -> Tensor:
        """[B, L + 2] int64 rows to commit, -1 padded at the end, at most `limit` [B] of them.

        These are [anchor, x_1..x_a] and the accepted sibling: everything before the new anchor.
        """
        steps = torch.arange(self.primaries + 2, device=self.tokens.device)
        last = verdict.accepted.unsqueeze(1)
        path = torch.where(steps <= last, steps, -1)
        path = torch.where(steps == last + 1, verdict.sibling_row.unsqueeze(1), path)
        return path if limit is None else torch.where(steps < limit.unsqueeze(1), path, -1)


def build_rows(
    anchor: Tensor,
    proposal: Proposal,
    plan: Plan,
    *,
    primaries: int | None = None,
    sibling_rows: int | None = None,
) -> Rows:
    """Lay out what `plan` sends of `proposal` after `anchor` [B].

    `primaries` L and `sibling_rows` S fix the shape, for passes of a captured size: the block is
    then cut at L and siblings beyond S are left out, the last positions first. None means as many
    as the plan needs, and waits for the device. `plan` must not exceed the proposal.
    """
    length = plan.lengths.max().item() if primaries is None else primaries
    length = min(int(length), proposal.tokens.shape[1])
    lengths = plan.lengths.clamp(max=length)
    batch, device = anchor.shape[0], anchor.device
    inside = torch.arange(length, device=device) < lengths.unsqueeze(1)
    offered = _offered(proposal, plan, inside)
    slot = offered.flatten(1).long().cumsum(dim=1) - 1
    if sibling_rows is None:
        sibling_rows = int(slot[:, -1].max()) + 1 if slot.numel() else 0
    sent = offered & (slot < sibling_rows).view_as(offered)
    row = torch.where(sent, slot.view_as(offered) + 1 + length, -1)

    chain = torch.where(inside, proposal.tokens[:, :length], 0)
    ids = torch.zeros_like(row) if proposal.siblings is None else proposal.siblings[:, :length]
    # One column more than there are rows: whatever is not sent is written there, and dropped.
    columns = 1 + length + sibling_rows
    at = torch.where(sent, row, columns).flatten(1)
    tokens = anchor.new_zeros(batch, columns + 1)
    tokens[:, : 1 + length] = torch.cat((anchor.unsqueeze(1), chain), dim=1)
    parents = torch.zeros_like(tokens)
    parents[:, : 1 + length] = torch.arange(-1, length, device=device)
    parents[:, 1 : 1 + length].masked_fill_(~inside, 0)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    valid[:, : 1 + length] = torch.cat((inside.new_ones(batch, 1), inside), dim=1)
    above = torch.arange(length, device=device).view(1, length, 1).expand_as(row)
    tokens.scatter_(1, at, ids.flatten(1))
    parents.scatter_(1, at, above.flatten(1))
    valid.scatter_(1, at, sent.flatten(1))
    return Rows(tokens[:, :columns], parents[:, :columns], valid[:, :columns], row)


def _offered(proposal: Proposal, plan: Plan, inside: Tensor) -> Tensor:
    """[B, L, m] bool: siblings that the plan wants, that exist, and that are not behind the cut."""
    batch, length = inside.shape
    if proposal.siblings is None:
        return inside.new_zeros(batch, length, 0)
    siblings = proposal.siblings[:, :length]
    number = torch.arange(siblings.shape[2], device=siblings.device)
    wanted = number < plan.siblings[:, :length].unsqueeze(-1)
    return wanted & (siblings >= 0) & inside.unsqueeze(-1)
