"""What a policy may know: confidence and entropy of each row's next undecided position, no more.

A block stays lossless under any cut as long as the decision to verify position k rests on the past
and on x_1..x_{k-1}. Confidence c_k and entropy H_k are known before x_k is drawn; c_{k+1} has seen
x_k, and so has everything after it. A policy therefore never gets the block: it gets a `Frontier`,
which shows c_k and H_k of one position for each row and reveals those of k+1 only once k is
decided, for good. Tokens are not in reach at all.

    position k = frontier.position + 1     frontier.confidence = c_k     frontier.entropy = H_k
    frontier.extend(rows)                  verify k in these rows, then look at k + 1 there

What is never extended is cut. The number of siblings tried at k is decided together with k.

Letters: B batch rows, G slots of the proposal, k position from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.records import Band, Plan, Proposal, RoundRecord

LONGEST_DRAFT = 8
"""`max_draft` where none is given, if the block is no shorter."""

Reveal = Callable[[Tensor], tuple[Tensor | None, Tensor]]
"""Positions decided so far [B] -> confidence and entropy [B] of the one after them."""


class Frontier:
    """The open end of every row's block. All tensors are [B], on the proposal's device.

    slots       int, G: positions drafted
    position    int64, positions decided so far: all of them are going to be verified
    open        bool, whether the row has a next position
    entropy     float32, H of the next position; +inf where there is none
    width       int64, rows of the target that the next position would take
    rows        int64, rows of the target taken so far, the anchor's included
    """

    def __init__(self, reveal: Reveal, limits: Tensor, slots: int) -> None:
        self.slots = slots
        self._reveal = reveal
        self._limits = limits
        self.position = torch.zeros_like(limits)
        self.rows = torch.ones_like(limits)
        self._counts: list[tuple[Tensor, Tensor]] = []
        self._look()

    @property
    def confidence(self) -> Tensor:
        """float32, c of the next position; 0 where there is none.

        Raises UserError for a drafter without a confidence head.
        """
        if self._confidence is None:
            raise UserError(
                "policy: this drafter has no confidence head, which the policy reads; use "
                "`fixed` or `entropy`"
            )
        return self._confidence

    @property
    def width(self) -> Tensor:
        return torch.ones_like(self.position)

    def extend(self, rows: Tensor, siblings: Tensor | None = None) -> None:
        """Verify the next position of these rows ([B] bool; closed rows are left as they are).

        siblings [B] int64: how many siblings stand by there; None: none.
        """
        rows = rows & self.open
        taken = rows.long()
        self.position, before = self.position + taken, self.position
        if siblings is not None:
            self._counts.append((before, torch.where(rows, siblings, 0)))
            taken = taken + self._counts[-1][1]
        self.rows = self.rows + taken
        self._look()

    def extend_unseen(self, count: int) -> None:
        """Verify the next `count` positions of every row, without a look at any of them."""
        reached = torch.minimum(self.position + count, self._limits)
        self.rows = self.rows + (reached - self.position)
        self.position = reached
        self._look()

    def decided(self) -> Plan:
        """The plan so far."""
        slots = self.slots
        table = self.position.new_zeros((self.position.shape[0], slots))
        for position, counts in self._counts:
            # a row that was not extended adds 0; past its end the index only has to be legal
            table.scatter_add_(1, position.clamp(max=slots - 1).unsqueeze(1), counts.unsqueeze(1))
        return Plan(self.position, table)

    def _look(self) -> None:
        self.open = self.position < self._limits
        confidence, entropy = self._reveal(self.position)
        self.entropy = torch.where(self.open, entropy, torch.inf)
        self._confidence = None if confidence is None else torch.where(self.open, confidence, 0.0)


class Policy(Protocol):
    """How many drafted tokens are verified, decided position by position.

    One object serves one request, or one batch whose rows are decided together. What it learns is
    its own: `fresh` gives the next request a policy that has learnt nothing.
    """

    @property
    def name(self) -> str: ...

    @property
    def siblings(self) -> int:
        """The most siblings it asks for at a position."""
        ...

    @property
    def needs_confidence(self) -> bool: ...

    def draft_length(self, block_size: int) -> int:
        """Tokens to draft in the next round, from earlier rounds alone; 0: a plain step."""
        ...

    def plan(self, frontier: Frontier) -> None:
        """Extend the rows of a proposal for as long as verifying is worth it."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """Learn from a finished round of one row."""
        ...

    def bands(self, confidence: Sequence[float]) -> tuple[Band, ...]:
        """In which band each position of a block was; empty for a policy without bands."""
        ...

    def fresh(self) -> Policy:
        """The same policy as it was before its first round."""
        ...

    def settings(self) -> dict[str, Any]:
        """Its name and every value that its decisions rest on, for JSON."""
        ...


def plan_block(policy: Policy, proposal: Proposal, limits: Tensor | None = None) -> Plan:
    """Ask a policy where to cut each row of a proposal and how many siblings to send.

    limits [B] int64, each 0..G: the most that may be verified of a row, whatever the policy says
    (what is left of its answer, or an empty slot); None: G. Waits for no device.

    Raises UserError if the policy reads a confidence and the drafter has none.
    """
    batch, slots = proposal.tokens.shape
    if limits is None:
        limits = proposal.tokens.new_full((batch,), slots)
    if slots == 0:
        return Plan(torch.zeros_like(limits), limits.new_zeros((batch, 0)))
    frontier = Frontier(_revealer(proposal.confidence, proposal.entropy), limits, slots)
    policy.plan(frontier)
    return frontier.decided()


def _revealer(confidence: Tensor | None, entropy: Tensor) -> Reveal:
    """The block's features, out of reach behind a function of the positions decided."""
    last = entropy.shape[1] - 1

    def reveal(position: Tensor) -> tuple[Tensor | None, Tensor]:
        index = position.clamp(max=last).unsqueeze(1)
        shown = None if confidence is None else confidence.gather(1, index).squeeze(1)
        return shown, entropy.gather(1, index).squeeze(1)

    return reveal
