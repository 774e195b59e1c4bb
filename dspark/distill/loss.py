"""The distillation loss: what a block's slots should have said, and how sure they should have been.

Per supervised slot k of a block, with the drafter's distribution q, the target's p, the data token
x and the confidence logit c (all softmaxes in fp32, temperature 1):

    CE  = -log q(x)        L1 = sum_v |q(v) - p(v)| = 2 TV        BCE = bce(c, 1 - TV)

1 - TV is the chance that the slot's proposal is accepted, so it is both what L1 trains and what the
confidence head predicts (a constant there: no gradient through it). Slots weigh w_k = exp(-k/4):

    loss = (0.1 sum w CE + 0.9 sum w L1 + 1.0 sum w BCE) / sum w

Each sum runs over the whole global batch, all ranks and accumulated micro-batches included. So this
module returns sums, and dividing is left to who knows the global ones. (DSpark paper; constants of
DeepSpec. Other terms and weights: `terms.py`.)

Letters: n supervised slots, G slots of a block, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.distill import fused_head
from dspark.distill.fused import DraftVocabulary, Slots, fused_terms
from dspark.distill.places import Places
from dspark.distill.terms import TERMS, Grid, Objective, confidence_weights, slot_weights
from dspark.draft.heads import ConfidenceHead, SequentialHead

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**29}
"""Size of one buffer of logits when no chunk is asked for, by device."""


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over supervised slots, most of them kept apart per position; add them, then divide.

    Attributes:
        objective: [] what is minimised before it is divided, differentiable.
        normaliser: [] what it is divided by: decay weights of the slots, or blocks in use.
        ce, l1, nla, kl, reverse_kl, bce: [G] sums of the terms weighted by w_k = exp(-k / decay),
            whatever weights the objective has, so that runs compare; zeros where a term was not
            needed.
        weight: [G] sums of w_k.
        count: [G] number of supervised slots.
        acceptance: [G] unweighted sums of 1 - TV.
        confidence: [G] unweighted sums of sigmoid(c); minus `acceptance` it shows the bias of the
            confidence head. Zeros without such a head.
        accepted_length: [] sum over blocks of 1 + sum_k prod_{i<=k} (1 - TV_i), the tokens per
            round to expect under teacher forcing, bonus token included.
        blocks: [] number of blocks with at least one supervised slot.
    """

    objective: Tensor
    normaliser: Tensor
    ce: Tensor
    l1: Tensor
    nla: Tensor
    kl: Tensor
    reverse_kl: Tensor
    bce: Tensor
    weight: Tensor
    count: Tensor
    acceptance: Tensor
    confidence: Tensor
    accepted_length: Tensor
    blocks: Tensor

    def loss(self, normaliser: Tensor | float | None = None) -> Tensor:
        """The scalar to minimise: [].

        Args:
            normaliser: Global sum of the normalisers; None means this batch is all there is. Zero
                (nothing supervised anywhere) gives exactly zero.
        """
        total = self.normaliser if normaliser is None else torch.as_tensor(normaliser)
        total = total.to(self.objective)
        return self.objective / total.clamp_min(torch.finfo(total.dtype).tiny)

    def detached(self) -> LossSums:
        """The same numbers without their graph, for logging and reduction."""
        return LossSums(*(getattr(self, field.name).detach() for field in fields(self)))

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )


def distill_loss(
    hidden: Tensor,
    target_hidden: Tensor,
    prev: Tensor,
    labels: Tensor,
    supervised: Tensor,
    *,
    to_logits: Callable[[Tensor], Tensor],
    markov_head: SequentialHead,
    confidence_head: ConfidenceHead | None,
    objective: Objective,
    chunk: int | None = None,
    confidence_detach: bool = False,
    vocabulary: DraftVocabulary | None = None,
    to_draft_logits: Callable[[Tensor], Tensor] | None = None,
    target_rows: Tensor | None = None,
    head: Tensor | None = None,
    imitated: fused_head.Imitated | None = None,
    places: tuple[Places, Places] | None = None,
) -> LossSums:
    """Sums of the loss terms over all supervised slots of a batch of blocks.

    Where nothing is supervised every sum is exactly zero, and so is every gradient: a rank with
    such a batch still runs the same operations as its peers.

    Args:
        hidden: [..., G, D] drafter's final-normed states.
        target_hidden: [..., G, D] target's post-norm last hidden states at the slots' rows. No
            gradient reaches it.
        prev: [..., G] int64, token before each slot's prediction.
        labels: [..., G] int64, data token the slot predicts.
        supervised: [..., G] bool, a contiguous prefix of each block; on the host or the device.
        to_logits: Frozen LM head, [n, D] -> [n, V]; must be differentiable in its argument and
            give a tensor of its own, which is overwritten.
        markov_head: Adds the bias of its codes to the drafter's logits.
        confidence_head: None trains no confidence.
        objective: What the terms weigh.
        chunk: Slots whose logits exist at one time (whole blocks, so at least one of those); None:
            as many as fit into `CHUNK_BYTES`.
        confidence_detach: Keep the confidence gradient out of the backbone and the markov table.
            DeepSpec lets it flow (the default here).
        vocabulary: The drafter's, if it is a reduced one.
        to_draft_logits: LM head over the reduced vocabulary, [n, D] -> [n, V']; None: `to_logits`.
        target_rows: [..., G] int64, row of each slot in `target_hidden`, which is then [m, D]:
            slots of several blocks may share one. On the host or the device.
        head: [V, D], the LM head if `to_logits` is the product with it and nothing else, to take
            all products in its dtype (`fused_head.takes` it).
        imitated: Which positions the supervised slots of each chunk imitate, if found already; the
            chunks are then its own.
        places: Of `supervised`, where that is and on the device, if they have been found already.
    """
    slots, device = supervised.shape[-1], hidden.device
    if places is None:
        found = Places.of(supervised)
        places = found, found.to(device)
    found, there = places
    grid = Grid(there.block, there.position, len(found.on), slots)
    # Masked, not only left out: a later slot must not reach an earlier one through 0 * NaN.
    # In 32 bits: the gradient of their embeddings sorts them, digit by digit.
    before, hidden = there.in_use(prev).int(), there.in_use(hidden, 2)
    if not there.whole:
        off = ~there.on
        before, hidden = before.masked_fill(off, 0), hidden.masked_fill(off[..., None], 0)
    states, codes = there.picked(hidden), there.picked(markov_head.codes(before, hidden))
    chosen_labels, known = there.picked(there.in_use(labels)), None
    if vocabulary is not None:
        chosen_labels, known = vocabulary.labels(chosen_labels)
    if imitated is not None:
        assert target_rows is not None
        target_states, chosen_rows, chunk = target_hidden, target_rows, imitated.size
    elif target_rows is None:
        target_states = there.picked(there.in_use(target_hidden, 2))
        chosen_rows = torch.arange(len(target_states), device=device)
    else:
        near = found if target_rows.device == found.block.device else there
        target_states, chosen_rows = target_hidden, near.picked(near.in_use(target_rows))
    if head is None:
        chosen_rows = chosen_rows.to(device)
    work = Slots(
        target_states=target_states.detach(),
        target_rows=chosen_rows,
        labels=chosen_labels,
        known=known,
        grid=grid,
        counts=found.counts,
        vocabulary=vocabulary,
        to_logits=to_draft_logits or to_logits,
        to_target_logits=torch.no_grad()(to_logits),
        objective=objective,
        head=head,
        imitated=imitated,
    )
    weight = _named_rows(markov_head.markov_w2.weight, work.to_logits(states[:0].detach()))
    if chunk is None and head is not None:
        chunk = fused_head.even_chunk(len(states), len(head), slots)
    elif chunk is None:  # the target's logits are the wider ones where the vocabulary is reduced
        chunk = chunk_slots(work.to_target_logits(states[:0]).shape[-1], hidden.device)
    total, terms = fused_terms(states, codes, weight, work, chunk)
    acceptance = (1 - terms[TERMS.index("l1")] / 2).clamp(0, 1)
    w = slot_weights(slots, objective.decay, acceptance)[grid.position]
    bce = predicted = torch.zeros_like(acceptance)
    if confidence_head is not None:
        # Where the code of a slot is the embedding itself, the table is read once for both.
        embed = codes if markov_head.plain else markov_head.embed(there.picked(before))
        if confidence_detach:
            states, embed = states.detach(), embed.detach()
        logit = confidence_head(states, embed).to(acceptance.dtype)
        bce = F.binary_cross_entropy_with_logits(logit, acceptance, reduction="none")
        predicted = logit.detach().sigmoid()
        total = total + objective.confidence * (confidence_weights(w, grid, objective) * bce).sum()
    return _summed(total, terms, grid, objective, (w, acceptance, bce.detach(), predicted))


def _summed(
    total: Tensor,
    terms: Tensor,
    grid: Grid,
    objective: Objective,
    of_slots: tuple[Tensor, Tensor, Tensor, Tensor],
) -> LossSums:
    """Sums of terms [5, n] and of other numbers [n]: weight, acceptance, BCE, confidence."""
    w, acceptance, bce, predicted = of_slots
    survival = grid.table(acceptance).cumprod(-1)
    blocks = survival.new_full((), float(grid.blocks))
    weighted = w * torch.stack((*terms, bce, torch.ones_like(w)))
    plain = torch.stack((torch.ones_like(w), acceptance, predicted))
    *sums, bces, weights, count, accepted, sure = grid.per_position(torch.cat((weighted, plain)))
    return LossSums(
        objective=total,
        normaliser=blocks if objective.per_block else weights.sum(),
        **dict(zip(TERMS, sums, strict=True)),
        bce=bces,
        weight=weights,
        count=count,
        acceptance=accepted,
        confidence=sure,
        accepted_length=survival.sum() + blocks,
        blocks=blocks,
    )


def _named_rows(weight: Tensor, logits: Tensor) -> Tensor:
    """Rows of W2 that have a logit: those that pad the table past the vocabulary are no tokens."""
    width = logits.shape[-1]
    return weight if width == len(weight) else weight[:width]


def chunk_slots(vocabulary: int, device: torch.device) -> int:
    """Slots whose fp32 logits fill `CHUNK_BYTES`, at least one."""
    return max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * vocabulary))
