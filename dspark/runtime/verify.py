"""The verdict: keep the target's distribution, whatever the drafter proposed.

    accept x_k        with probability min(1, p_k(x_k) / q_k(x_k)), stop at the first rejection
    try its siblings  against what is left, max(p_k - q_k, 0) normalised   (`siblings`)
    correct from      what is left after them, at the rejected position
    bonus from        p_{L+1} when all L verified tokens were accepted, else p after the sibling

The token at each position is then distributed as p exactly (Leviathan et al. 2023; Chen et al.
2023): a token x comes out of position k with probability min(p, q)(x) as a proposal plus
(1 - sum min(p, q)) * max(p - q, 0)(x) / sum max(p - q, 0) = p(x) - min(p, q)(x) as a correction.
q is `proposal.probs` itself, the tensor the tokens were drawn from; it is never computed again.

`method="block"` judges prefixes instead of tokens (`block_verify`), with the same promise. A
proposal without probs is a point mass per token. At temperature 0 both methods become "accept if
and only if x_k is the target's argmax"; at higher ones the same formulas hold with a one-hot q.

If rounding leaves no residual (p <= q everywhere), p itself stands in for it.

Letters: B batch, G proposed tokens, K primaries sent, m siblings per position, R rows, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dspark.runtime.block_verify import block_chances, block_weights, largest
from dspark.runtime.faults import fault_of, raise_fault
from dspark.runtime.records import (
    ALL_ACCEPTED,
    CORRECTED,
    CUT,
    SIBLING,
    Plan,
    Proposal,
    Verdict,
)
from dspark.runtime.relaxed import Relaxed, relaxed_distance
from dspark.runtime.sampling import Generators, SamplingParams, draw_at, to_probs, uniform
from dspark.runtime.siblings import ladder
from dspark.runtime.tree import Rows

Method = Literal["token", "block"]


@dataclass(frozen=True, eq=False)
class _Sent:
    """The part of a proposal that the target has seen.

    tokens [B, K], probs [B, K, V] or None, lengths [B], inside [B, K] bool: before the cut;
    siblings and sibling_rows [B, K, m], rows -1 where a sibling was not sent
    """

    tokens: Tensor
    probs: Tensor | None
    lengths: Tensor
    inside: Tensor
    siblings: Tensor
    sibling_rows: Tensor

    @property
    def count(self) -> int:
        return self.tokens.shape[1]

    def rescuers(self, accepted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Siblings, their rows and whether each is tried, [B, m], at the position after a prefix.

        None is tried where the prefix ends at the cut. K must be at least 1.
        """
        rows = torch.arange(len(accepted), device=accepted.device)
        at = accepted.clamp(max=self.count - 1)
        found = self.sibling_rows[rows, at]
        return self.siblings[rows, at], found, (found >= 0) & (accepted < self.lengths)[:, None]


@torch.no_grad()
def verify(
    proposal: Proposal,
    target_logits: Tensor,
    sampling: SamplingParams,
    generator: Generators,
    plan: Plan | None = None,
    rows: Rows | None = None,
    *,
    method: Method = "token",
    relaxed: Relaxed | None = None,
    coins: int | None = None,
    check: bool = True,
) -> Verdict:
    """Judge a proposal of G tokens by the target's logits [B, R, V].

    Args:
        target_logits: Row k is the target's answer after [anchor, x_1..x_k]; behind those, if
            `rows` has any, the rows of siblings. With fewer than G + 1 rows the rest is cut.
        plan: What was sent; None: everything. Without `rows` no sibling is tried.
        rows: The layout that the target ran, from `build_rows` of the same plan.
        method: "token" or "block"; both lossless, block accepts a little more.
        relaxed: Accept typical tokens too: lossy, `Verdict.distance` says by how much.
        coins: Uniforms drawn for primaries, at least G and G by default. A request whose draws
            must not depend on how long its batch drafts gives one number every round.
        check: False leaves it to the caller to `raise_fault` once the verdict is on the host.

    Raises BadLogits naming row and position. Waits for no device but for that check, which comes
    last, when the whole verdict is queued. Draws nothing at temperature 0.
    """
    if method not in get_args(Method):
        raise ValueError(f"method: expected one of {', '.join(get_args(Method))}, got {method!r}")
    if relaxed is not None and (method != "token" or proposal.confidence is None):
        raise ValueError("relaxed acceptance needs method 'token' and a drafter with confidence")
    sent = _sent(proposal, target_logits, plan, rows)
    if sampling.greedy:
        judged = _greedy(sent, target_logits, proposal.confidence, relaxed)
    else:
        width = max(proposal.tokens.shape[1], coins or 0)
        shape = (len(sent.lengths), width + sent.siblings.shape[2] + 1)
        u = uniform(shape, generator, target_logits.device)
        judged = _sampled(
            sent, target_logits, sampling, u, width, method, proposal.confidence, relaxed
        )
    verdict = _verdict(judged, sent, proposal, _fault(proposal, target_logits, sent, rows))
    if check:
        raise_fault(verdict.fault.tolist())
    return verdict


