"""Mistakes that real engines have made, planted to be found.

Each is a setup and a patch of the code under test; in force, it moves the law by a total variation
above `statistics.TV`. A suite that does not find one of them proves nothing and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dspark.runtime import judge, proposal
from dspark.runtime.block_verify import block_chances
from dspark.runtime.records import Plan, Proposal
from dspark.runtime.sampling import SamplingParams, draw_at
from dspark.runtime.siblings import Ladder, ladder, next_best
from dspark_eval.lossless.planners import SIBLINGS
from dspark_eval.lossless.play import Setup
from dspark_eval.lossless.world import SLOTS

Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Defect:
    """A mistake by name, the rounds that it is planted into, and the code that it replaces."""

    name: str
    setup: Setup
    patch: Patch = nullcontext


@contextmanager
def _swapped(module: ModuleType, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    right = getattr(module, name)
    setattr(module, name, wrong)
    try:
        yield
    finally:
        setattr(module, name, right)


def _whole(siblings: int) -> Callable[[Proposal], Plan]:
    return lambda made: Plan.whole(made, siblings)


PLAIN = SamplingParams(1.0)
CHAIN = Setup(PLAIN, _whole(0), SLOTS)
TREE = Setup(PLAIN, _whole(SIBLINGS), SLOTS, SIBLINGS)


def _in_half_precision(made: Proposal) -> Proposal:
    """q computed again in bfloat16 from logits of the size that models have, in steps of 1/4."""
    assert made.probs is not None
    again = torch.softmax((made.probs.log() + 47.0).bfloat16(), dim=-1).float()
    return replace(made, probs=again)


def _not_filtered(made: Proposal) -> Proposal:
    """The softmax in place of the filtered q that tokens were drawn from."""
    assert made.probs is not None
    return replace(made, probs=(made.probs + 0.01) / (made.probs + 0.01).sum(-1, keepdim=True))


def _argmax_for_a_draw(made: Proposal) -> Proposal:
    """A greedy draft that hands over its softmax as if it had been sampled."""
    assert made.probs is not None
    tokens = made.tokens.clone()
    tokens[:, 0] = made.probs[:, 0].argmax(dim=-1)
    return replace(made, tokens=tokens)


def _band_of_the_token(made: Proposal) -> Plan:
    """Verify x_k if q_k(x_k) is high."""
    assert made.probs is not None
    sure = made.probs.gather(-1, made.tokens.unsqueeze(-1)).squeeze(-1) > 0.1
    return Plan.chain(made, sure.long().cumprod(dim=1).sum(dim=1))


def _band_of_the_next(made: Proposal) -> Plan:
    """Verify x_k if c_{k+1} is high, which has seen x_k."""
    assert made.confidence is not None
    sure = made.confidence[:, 1:] > 0.5
    return Plan.chain(made, sure.long().cumprod(dim=1).sum(dim=1))


def _best_of_all_lengths(made: Proposal) -> Plan:
    """The length of most expected tokens per second under stepped costs, all of c at hand."""
    assert made.confidence is not None
    survival = made.confidence.cumprod(dim=1)
    expected = 1 + torch.cat((torch.zeros_like(survival[:, :1]), survival), dim=1).cumsum(dim=1)
    seconds = torch.tensor([1.0, 1.0, 1.45, 1.45])
    return Plan.chain(made, (expected / seconds).argmax(dim=1))


def _siblings_of_the_block(made: Proposal) -> Plan:
    """A band that cuts by c_{k+1} and sends siblings where it does not."""
    return replace(Plan.whole(made, SIBLINGS), lengths=_band_of_the_next(made).lengths)


def _with_replacement(probs: Tensor, tokens: Tensor, u: Tensor) -> Tensor:
    left = probs.scatter(-1, tokens.unsqueeze(-1), 0.0)
    return torch.stack([draw_at(left, coin) for coin in u.unbind(-1)], dim=-1)


def _best_for_drawn(probs: Tensor, tokens: Tensor, u: Tensor) -> Tensor:
    return next_best(probs.log(), tokens, u.shape[-1])


def _first_residual(residual: Tensor, *rest: Any) -> Ladder:
    return Ladder(ladder(residual, *rest).chances, residual)


def _from_p(sent: judge.Sent, p: Tensor, weight: Tensor, accepted: Tensor) -> Tensor:
    return p


def _against_p(residual: Tensor, q: Tensor, primary: Tensor, *rest: Any) -> Ladder:
    """Siblings judged as if the primary had not taken its share of q."""
    return ladder(residual, q, primary.new_full(primary.shape, q.shape[1] - 1), *rest)


def _behind_the_cut(p: Tensor, q: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    """h_L by the formula for i < L, with a q_{L+1} that was drawn and not sent."""
    chances = block_chances(p, q, weights, torch.full_like(lengths, q.shape[1]))
    position = torch.arange(1, q.shape[1] + 1)
    return torch.where(position <= lengths.unsqueeze(1), chances, 0.0)


def _cut_by_the_past(made: Proposal) -> Plan:
    """An honest plan that cuts many blocks: verify x_k if c_k is high."""
    assert made.confidence is not None
    sure = made.confidence > 0.65
    return Plan.chain(made, sure.long().cumprod(dim=1).sum(dim=1))


def defects() -> list[Defect]:
    """All of them."""
    filtered = replace(CHAIN, params=SamplingParams(1.3, 0.9, 20))
    return [
        Defect("q computed again in bfloat16", replace(CHAIN, tamper=_in_half_precision)),
        Defect("q without the filters it was drawn under", replace(filtered, tamper=_not_filtered)),
        Defect("greedy draft judged as a sampled one", replace(CHAIN, tamper=_argmax_for_a_draw)),
        Defect("band that looks at x_k", replace(CHAIN, planner=_band_of_the_token)),
        Defect("band that looks at c_{k+1}", replace(CHAIN, planner=_band_of_the_next)),
        Defect("the same with siblings", replace(TREE, planner=_siblings_of_the_block)),
        Defect("best of all lengths afterwards", replace(CHAIN, planner=_best_of_all_lengths)),
        Defect(
            "the same under block verification",
            replace(CHAIN, planner=_best_of_all_lengths, method="block"),
        ),
        Defect("correction from p", CHAIN, lambda: _swapped(judge, "_left", _from_p)),
        Defect(
            "siblings with replacement",
            replace(TREE, params=SamplingParams(0.7, 1.0, 4)),  # few tokens, so that they repeat
            lambda: _swapped(proposal, "draw_siblings", _with_replacement),
        ),
        Defect(
            "siblings not drawn but the most likely",
            TREE,
            lambda: _swapped(proposal, "draw_siblings", _best_for_drawn),
        ),
        Defect(
            "siblings judged by q with the primary in it",
            TREE,
            lambda: _swapped(judge, "ladder", _against_p),
        ),
        Defect(
            "correction from the first residual after siblings failed",
            TREE,
            lambda: _swapped(judge, "ladder", _first_residual),
        ),
        Defect(
            "block verification with q_{L+1}",
            replace(CHAIN, planner=_cut_by_the_past, method="block"),
            lambda: _swapped(judge, "block_chances", _behind_the_cut),
        ),
    ]
