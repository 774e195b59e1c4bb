"""The policies as they run: on a batch of one or three requests that are planned together.

A plan is a function of what the policy is shown, confidence and entropy. These take few values
here, so each group of requests is looked up among those seen before and the policy runs only on new
ones. What is remembered is what the policy itself said about exactly these features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.runtime.cost_model import BatchCosts, CostModel
from dspark.runtime.policies import (
    Auto,
    Bands,
    Confidence,
    Delayed,
    Entropy,
    Fixed,
    Policy,
    Throughput,
    plan_block,
)
from dspark.runtime.policies.auto import RunningTime, Times
from dspark.runtime.records import Plan, Proposal

SIBLINGS = 2
_COSTS = CostModel(
    tuple(
        BatchCosts(
            batch,
            plain=1.0 * scale,
            draft={1: 0.2, 3: 0.3},
            verify={1: 1.0 * scale, 2: 1.1 * scale, 4: 1.4 * scale, 10: 2.0 * scale},
            other=0.05,
        )
        for batch, scale in ((1, 1.0), (3, 1.2))
    ),
    target="tables",
    drafter="tables",
    context_tokens=1,
)
"""A step-time curve on which the last positions are worth it for some confidences only."""

_KNOWN = Times(RunningTime(1.0), RunningTime(1.0))
"""A clock that `auto` need not measure first, so that it speculates from the first token on."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(3),
    "entropy": lambda: Entropy(min_draft=0, h_stop=2.4),
    "confidence": lambda: Confidence(min_draft=0, s_stop=0.45),
    "throughput": lambda: Throughput(min_draft=0, cost=_COSTS),
    "throughput-packed": lambda: Throughput(min_draft=1, cost=_COSTS, packed=True),
    "throughput-delayed": lambda: Delayed(_COSTS, start=(0.8, 0.7, 0.3), limits=(1, None)),
    "auto": lambda: Auto(Confidence(min_draft=1, s_stop=0.3), times=_KNOWN),
}
"""Settings under which each of them cuts some blocks and not others, as early as it may."""


def policy_named(name: str, siblings: bool) -> Policy:
    """A fresh policy; with siblings, under bands."""
    policy = POLICIES[name]()
    return Bands(policy, count=SIBLINGS, min_draft=1) if siblings else policy


@dataclass
class PolicyPlanner:
    """Plans groups of `batch` consecutive rows by a policy."""

    policy: Policy
    batch: int
    _known: dict[tuple[float, ...], Plan] = field(default_factory=dict)

    def __call__(self, proposal: Proposal) -> Plan:
        rows, length = proposal.tokens.shape
        if rows % self.batch:
            raise ValueError(f"{rows} rows are no groups of {self.batch}")
        shown = [proposal.entropy]
        shown += [] if proposal.confidence is None else [proposal.confidence]
        features = torch.cat(shown, dim=1).view(rows // self.batch, -1)
        kinds, which = _kinds(features)
        plans = [self._plan(proposal, int(first)) for first in kinds]
        lengths = torch.stack([plan.lengths for plan in plans])[which].view(rows)
        siblings = torch.stack([plan.siblings for plan in plans])[which].view(rows, length)
        return Plan(lengths, siblings)

    def _plan(self, proposal: Proposal, group: int) -> Plan:
        part = slice(group * self.batch, (group + 1) * self.batch)
        entropy = proposal.entropy[part]
        confidence = None if proposal.confidence is None else proposal.confidence[part]
        key = tuple(entropy.flatten().tolist())
        key += () if confidence is None else tuple(confidence.flatten().tolist())
        if key not in self._known:
            one = Proposal(proposal.tokens[part], None, confidence, entropy)
            self._known[key] = plan_block(self.policy, one)
        return self._known[key]


def _kinds(features: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of each distinct feature vector, and the number of its kind for every row."""
    generator = torch.Generator().manual_seed(0)
    bits = features.float().view(torch.int32).long()
    mix = torch.randint(2**62, (features.shape[1],), generator=generator)
    _, which = torch.unique((bits * mix).sum(dim=1), return_inverse=True)
    first = torch.full((int(which.max()) + 1,), len(features), dtype=torch.int64)
    first.scatter_reduce_(0, which, torch.arange(len(features)), "amin")
    return first, which