def _sent(proposal: Proposal, target_logits: Tensor, plan: Plan | None, rows: Rows | None) -> _Sent:
    count = target_logits.shape[1] - 1 if rows is None else rows.primaries
    tokens = proposal.tokens[:, :count]
    batch, device = tokens.shape[0], tokens.device
    lengths = tokens.new_full((batch,), count)
    if plan is not None:
        lengths = torch.minimum(plan.lengths, lengths)
    empty = tokens.new_empty(batch, count, 0)
    return _Sent(
        tokens=tokens,
        probs=None if proposal.probs is None else proposal.probs[:, :count],
        lengths=lengths,
        inside=torch.arange(count, device=device) < lengths.unsqueeze(1),
        siblings=empty
        if rows is None or proposal.siblings is None
        else proposal.siblings[:, :count],
        sibling_rows=empty if rows is None else rows.sibling_rows,
    )


@dataclass(frozen=True, eq=False)
class _Judged:
    """accepted, next_token, sibling, sibling_row [B] and the distance [B, K] of a `Verdict`."""

    accepted: Tensor
    next_token: Tensor
    sibling: Tensor
    sibling_row: Tensor
    distance: Tensor | None


def _greedy(
    sent: _Sent, target_logits: Tensor, confidence: Tensor | None, relaxed: Relaxed | None
) -> _Judged:
    best = target_logits.argmax(dim=-1)
    matches = sent.tokens == best[:, : sent.count]
    distance = None
    if relaxed is not None and confidence is not None:
        logits = target_logits[:, : sent.count]
        passes = relaxed.passes(logits, None, confidence[:, : sent.count])
        passed = passes.gather(-1, sent.tokens.unsqueeze(-1)).squeeze(-1)
        # A token that passed without being the argmax: two point masses, apart by all there is.
        distance = (passed & ~matches).float()
        matches = matches | passed
    accepted = _prefix(sent.inside & matches)
    answer = best.gather(1, accepted.unsqueeze(1))
    none = torch.full_like(accepted, -1)
    if sent.siblings.shape[2] == 0 or sent.count == 0:
        return _Judged(accepted, answer.squeeze(1), none, none, distance)
    siblings, rows, tried = sent.rescuers(accepted)
    sibling, row, found = _first(tried & (siblings == answer), siblings, rows)
    bonus = best.gather(1, row.clamp(min=0).unsqueeze(1))
    next_token = torch.where(found.unsqueeze(1), bonus, answer).squeeze(1)
    return _Judged(accepted, next_token, sibling, row, distance)


def _sampled(
    sent: _Sent,
    target_logits: Tensor,
    sampling: SamplingParams,
    u: Tensor,
    width: int,
    method: Method,
    confidence: Tensor | None,
    relaxed: Relaxed | None,
) -> _Judged:
    """Uniforms u [B, width + m + 1]: of primaries, of siblings, of the draw that ends the round."""
    p = to_probs(target_logits[:, : sent.count + 1], sampling, check=False)
    distance = None
    weights = torch.ones((len(p), sent.count + 1), dtype=torch.float64, device=p.device)
    if method == "block":
        q = _dense(sent, p)
        weights = block_weights(p, q, sent.tokens)
        accepted = largest(u[:, : sent.count] < block_chances(p, q, weights, sent.lengths))
    else:
        chances = token_chances(p, sent.probs, sent.tokens)
        if relaxed is not None and confidence is not None:
            logits = target_logits[:, : sent.count]
            passes = relaxed.passes(logits, p[:, : sent.count], confidence[:, : sent.count])
            passed = passes.gather(-1, sent.tokens.unsqueeze(-1)).squeeze(-1)
            chances = torch.where(passed, 1.0, chances)
            distance = relaxed_distance(p[:, : sent.count], _dense(sent, p), passes)
        accepted = _prefix(sent.inside & (u[:, : sent.count] < chances))
    at = torch.arange(len(p), device=p.device)
    p_next = p[at, accepted].double()
    left = _left(sent, p_next, weights[at, accepted], accepted)
    sibling = row = torch.full_like(accepted, -1)
    if sent.siblings.shape[2] > 0 and sent.count > 0:
        siblings, rows, tried = sent.rescuers(accepted)
        position = accepted.clamp(max=sent.count - 1)
        q_next = None if sent.probs is None else sent.probs[at, position]
        rungs = ladder(left, q_next, sent.tokens[at, position], siblings, tried)
        ok = tried & (u[:, width : width + siblings.shape[1]] < rungs.chances)
        sibling, row, found = _first(ok, siblings, rows)
        after = to_probs(target_logits[at, row.clamp(min=0)], sampling, check=False).double()
        left = torch.where(found.unsqueeze(1), after, rungs.left)
    return _Judged(accepted, draw_at(left, u[:, -1]), sibling, row, distance)


