"""The distillation loss: what a block's slots should have said, and how sure they should have been.

Per supervised slot k of a block, with the drafter's distribution q, the target's p, the data token
x and the confidence logit c (all softmaxes in fp32, temperature 1):

    CE  = -log q(x)        L1 = sum_v |q(v) - p(v)| = 2 TV        BCE = bce(c, 1 - TV)

1 - TV is the chance that the slot's proposal is accepted, so it is both what L1 trains and what the
confidence head predicts (a constant there: no gradient through it). Slots weigh w_k = exp(-k/4):

    loss = (0.1 sum w CE + 0.9 sum w L1 + 1.0 sum w BCE) / sum w

Each sum runs over the whole global batch, all ranks and accumulated micro-batches included. So this
module returns sums, and dividing is left to who knows the global weight. (DSpark paper; constants
of DeepSpec.)

The vocabulary is large: slots go through the LM head in chunks, supervised ones only, and a chunk's
logits are recomputed in the backward pass instead of kept.

Letters: n supervised slots, G slots of a block, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark.draft.heads import ConfidenceHead, SequentialHead


@dataclass(frozen=True)
class LossWeights:
    """Coefficients of the three terms."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over supervised slots, kept apart per position; add them, then divide.

    Attributes:
        ce, l1, bce: [G] weighted sums of the terms, differentiable.
        weight: [G] sums of w_k; the denominator of each term is its total.
        count: [G] number of supervised slots.
        acceptance: [G] unweighted sums of 1 - TV.
        confidence: [G] unweighted sums of sigmoid(c); minus `acceptance` it shows the bias of the
            confidence head. Zeros without such a head.
        accepted_length: [] sum over blocks of 1 + sum_k prod_{i<=k} (1 - TV_i), the tokens per
            round to expect under teacher forcing, bonus token included.
        blocks: [] number of blocks with at least one supervised slot.
    """

    ce: Tensor
    l1: Tensor
    bce: Tensor
    weight: Tensor
    count: Tensor
    acceptance: Tensor
    confidence: Tensor
    accepted_length: Tensor
    blocks: Tensor

    def loss(self, weights: LossWeights, total_weight: Tensor | float | None = None) -> Tensor:
        """The scalar to minimise: [].

        Args:
            weights: Coefficients of the terms.
            total_weight: Global sum of slot weights; None means this batch is all there is. A total
                of zero (nothing supervised anywhere) gives exactly zero.
        """
        total = self.weight.sum() if total_weight is None else torch.as_tensor(total_weight)
        weighted = weights.ce * self.ce.sum() + weights.l1 * self.l1.sum()
        weighted = weighted + weights.confidence * self.bce.sum()
        return weighted / total.to(weighted).clamp_min(torch.finfo(weighted.dtype).tiny)

    def detached(self) -> LossSums:
        """The same numbers without their graph, for logging and reduction."""
        return LossSums(*(getattr(self, field.name).detach() for field in fields(self)))

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )


def slot_weights(block_size: int, decay: float, like: Tensor) -> Tensor:
    """w_k = exp(-k / decay) for k = 0..G-1: largest at the first predicted slot, [G]."""
    return torch.exp(-torch.arange(block_size, device=like.device, dtype=like.dtype) / decay)


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
    decay: float = 4.0,
    chunk: int = 1024,
    confidence_detach: bool = False,
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
        supervised: [..., G] bool, a contiguous prefix of each block.
        to_logits: Frozen LM head, [n, D] -> [n, V]; must be differentiable in its argument.
        markov_head: Adds the bias of its codes to the drafter's logits.
        confidence_head: None trains no confidence.
        decay: Constant of the slot weights, in slots.
        chunk: Slots whose logits exist at one time. When all fit into one chunk, nothing is
            recomputed either.
        confidence_detach: Keep the confidence gradient out of the backbone and the markov table.
            DeepSpec lets it flow (the default here).
    """
    slots = supervised.shape[-1]
    chosen = supervised.reshape(-1).nonzero().squeeze(-1)
    position = chosen % slots
    states = hidden.reshape(-1, hidden.shape[-1])[chosen]
    target_states = target_hidden.reshape(-1, target_hidden.shape[-1])[chosen].detach()
    codes = markov_head.codes(prev, hidden).flatten(0, -2)[chosen]
    prev, labels = prev.reshape(-1)[chosen], labels.reshape(-1)[chosen]

    def terms(states: Tensor, target_states: Tensor, codes: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target_logits = to_logits(target_states)
        return slot_terms(to_logits(states) + markov_head.bias(codes), target_logits, labels)

    ce, l1 = _in_chunks(terms, (states, target_states, codes, labels), chunk)
    weight = slot_weights(slots, decay, ce)[position]
    acceptance = (1 - l1.detach() / 2).clamp(0, 1)
    if confidence_head is None:
        bce = predicted = torch.zeros_like(acceptance)
    else:
        embed = markov_head.embed(prev)
        if confidence_detach:
            states, embed = states.detach(), embed.detach()
        logit = confidence_head(states, embed).to(ce.dtype)
        bce = F.binary_cross_entropy_with_logits(logit, acceptance, reduction="none")
        predicted = logit.detach().sigmoid()

    def per_position(values: Tensor) -> Tensor:
        return values.new_zeros(slots).index_add(0, position, values)

    survival = acceptance.new_zeros(supervised.numel()).index_copy(0, chosen, acceptance)
    survival = survival.view(-1, slots).cumprod(-1)
    in_use = supervised.reshape(-1, slots)[:, 0].to(survival.dtype)
    return LossSums(
        ce=per_position(weight * ce),
        l1=per_position(weight * l1),
        bce=per_position(weight * bce),
        weight=per_position(weight),
        count=per_position(torch.ones_like(weight)),
        acceptance=per_position(acceptance),
        confidence=per_position(predicted),
        accepted_length=survival.sum() + in_use.sum(),
        blocks=in_use.sum(),
    )


def slot_terms(logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """CE and L1 of every slot, [2, n], from drafter and target logits [n, V] and labels [n]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_q = logits.to(wide).log_softmax(-1)
    # The same way as q, so that equal logits are at a distance of exactly zero.
    p = target_logits.detach().to(wide).log_softmax(-1).exp_()
    ce = -log_q.gather(-1, labels[:, None]).squeeze(-1)
    return torch.stack((ce, (log_q.exp() - p).abs().sum(-1)))


def _in_chunks(
    terms: Callable[..., Tensor], inputs: tuple[Tensor, ...], chunk: int
) -> tuple[Tensor, Tensor]:
    """`terms` over rows of the inputs, `chunk` at a time; each chunk is recomputed for backward."""
    if chunk < 1:
        raise ValueError(f"chunk: {chunk} given, at least one slot is needed")
    if inputs[0].shape[0] <= chunk:
        ce, l1 = terms(*inputs)
        return ce, l1
    parts = zip(*(tensor.split(chunk) for tensor in inputs), strict=True)
    ce, l1 = torch.cat(
        [checkpoint(terms, *part, use_reentrant=False, preserve_rng_state=False) for part in parts],
        dim=-1,
    )
    return ce, l1
