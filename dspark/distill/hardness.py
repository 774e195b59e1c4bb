"""Anchors where drafting is hard: drawn by the target's entropy instead of uniformly.

    weight of candidate p  =  FLOOR + H      H in nats, of the target at row p    (`entropy`)
                                             or at row p - 1                      (`after_entropy`)

Row p is what the first slot of p's block has to imitate. Row p - 1 is where token p itself came
from: at run time a block tends to start right after a token that was hard to guess, because that is
where the one before was rejected. Drawing is without replacement, by the largest
log(weight) + Gumbel noise; the noise is a pure function of seed, epoch and row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dspark.distill.batches import Batch
from dspark.draft.anchors import Anchors, anchor_candidates, top_anchors

FLOOR = 0.05
"""Nats; a position that the target is sure of is drawn, but seldom."""


@torch.no_grad()
def hard_anchors(
    batch: Batch, hidden: Tensor, to_logits: Callable[[Tensor], Tensor], choice: str, chunk: int
) -> Anchors:
    """As many anchors as the batch has, drawn by entropy.

    Args:
        batch: With `noise`.
        hidden: [B, S, D] target's post-norm states.
        to_logits: LM head, [n, D] -> [n, V].
        choice: `entropy` or `after_entropy`.
        chunk: Positions whose logits exist at once.
    """
    assert batch.noise is not None, "the batch was made for scored anchors"
    candidates = anchor_candidates(batch.loss_mask)
    rows = candidates
    if choice == "after_entropy":  # a candidate's predecessor exists, or the row starts with it
        rows = torch.cat((candidates[:, 1:], torch.zeros_like(candidates[:, :1])), 1)
    nats = torch.zeros_like(batch.noise)
    parts = [entropy(to_logits(states)) for states in hidden[rows].split(max(1, chunk))]
    if parts:
        nats[rows] = torch.cat(parts).to(nats)
    if choice == "after_entropy":
        nats = torch.cat((torch.zeros_like(nats[:, :1]), nats[:, :-1]), 1)
    scores = (nats + FLOOR).log() + batch.noise
    return top_anchors(scores, candidates, batch.anchors.positions.shape[1])


def entropy(logits: Tensor) -> Tensor:
    """Of the softmax at temperature 1, in nats: [n, V] -> [n], in fp32 at least."""
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
