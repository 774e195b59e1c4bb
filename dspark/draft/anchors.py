"""Where training blocks start and what each of their slots has to predict.

An anchor p is a position whose token is known and whose successor is to be drafted. Its block
reads [token p, mask, ..., mask]; slot k (from 0) predicts token p+1+k after token p+k, and is
compared with the target's distribution at position p+k.

At run time the first anchor of a response is its first token, at position len(prompt). That token
was emitted by the target, so its mask is 1 and training samples it too; the last prompt token never
is an anchor, in training or at run time.

Letters: B batch, S sequence, A anchors, G block slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ANCHOR_CHOICES = ("uniform", "entropy", "after_entropy")
"""How training picks among the candidates: evenly, or by the target's entropy."""


@dataclass(frozen=True)
class Anchors:
    """Sampled anchors: `positions` [B, A] int64 ascending, `valid` [B, A] bool.

    A row with fewer candidates than A carries dummies at position 0 behind its anchors; they are
    not valid and must contribute nothing.
    """

    positions: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Blocks:
    """What the slots of every block see and predict; all [B, A, G].

    Attributes:
        prev: Token p+k before the slot's prediction (teacher forcing of the sequential head).
        labels: Token p+1+k.
        supervised: Whether the slot is trained; a contiguous prefix of its block.
        rows: Position p+k of the target whose distribution the slot imitates.

    Where a slot is not supervised, `prev`, `labels` and `rows` hold clamped values without meaning.
    """

    prev: Tensor
    labels: Tensor
    supervised: Tensor
    rows: Tensor


def sample_anchors(loss_mask: Tensor, count: int, generator: torch.Generator) -> Anchors:
    """Draws up to `count` anchors per row, uniformly and without replacement (DeepSpec's rule).

    A candidate is a p with loss_mask[p] and loss_mask[p+1]: its token was produced by the target
    and so was the one its first slot predicts.

    Args:
        loss_mask: [B, S] bool or 0/1, true at tokens the target produced.
        count: A, anchors per row.
        generator: Source of randomness. The draw happens on its device, so that a CPU generator
            gives the same anchors whatever device the rows are on.
    """
    candidate = anchor_candidates(loss_mask)
    rank = torch.rand(candidate.shape, generator=generator, device=generator.device)
    return top_anchors(-rank.to(candidate.device), candidate, count)


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """Positions p with loss_mask[p] and loss_mask[p+1]: [B, S] -> [B, S] bool."""
    mask = loss_mask.bool()
    candidate = torch.zeros_like(mask)
    candidate[:, :-1] = mask[:, :-1] & mask[:, 1:]
    return candidate


def top_anchors(scores: Tensor, candidate: Tensor, count: int) -> Anchors:
    """The up to `count` candidates of every row with the largest finite scores [B, S]."""
    batch, length = candidate.shape
    # Other positions rank behind every candidate.
    order = (-scores).masked_fill(~candidate, torch.inf).argsort(dim=1)[:, :count]
    chosen = torch.zeros_like(candidate).scatter(1, order, candidate.gather(1, order))
    positions = torch.arange(length, device=candidate.device).expand(batch, length)
    ascending = positions.masked_fill(~chosen, length).sort(dim=1).values[:, :count]
    ascending = torch.nn.functional.pad(ascending, (0, count - ascending.shape[1]), value=length)
    valid = ascending < length
    return Anchors(ascending.masked_fill(~valid, 0), valid)


def blocks(ids: Tensor, loss_mask: Tensor, anchors: Anchors, block_size: int) -> Blocks:
    """Labels, supervision and target rows of the blocks that start at `anchors`.

    A slot is supervised while its label lies inside the row and is itself a supervised token, up to
    the first slot for which that fails. Indices past the end are clamped and masked, never wrapped.

    Args:
        ids: [B, S] token ids.
        loss_mask: [B, S] bool or 0/1, as given to `sample_anchors`; padding must be 0.
        anchors: Blocks to describe; any position in [0, S) may be asked for.
        block_size: G.
    """
    batch, length = ids.shape
    slots = torch.arange(block_size, device=ids.device)
    rows = anchors.positions[..., None] + slots
    label_rows = rows + 1
    inside = label_rows < length
    rows, label_rows = rows.clamp(max=length - 1), label_rows.clamp(max=length - 1)
    shape = rows.shape

    def at(values: Tensor, index: Tensor) -> Tensor:
        return values.gather(1, index.reshape(batch, -1)).view(shape)

    trained = inside & at(loss_mask.bool(), label_rows) & anchors.valid[..., None]
    supervised = trained.long().cumprod(-1).bool()
    return Blocks(at(ids, rows), at(ids, label_rows), supervised, rows)


def block_inputs(anchor_tokens: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Input ids of a block, [anchor, mask, ..., mask]: [...] -> [..., G].

    Training and drafting both call this, so the two cannot drift apart.
    """
    ids = anchor_tokens.new_full((*anchor_tokens.shape, block_size), mask_token_id)
    ids[..., 0] = anchor_tokens
    return ids
