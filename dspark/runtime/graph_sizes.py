"""Which recorded frame comes next, from letters of frames that have ended.

    sizes            0 (a plain step), 1, 2, 4 primaries, and the whole draft: a graph each
    wish             what the policy would have verified of a frame's draft, had it been sent whole
    size of a frame  the smallest that holds the running mean of wishes (`frame_sizes`), over seats

A frame of any size drafts the whole block, so that a small one tells whether a larger one would
pay. The letters of frames up to n - 2 are read when frame n is queued: the choice waits for nothing
and sees nothing of what it decides about, so every policy leaves the law as it is.

Letters: B seats, G drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.errors import UserError
from dspark.runtime.frame_sizes import Wish
from dspark.runtime.policies.auto import Auto
from dspark.runtime.policies.frontier import Policy, plan_block
from dspark.runtime.records import Proposal
from dspark.runtime.requests import Outcome

SMALL = (1, 2, 4)


def frame_sizes(policy: Policy, block: int) -> tuple[int, ...]:
    """Ascending sizes that a policy's frames are recorded in; 0 for one that may not speculate.

    Raises UserError for a policy that a frame cannot serve.
    """
    if policy.siblings:
        raise UserError("policy: recorded frames have no rows for siblings; leave out the bands")
    most = block if isinstance(policy, Auto) else policy.draft_length(block)
    most = min(most, block)
    plain = (0,) if isinstance(policy, Auto) else ()
    if policy.name == "fixed":
        return (most,)
    return (*plain, *(size for size in SMALL if size < most), most)


class SizeRule:
    """The next size for the frames of a run. `policy` is in front of its first round."""

    def __init__(self, policy: Policy, sizes: Sequence[int], seats: int, block: int) -> None:
        self.policy, self._block = policy, block
        self._drafting = tuple(size for size in sizes if size)
        self._wishes = [Wish() for _ in range(seats)]

    def join(self, seat: int) -> None:
        """A new text: nothing is known of it."""
        self._wishes[seat] = Wish()

    def next(self, seats: Sequence[int]) -> int:
        """The size of a frame for the texts in these seats."""
        if not self._drafting or not self.policy.draft_length(self._block):
            return 0
        return max(self._wishes[seat].size(self._drafting) for seat in seats)

    def learn(self, outcomes: dict[int, Outcome]) -> None:
        """What a frame said of these seats, before the texts take it."""
        drafts = {seat: x for seat, x in outcomes.items() if len(x.entropy) and x.tokens}
        if len(self._drafting) < 2 or not drafts:
            return
        slots = max(len(x.entropy) for x in drafts.values())
        confident = all(len(x.confidence) for x in drafts.values())
        limits = torch.tensor([len(x.entropy) for x in drafts.values()])
        proposal = Proposal(
            torch.zeros(len(drafts), slots, dtype=torch.int64),
            None,
            _table([x.confidence for x in drafts.values()], slots) if confident else None,
            _table([x.entropy for x in drafts.values()], slots),
        )
        wished = plan_block(self.policy, proposal, limits)
        for seat, wanted in zip(drafts, wished.lengths.tolist(), strict=True):
            self._wishes[seat].learn(wanted)


def _table(rows: Sequence[Sequence[float]], slots: int) -> torch.Tensor:
    """[B, slots] float32, zero behind the end of a row."""
    return torch.tensor([[*row, *[0.0] * (slots - len(row))] for row in rows])
