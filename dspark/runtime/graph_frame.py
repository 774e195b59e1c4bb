"""One frame on the device, from the anchor to the next anchor: what a graph records.

    draft     block pass of the drafter, sequential head
    verify    target pass over [anchor, x_1..x_L], verdict
    commit    accepted rows in cache and draft context, next anchor, tokens left

A frame without a drafter is a plain step: one row, one token. No tensor here is read by the host
and no shape depends on a value. What the host will want to know leaves as a letter:

    [accepted, next token, level, -1, -1, fault, sent] + tokens + entropy + confidence, float64

Letters: B seats, L primaries sent, N taps, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark import ops
from dspark.draft.anchors import block_inputs
from dspark.draft.context import DraftContext
from dspark.draft.heads import VanillaMarkovHead
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.k3.static.cache import StaticCache
from dspark.k3.static.decode import StaticDecoder, StepOutput
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.faults import fault_of
from dspark.runtime.frame_step import keep
from dspark.runtime.graph_seats import Chances, GraphSeats
from dspark.runtime.records import Verdict

HEADS = 7
"""Numbers of a letter before its tokens."""


@dataclass(frozen=True, eq=False)
class Drafting:
    """A drafter with the target's tables and its context, in place and of fixed shapes.

    Raises UserError for a sequential head that the sampling op does not have.
    """

    drafter: DSparkDrafter
    head: DraftHead
    context: DraftContext

    def __post_init__(self) -> None:
        if not isinstance(self.drafter.markov_head, VanillaMarkovHead):
            kind = self.drafter.config.markov_head_type
            raise UserError(
                f"markov_head_type {kind!r}: captured frames draft with a vanilla head only; use "
                "FrameScheduler or SpeculativeDecoder"
            )

    def propose(self, seats: GraphSeats, length: int, chances: Chances) -> ops.Drafted:
        """A block for every seat, cut to ``length`` slots."""
        drafter, config = self.drafter, self.drafter.config
        block = block_inputs(seats.anchor, config.block_size, config.mask_token_id)
        hidden = drafter.block_hidden(self.head.embed(block), self.context)[:, :length]
        place = self.context.lengths
        coins = chances.coins(seats.seed, place, ops.DRAFT_STREAM, config.block_size)
        confidence = drafter.confidence_head
        return ops.markov_sample(
            self.head.logits(hidden),
            seats.anchor,
            drafter.markov_head.markov_w1.weight,
            drafter.markov_head.markov_w2.weight,
            coins=None if coins is None else coins[:, :length],
            temperature=chances.temperature,
            top_k=chances.top_k,
            top_p=chances.top_p,
            ids=self.head.ids,
            hidden=hidden,
            confidence=None
            if confidence is None
            else (confidence.proj.weight, confidence.proj.bias),
        )


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
        length: L, at most the trained block; 0: a plain step that feeds the drafter's context.
        chances: Of all seats.
    """

    decoder: StaticDecoder
    cache: StaticCache
    vocab_size: int
    seats: GraphSeats
    drafting: Drafting | None
    length: int
    chances: Chances

    def run(self) -> FrameResult:
        """Queue the whole frame."""
        seats, cache, length = self.seats, self.cache, self.length
        draft = None
        tokens = seats.anchor.unsqueeze(1)
        if self.drafting is not None and length:
            draft = self.drafting.propose(seats, length, self.chances)
            tokens = torch.cat((tokens, draft.tokens), dim=1)
        taps = None if self.drafting is None else self.drafting.drafter.taps
        out = self.decoder.step(tokens, cache, taps=taps)
        sent = (seats.left - 1).clamp(0, length)
        verdict = self._judge(out, tokens[:, 1:], sent, draft)
        kept = keep(tokens[:, 1:], verdict, seats.left, seats.ends)
        cache.commit(kept.count)
        if self.drafting is not None:
            assert out.taps is not None
            self.drafting.drafter.extend(self.drafting.context, out.taps, kept.count)
        seats.anchor.copy_(verdict.next_token)
        seats.left.copy_(kept.left)
        return FrameResult(self._letter(verdict, sent, draft), out.chosen)

    def _judge(
        self, out: StepOutput, tokens: Tensor, sent: Tensor, draft: ops.Drafted | None
    ) -> Verdict:
        logits = self.decoder.logits(out.last)[..., : self.vocab_size]
        chances, seats = self.chances, self.seats
        position, count = self.cache.lengths, tokens.shape[1] + 1
        sampled = draft is not None and not chances.sampling.greedy
        judged = ops.verify_sample(
            logits,
            tokens,
            sent,
            scores=draft.scores if draft is not None and sampled else None,
            law=draft.law if draft is not None and sampled else None,
            coins=chances.coins(seats.seed, position, ops.JUDGE_STREAM, count),
            temperature=chances.temperature,
            top_k=chances.top_k,
            top_p=chances.top_p,
            where=None if self.drafting is None else self.drafting.head.where,
        )
        none = torch.full_like(judged.accepted, -1)
        fault = judged.fault
        if draft is not None:
            drafters = -fault_of(draft.peak.unsqueeze(-1))
            fault = torch.where(drafters != 0, drafters, fault)
        return Verdict(judged.accepted, judged.next_token, judged.level, none, none, fault)

    def _letter(self, verdict: Verdict, sent: Tensor, draft: ops.Drafted | None) -> Tensor:
        heads = [
            verdict.accepted,
            verdict.next_token,
            verdict.level,
            verdict.sibling,
            verdict.sibling_row,
            verdict.fault,
            sent,
        ]
        parts = [torch.stack(heads, dim=1)]
        if draft is not None and self.drafting is not None:
            parts += [draft.tokens, draft.entropy]
            if draft.confidence is not None:
                parts.append(self._confidence(draft.confidence))
        return torch.cat([part.double() for part in parts], dim=1)

    def _confidence(self, scores: Tensor) -> Tensor:
        assert self.drafting is not None
        calibration = self.drafting.drafter.calibration
        if calibration is None:
            return torch.sigmoid(scores.float())
        return calibration.confidence(scores, self.chances.sampling)
