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

from typing import get_args

import torch
from torch import Tensor

from dspark.runtime.faults import fault_of, raise_fault
from dspark.runtime.judge import Coins, Judged, Method, Sent, judge_greedy, judge_sampled
from dspark.runtime.records import ALL_ACCEPTED, CORRECTED, CUT, SIBLING, Plan, Proposal, Verdict
from dspark.runtime.relaxed import Relaxed
from dspark.runtime.sampling import Generators, SamplingParams, uniform
from dspark.runtime.tree import Rows


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
    if relaxed is not None and method != "token":
        raise ValueError(f"relaxed acceptance needs method 'token', got {method!r}")
    count = target_logits.shape[1] - 1 if rows is None else rows.primaries
    sent = Sent.of(proposal, count, plan, rows)
    if sampling.greedy:
        judged = judge_greedy(sent, target_logits, relaxed)
    else:
        thrown = _throw(proposal, sent, generator, coins or 0)
        judged = judge_sampled(sent, target_logits, sampling, thrown, method, relaxed)
    verdict = _verdict(judged, sent, proposal, _fault(proposal, target_logits, sent, rows))
    if check:
        raise_fault(verdict.fault.tolist())
    return verdict


def _throw(proposal: Proposal, sent: Sent, generator: Generators, least: int) -> Coins:
    """As many coins as the proposal, not the batch's plan, has use for."""
    batch, length = proposal.tokens.shape
    width = max(length, least)
    siblings = 0 if proposal.siblings is None else proposal.siblings.shape[2]
    u = uniform((batch, width + siblings + 1), generator, proposal.tokens.device)
    return Coins(u[:, : sent.count], u[:, width : width + siblings], u[:, -1])


def _fault(proposal: Proposal, target_logits: Tensor, sent: Sent, rows: Rows | None) -> Tensor:
    """[B] int64: the drafter's fault, else the target's in the rows that were asked for."""
    if rows is None:
        row = torch.arange(target_logits.shape[1], device=target_logits.device)
        valid = row <= sent.lengths.unsqueeze(1)
    else:
        valid = rows.valid
    fault = fault_of(target_logits, valid)
    drafters = proposal.fault
    return fault if drafters is None else torch.where(drafters != 0, drafters, fault)


def _verdict(judged: Judged, sent: Sent, proposal: Proposal, fault: Tensor) -> Verdict:
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
