"""The two ways to judge what was sent: by the argmax, or by drawing.

Greedy decoding compares ids. Sampling needs p and q: chances for the primaries, token by token or
as a block, the ladder of siblings at the position where they ended, and one last draw.

Letters: B batch, K primaries sent, m siblings per position, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dspark.runtime.block_verify import block_chances, block_weights, largest
from dspark.runtime.records import Plan, Proposal
from dspark.runtime.relaxed import Relaxed, relaxed_distance
from dspark.runtime.sampling import SamplingParams, draw_at, to_probs
from dspark.runtime.siblings import ladder
from dspark.runtime.tree import Rows

Method = Literal["token", "block"]


@dataclass(frozen=True, eq=False)
class Sent:
    """The part of a proposal that the target has seen.

    tokens [B, K]; probs [B, K, V] or None; confidence [B, K] or None; lengths [B];
    inside [B, K] bool, before the cut; siblings and sibling_rows [B, K, m], -1 where not sent
    """

    tokens: Tensor
    probs: Tensor | None
    confidence: Tensor | None
    lengths: Tensor
    inside: Tensor
    siblings: Tensor
    sibling_rows: Tensor

    @classmethod
    def of(cls, proposal: Proposal, count: int, plan: Plan | None, rows: Rows | None) -> Sent:
        """The first `count` positions; siblings only where `rows` says which row is whose."""
        tokens, probs, confidence = proposal.tokens, proposal.probs, proposal.confidence
        tokens = tokens[:, :count]
        lengths = tokens.new_full((tokens.shape[0],), count)
        if plan is not None:
            lengths = torch.minimum(plan.lengths, lengths)
        none = tokens.new_empty(*tokens.shape, 0)
        siblings, sibling_rows = none, none
        if rows is not None and proposal.siblings is not None:
            siblings, sibling_rows = proposal.siblings[:, :count], rows.sibling_rows
        return cls(
            tokens=tokens,
            probs=None if probs is None else probs[:, :count],
            confidence=None if confidence is None else confidence[:, :count],
            lengths=lengths,
            inside=torch.arange(count, device=tokens.device) < lengths.unsqueeze(1),
            siblings=siblings,
            sibling_rows=sibling_rows,
        )

    @property
    def count(self) -> int:
        """K."""
        return self.tokens.shape[1]

    @property
    def width(self) -> int:
        """m, 0 where there is no position that could have siblings."""
        return self.siblings.shape[2] if self.count else 0

    @property
    def batch(self) -> Tensor:
        """0..B-1, the index of a row's own entry."""
        return torch.arange(len(self.lengths), device=self.lengths.device)

    def position(self, accepted: Tensor) -> Tensor:
        """[B] the position after a prefix; some position in range where there is none. K >= 1."""
        return accepted.clamp(max=self.count - 1)

    def rescuers(self, accepted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Siblings, their rows and whether each is tried, [B, m], at the position after a prefix.

        None is tried where the prefix ends at the cut.
        """
        at = self.position(accepted)
        rows = self.sibling_rows[self.batch, at]
        tried = (rows >= 0) & (accepted < self.lengths).unsqueeze(1)
        return self.siblings[self.batch, at], rows, tried

    def dense(self, p: Tensor) -> Tensor:
        """q [B, K, V], one-hot where the proposal is a point mass."""
        if self.probs is not None:
            return self.probs
        one_hot = torch.zeros_like(p[:, : self.count])
        return one_hot.scatter_(-1, self.tokens.unsqueeze(-1), 1.0)


@dataclass(frozen=True, eq=False)
class Coins:
    """Uniforms in [0, 1): of primaries [B, K], of siblings [B, m], of the last draw [B]."""

    primaries: Tensor
    siblings: Tensor
    last: Tensor


@dataclass(frozen=True, eq=False)
class Judged:
    """accepted, next_token, sibling, sibling_row [B] and the distance [B, K] of a `Verdict`."""

    accepted: Tensor
    next_token: Tensor
    sibling: Tensor
    sibling_row: Tensor
    distance: Tensor | None


def judge_greedy(sent: Sent, target_logits: Tensor, relaxed: Relaxed | None) -> Judged:
    """Temperature 0: a primary or a sibling is accepted if and only if it is the argmax."""
    best = target_logits.argmax(dim=-1)
    matches, distance = sent.tokens == best[:, : sent.count], None
    if relaxed is not None:
        passed = _of_tokens(_passes(sent, target_logits, None, relaxed), sent.tokens)
        # Passed without being the argmax: two point masses that share nothing.
        distance = (passed & ~matches).float()
        matches = matches | passed
    accepted = _prefix(sent.inside & matches)
    answer = best.gather(1, accepted.unsqueeze(1))
    if sent.width == 0:
        none = torch.full_like(accepted, -1)
        return Judged(accepted, answer.squeeze(1), none, none, distance)
    siblings, rows, tried = sent.rescuers(accepted)
    sibling, row, found = _first(tried & (siblings == answer), siblings, rows)
    bonus = best.gather(1, row.clamp(min=0).unsqueeze(1))
    next_token = torch.where(found.unsqueeze(1), bonus, answer).squeeze(1)
    return Judged(accepted, next_token, sibling, row, distance)


def judge_sampled(
    sent: Sent,
    target_logits: Tensor,
    sampling: SamplingParams,
    coins: Coins,
    method: Method,
    relaxed: Relaxed | None,
) -> Judged:
    """Temperature above 0: rejection sampling with these coins."""
    p = to_probs(target_logits[:, : sent.count + 1], sampling, check=False)
    distance = None
    if method == "block":
        q = sent.dense(p)
        weights = block_weights(p, q, sent.tokens)
        chances = block_chances(p, q, weights, sent.lengths)
        accepted = largest(coins.primaries < chances)
        weight = weights.gather(1, accepted.unsqueeze(1))
    else:
        chances = token_chances(p, sent.probs, sent.tokens)
        if relaxed is not None:
            passes = _passes(sent, target_logits, p, relaxed)
            distance = relaxed_distance(p[:, : sent.count], sent.dense(p), passes)
            chances = torch.where(_of_tokens(passes, sent.tokens), 1.0, chances)
        accepted = _prefix(sent.inside & (coins.primaries < chances))
        weight = torch.ones_like(coins.last).unsqueeze(1)
    left = _left(sent, p[sent.batch, accepted].double(), weight, accepted)
    sibling = row = torch.full_like(accepted, -1)
    if sent.width > 0:
        siblings, rows, tried = sent.rescuers(accepted)
        at = sent.position(accepted)
        q_at = None if sent.probs is None else sent.probs[sent.batch, at]
        rungs = ladder(left, q_at, sent.tokens[sent.batch, at], siblings, tried)
        sibling, row, found = _first(coins.siblings < rungs.chances, siblings, rows)
        after = to_probs(target_logits[sent.batch, row.clamp(min=0)], sampling, check=False)
        left = torch.where(found.unsqueeze(1), after.double(), rungs.left)
    return Judged(accepted, draw_at(left, coins.last), sibling, row, distance)


def token_chances(p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
    """[B, K] float64 min(1, p/q) of tokens [B, K]; p [B, K or more, V], q [B, K, V] or None."""
    p_x = _of_tokens(p[:, : tokens.shape[1]], tokens).double()
    return p_x if q is None else (p_x / _of_tokens(q, tokens).double()).clamp(max=1.0)


def _left(sent: Sent, p: Tensor, weight: Tensor, accepted: Tensor) -> Tensor:
    """[B, V] float64 weights after the accepted prefix: p at the cut, else the residual.

    p [B, V] is the target's law there, weight [B, 1] the w of the prefix (1 for single tokens).
    """
    if sent.count == 0:
        return p
    at = sent.position(accepted)
    if sent.probs is None:
        token = sent.tokens[sent.batch, at].unsqueeze(1)
        q = torch.zeros_like(p).scatter_(1, token, 1.0)
    else:
        q = sent.probs[sent.batch, at].double()
    residual = (weight * p - q).clamp(min=0.0)
    keep_p = (accepted == sent.lengths) | (residual.sum(dim=1) <= 0)
    return torch.where(keep_p.unsqueeze(1), p, residual)


def _passes(sent: Sent, target_logits: Tensor, p: Tensor | None, relaxed: Relaxed) -> Tensor:
    """[B, K, V] bool, see `Relaxed.passes`."""
    if sent.confidence is None:
        raise ValueError("relaxed acceptance needs a drafter with a confidence head")
    logits = target_logits[:, : sent.count]
    return relaxed.passes(logits, None if p is None else p[:, : sent.count], sent.confidence)


def _of_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """[B, K, V] at tokens [B, K] -> [B, K]."""
    return values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _prefix(ok: Tensor) -> Tensor:
    """[B, K] bool -> [B] int64, length of the leading run of True."""
    return ok.long().cumprod(dim=1).sum(dim=1)


def _first(ok: Tensor, siblings: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token and row [B] of the first sibling [B, m] that is ok, -1 where none; and whether any."""
    found = ok.any(dim=1)
    first = ok.byte().argmax(dim=1, keepdim=True)
    token, row = siblings.gather(1, first).squeeze(1), rows.gather(1, first).squeeze(1)
    return torch.where(found, token, -1), torch.where(found, row, -1), found
