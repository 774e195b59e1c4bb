"""What a policy would have done on rounds that verified whole blocks, and what that is worth.

A whole block tells for every shorter cut L what the target would have answered:

    tokens(L)  = L + 1 where L < a, else what the round emitted           a: accepted, of all G
    tokens/s   = sum tokens(L) / sum T(L)                                 T from a cost model

That is exact for the round itself: confidences, entropies and acceptance of x_1..x_L do not depend
on what is cut behind them. It is a model of a run, since after a cut the next block would have
started elsewhere, and a plain step stands for a whole recorded round; runs confirm it. Siblings
were not tried in such rounds: a policy that sends some is not replayed.

Letters: n rounds, G slots, L length at which the policy cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.runtime.cost_model import CostModel
from dspark.runtime.policies.confidence import Confidence
from dspark.runtime.policies.entropy import Entropy
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.policies.frontier import Policy, plan_block
from dspark.runtime.records import Proposal, RoundRecord

ROWWISE = (Fixed, Entropy, Confidence)
"""Policies whose decision on a row depends on that row and on no earlier round."""

S_GRID = tuple(round(0.02 * step, 2) for step in range(50))
H_GRID = tuple(round(0.05 * step, 2) for step in range(1, 61))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Rounds with whole blocks, in the order they were decoded.

    confidence, entropy  [n, G] float32, as policies read them; confidence None: no head
    accepted, verified, emitted  [n] int64; verified < G where an end token was accepted
    prompt               [n] int64: a policy that learns starts anew with each
    """

    confidence: Tensor | None
    entropy: Tensor
    accepted: Tensor
    verified: Tensor
    emitted: Tensor
    prompt: Tensor

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def slots(self) -> int:
        return self.entropy.shape[1]

    def proposal(self, rows: slice | Tensor = slice(None)) -> Proposal:
        """Some rounds as if they were drafted together, without their tokens."""
        entropy = self.entropy[rows]
        confidence = None if self.confidence is None else self.confidence[rows]
        return Proposal(torch.zeros_like(entropy, dtype=torch.int64), None, confidence, entropy)


def whole_blocks(by_prompt: Iterable[Sequence[RoundRecord]], block_size: int) -> Blocks:
    """The rounds that drafted and sent a whole block; the short ones at an answer's end are left
    out. Raises ValueError if there is none."""
    kept = [
        (prompt, record)
        for prompt, rounds in enumerate(by_prompt)
        for record in rounds
        if record.drafted == block_size and not record.sibling
    ]
    if not kept:
        raise ValueError(f"no round drafted a whole block of {block_size}")
    records = [record for _, record in kept]
    heads = all(record.confidence for record in records)
    counts = [(r.accepted, r.verified, r.emitted) for r in records]
    accepted, verified, emitted = torch.tensor(counts).unbind(1)
    return Blocks(
        torch.tensor([r.confidence for r in records]) if heads else None,
        torch.tensor([r.entropy for r in records]),
        accepted,
        verified,
        emitted,
        torch.tensor([prompt for prompt, _ in kept]),
    )


@dataclass(frozen=True)
class Replay:
    """What a policy makes of recorded rounds; `tokens_per_s` is modelled."""

    rounds: int
    accepted_length: float
    acceptance_rate: float | None
    drafted: float
    verified: float
    rows: float
    tokens_per_s: float


def replay(policy: Policy, blocks: Blocks, cost: CostModel) -> Replay:
    """Cut every recorded round where the policy would have. Raises ValueError with siblings."""
    if policy.siblings:
        raise ValueError(f"{policy.name}: siblings were not tried in rounds of whole blocks")
    drafted, lengths = _decisions(policy, blocks, cost)
    tokens = torch.where(lengths < blocks.accepted, lengths + 1, blocks.emitted)
    judged = torch.minimum(lengths, blocks.verified)
    accepted = torch.minimum(lengths, blocks.accepted)
    kinds = Counter(zip(drafted.tolist(), lengths.tolist(), strict=True))
    seconds = sum(count * cost.round_s(g, 1 + length) for (g, length), count in kinds.items())
    n, sent = len(blocks), int(judged.sum())
    return Replay(
        rounds=n,
        accepted_length=int(tokens.sum()) / n,
        acceptance_rate=int(accepted.sum()) / sent if sent else None,
        drafted=int(drafted.sum()) / n,
        verified=sent / n,
        rows=1 + int(lengths.sum()) / n,
        tokens_per_s=int(tokens.sum()) / seconds,
    )


def _decisions(policy: Policy, blocks: Blocks, cost: CostModel) -> tuple[Tensor, Tensor]:
    """Drafted and verified tokens [n] int64 of each round.

    Row-wise policies see all rounds at once, the others one after the other.
    """
    if isinstance(policy, ROWWISE):
        most = torch.full_like(blocks.accepted, _width(policy, blocks))
        return most, plan_block(policy, blocks.proposal(), most).lengths
    decisions, previous = [], None
    for row, prompt in enumerate(blocks.prompt.tolist()):
        if prompt != previous:
            policy, previous = policy.fresh(), prompt
        drafted, length = _width(policy, blocks), 0
        if drafted:
            limit = torch.tensor([drafted])
            length = int(plan_block(policy, blocks.proposal(slice(row, row + 1)), limit).lengths)
        decisions.append((drafted, length))
        policy.observe(_record(blocks, row, drafted, length, cost))
    drafts, lengths = torch.tensor(decisions).unbind(1)
    return drafts, lengths


def _width(policy: Policy, blocks: Blocks) -> int:
    return min(policy.draft_length(blocks.slots), blocks.slots)


def _record(blocks: Blocks, row: int, drafted: int, length: int, cost: CostModel) -> RoundRecord:
    """What the policy would have been told, with the cost model's seconds."""
    accepted = min(length, int(blocks.accepted[row]))
    emitted = length + 1 if length < int(blocks.accepted[row]) else int(blocks.emitted[row])
    confidence = () if blocks.confidence is None else tuple(blocks.confidence[row].tolist())
    entropy = tuple(blocks.entropy[row].tolist())
    seconds = cost.round_s(drafted, 1 + length)
    return RoundRecord(
        drafted, length, accepted, emitted, 2, 0.0, seconds, 0.0,
        confidence[:drafted], entropy[:drafted],
    )  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One threshold of a sweep."""

    threshold: float
    replay: Replay


def sweep(
    make: Callable[[float], Policy], grid: Sequence[float], blocks: Blocks, cost: CostModel
) -> list[Point]:
    """Replay one policy at each threshold."""
    return [Point(threshold, replay(make(threshold), blocks, cost)) for threshold in grid]


def best(points: Sequence[Point]) -> Point:
    """Most modelled tokens per second; of equals the one that verifies least."""
    return max(points, key=lambda point: (point.replay.tokens_per_s, -point.replay.verified))