def token_chances(p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
    """[B, K] float64 min(1, p/q) of tokens [B, K]; p [B, K or more, V], q [B, K, V] or None."""
    index = tokens.unsqueeze(-1)
    p_x = p[:, : tokens.shape[1]].gather(-1, index).squeeze(-1).double()
    if q is None:
        return p_x
    return (p_x / q.gather(-1, index).squeeze(-1).double()).clamp(max=1.0)


def _left(sent: _Sent, p_next: Tensor, weight: Tensor, accepted: Tensor) -> Tensor:
    """[B, V] float64 weights after the accepted prefix: p at the cut, else the residual."""
    if sent.count == 0:
        return p_next
    at = accepted.clamp(max=sent.count - 1)
    rows = torch.arange(len(at), device=at.device)
    scaled = weight.unsqueeze(1) * p_next
    if sent.probs is None:
        mass = torch.zeros_like(scaled).scatter_(1, sent.tokens[rows, at].unsqueeze(1), 1.0)
    else:
        mass = sent.probs[rows, at].double()
    residual = (scaled - mass).clamp(min=0.0)
    keep_p = (accepted == sent.lengths) | (residual.sum(dim=1) <= 0)
    return torch.where(keep_p.unsqueeze(1), p_next, residual)


def _dense(sent: _Sent, p: Tensor) -> Tensor:
    """q [B, K, V], one-hot where the proposal is a point mass."""
    if sent.probs is not None:
        return sent.probs
    one_hot = torch.zeros_like(p[:, : sent.count])
    return one_hot.scatter_(-1, sent.tokens.unsqueeze(-1), 1.0)


def _prefix(ok: Tensor) -> Tensor:
    """[B, K] bool -> [B] int64, length of the leading run of True."""
    return ok.long().cumprod(dim=1).sum(dim=1)


def _first(ok: Tensor, siblings: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token and row [B] of the first sibling [B, m] that is ok, -1 where none; and whether any."""
    found = ok.any(dim=1)
    first = ok.byte().argmax(dim=1, keepdim=True)
    token, row = siblings.gather(1, first).squeeze(1), rows.gather(1, first).squeeze(1)
    return torch.where(found, token, -1), torch.where(found, row, -1), found


def _fault(proposal: Proposal, target_logits: Tensor, sent: _Sent, rows: Rows | None) -> Tensor:
    """[B] int64: the drafter's fault, else the target's in the rows that were asked for."""
    if rows is None:
        row = torch.arange(target_logits.shape[1], device=target_logits.device)
        valid = row <= sent.lengths.unsqueeze(1)
    else:
        valid = rows.valid
    fault = fault_of(target_logits, valid)
    return (
        fault if proposal.fault is None else torch.where(proposal.fault != 0, proposal.fault, fault)
    )


def _verdict(judged: _Judged, sent: _Sent, proposal: Proposal, fault: Tensor) -> Verdict:
    accepted, lengths = judged.accepted, sent.lengths
    level = torch.where(lengths < proposal.tokens.shape[1], CUT, ALL_ACCEPTED)
    level = torch.where(accepted < lengths, CORRECTED, level)
    level = torch.where(judged.sibling >= 0, SIBLING, level)
    distance = judged.distance
    if distance is not None:
        position = torch.arange(sent.count, device=accepted.device)
        reached = sent.inside & (position <= accepted.unsqueeze(1))
        distance = torch.where(reached, distance, 0.0)
    return Verdict(
        accepted, judged.next_token, level, judged.sibling, judged.sibling_row, fault, distance
    )
