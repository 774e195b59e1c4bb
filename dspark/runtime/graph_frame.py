"""One frame on the device, from the anchor to the next anchor: what a graph records.

    draft     block pass of the drafter, sequential head
    verify    target pass over [anchor, x_1..x_L], verdict
    settle    what was accepted, the next anchor, tokens left; the drafter's context reads the rest

A frame without a drafter is a plain step: one row, one token. Frames of several sizes may take
turns on the same seats: each drafts the whole block and sends what its size allows; a plain step
among them leaves its taps to whoever drafts next (`graph_taps`). No tensor here
is read by the host and no shape depends on a value. What the host will want to know leaves as a
letter (`dspark_kernels.settle`).

Letters: B seats, G drafted, L <= G primaries sent, N taps, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark import ops
from dspark.k3.static.decode import StepOutput
from dspark.runtime.graph_draft import Drafting
from dspark.runtime.graph_seats import Chances, GraphSeats
from dspark.runtime.graph_taps import WaitingTaps
from dspark.runtime.static_pass import StaticPass, StaticSeats


@dataclass(frozen=True, eq=False)
class FrameResult:
    """letter [B, n] float64; chosen: experts of every layer, see `StepOutput`."""

    letter: Tensor
    chosen: list[Tensor]


@dataclass(frozen=True, eq=False)
class GraphFrame:
    """A frame of one size.

    Args:
        decoder, cache: The target.
        vocab_size: Ids that are tokens.
        drafting: None: frames are plain steps.
        length: L, at most the trained block; 0: a plain step.
        drafted: G, 0 in a plain step.
        chances: Of all seats.
        turns: Whether frames of other sizes take turns with it.
        waiting: Of a plain step that does so, where its taps wait.
    """

    decoder: StaticPass
    cache: StaticSeats
    vocab_size: int
    seats: GraphSeats
    drafting: Drafting | None
    length: int
    drafted: int
    chances: Chances
    turns: bool = False
    waiting: WaitingTaps | None = None

    def run(self) -> FrameResult:
        """Queue the whole frame."""
        seats, cache = self.seats, self.cache
        draft = None
        if self.turns:  # the frame before did not know how many this one may send
            seats.limit(self.length)
        tokens = seats.anchor.unsqueeze(1)
        if self.drafting is not None and self.length:
            draft = self.drafting.propose(seats, self.drafted, self.chances)
            tokens = torch.cat((tokens, draft.tokens[:, : self.length]), dim=1)
        taps = None if self.drafting is None else self.drafting.drafter.taps
        out = self.decoder.step(tokens, cache, taps=taps)
        drafted = tokens[:, 1:] if draft is None else draft.tokens
        judged = self._judge(out, drafted[:, : self.length], draft)
        count, letter = ops.settle(
            drafted,
            judged.accepted,
            judged.next_token,
            judged.level,
            judged.fault,
            seats.ends,
            ops.Settled(
                seats.anchor,
                seats.left,
                seats.sent,
                cache.lengths,
                None if cache.folds else cache.accepted,
            ),
            None if draft is None else draft.entropy,
            None if draft is None or draft.confidence is None else self._confidence(draft),
            None if draft is None else draft.peak,
        )
        if cache.folds and cache.waits:  # what waited in the slots was folded with the row
            cache.accepted.zero_()
        if out.taps is not None:
            self._remember(out.taps, count)
        return FrameResult(letter, out.chosen)

    def _remember(self, taps: Tensor, count: Tensor) -> None:
        """What the draft context has to read, now or later."""
        assert self.drafting is not None
        if self.waiting is not None:
            self.waiting.add(taps, count)
        else:
            self.drafting.drafter.extend(self.drafting.context, taps, count)

    def _judge(self, out: StepOutput, tokens: Tensor, draft: ops.Drafted | None) -> ops.Judged:
        logits = self.decoder.logits(out.last)[..., : self.vocab_size]
        chances, seats = self.chances, self.seats
        position, count = self.cache.lengths, tokens.shape[1] + 1
        scores = law = None
        if draft is not None and not chances.sampling.greedy:
            scores = draft.scores[:, : self.length].contiguous()
            law = type(draft.law)(*(part[:, : self.length].contiguous() for part in draft.law))
        return ops.verify_sample(
            logits,
            tokens,
            seats.sent,
            scores=scores,
            law=law,
            coins=chances.coins(seats.seed, position, ops.JUDGE_STREAM, count),
            temperature=chances.temperature,
            top_k=chances.top_k,
            top_p=chances.top_p,
            where=None if self.drafting is None else self.drafting.head.where,
        )

    def _confidence(self, draft: ops.Drafted) -> Tensor:
        assert self.drafting is not None
        assert draft.confidence is not None
        calibration = self.drafting.drafter.calibration
        if calibration is None:
            return torch.sigmoid(draft.confidence.float())
        return calibration.confidence(draft.confidence, self.chances.sampling)
