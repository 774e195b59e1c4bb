"""LM head, two softmaxes, loss terms and their gradient in one pass over chunks of slots.

A chunk's logits z = lm_head(h) + W2 u are formed once. Terms follow from them, the mixture says
what each term of each slot is worth, and the gradient in z is closed form, so it is formed in the
same buffers and pushed through the LM head before the next chunk begins: forward keeps gradients
of h [n, D], of u [n, R] and of W2, never logits, and backward only scales them. With

    H(v) = 1 if p(v) > q(v), 1/2 if equal, 0 else        b = <q, H>        a = sum min(p, q)

    d ce = q - e_x      d l1 = 2 q (b - H)      d nla = q (b - H) / a
    d kl = q - p        d reverse_kl = q (log(q/p) - reverse_kl)

A chunk holds whole blocks, since a slot's weight may depend on the rest of its block. Of one chunk
there are three fp32 buffers [c, V], four with a KL term. Cutting along slots and not along the
vocabulary costs one product with the LM head for each of p, q and the gradient; vocabulary blocks
would need every logit twice, for the softmax's sum and again for its value, and could not save
memory below one block of slots, 5 MB a buffer at V = 163,840.

Letters: n supervised slots, c slots of a chunk, D hidden, R rank, V vocabulary, V' draft
vocabulary (V unless reduced).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark.distill.chunks import Chunk, chunks
from dspark.distill.fused_head import Imitated, head_terms
from dspark.distill.terms import TERMS, Grid, Objective, mixture


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """A reduced draft vocabulary: `ids` [V'] int64 ascending, the target's id of each draft id.

    The target's mass outside it counts as distance (q is zero there); KL terms see the target
    renormalised inside it; a label outside it adds no cross-entropy.
    """

    ids: Tensor

    def labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids of target ids [n], and whether there is one [n] bool."""
        at = torch.searchsorted(self.ids, labels).clamp_max(len(self.ids) - 1)
        return at, self.ids[at] == labels


@dataclass(frozen=True, eq=False)
class Slots:
    """The supervised slots of a batch, and everything about them that is not trained.

    target_states: [m, D]. target_rows: [n], which of them each slot imitates. labels: [n] draft
    ids. known: [n] bool, or None: all are. grid: where they sit. counts: slots of each block, in
    order. vocabulary: None: the target's own. to_logits: frozen LM head of the drafter, [c, D] ->
    [c, V'], and to_target_logits the target's, -> [c, V]; both give tensors of their own, which are
    overwritten here. head: [V, D], imitated: see `fused_head.py`; None: the path of this file.
    """

    target_states: Tensor
    target_rows: Tensor
    labels: Tensor
    known: Tensor | None
    grid: Grid
    counts: list[int]
    vocabulary: DraftVocabulary | None
    to_logits: Callable[[Tensor], Tensor]
    to_target_logits: Callable[[Tensor], Tensor]
    objective: Objective
    head: Tensor | None = None
    imitated: Imitated | None = None


def fused_terms(
    states: Tensor, codes: Tensor, weight: Tensor, slots: Slots, chunk: int
) -> tuple[Tensor, Tensor]:
    """The mixture of `slots.objective`, and every slot's terms.

    Args:
        states: [n, D] drafter's final-normed states.
        codes: [n, R] codes of the sequential head.
        weight: [V', R], W2 of the sequential head.
        slots: What they are compared with.
        chunk: Slots whose logits exist at one time; a block is never split.

    Returns:
        The mixture [], differentiable once in the first three, and the terms [5, n] as numbers.
    """
    if chunk < 1:
        raise ValueError(f"chunk: {chunk} given, at least one slot is needed")
    inputs = (states, codes, weight)
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return _Fused.apply(*inputs, slots, chunk, trained)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, codes: Tensor, weight: Tensor, slots: Slots, chunk: int,
        trained: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = torch.promote_types(states.dtype, torch.float32)
        terms = states.new_zeros((len(TERMS), len(states)), dtype=wide)
        if slots.head is not None:
            total, gradients = head_terms((states, codes, weight), slots, chunk, terms, trained)
        else:
            total, gradients = _wide_terms((states, codes, weight), slots, chunk, terms, trained)
        dtypes = (states.dtype, codes.dtype, weight.dtype)
        ctx.save_for_backward(*(g.to(d) for g, d in zip(gradients, dtypes, strict=False)))
        ctx.mark_non_differentiable(terms)
        return total, terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Of a list, since a product with one number on the device alone is not vectorised.
        kept = ctx.saved_tensors
        scaled = [torch._foreach_mul([g], scale.to(g.dtype))[0] for g in kept]
        return *scaled, *[None] * 3


def _wide_terms(
    inputs: tuple[Tensor, Tensor, Tensor], slots: Slots, chunk: int, terms: Tensor, trained: bool
) -> tuple[Tensor, list[Tensor]]:
    """The mixture [], and the gradients of `inputs` if `trained`; fills `terms` [5, n]."""
    states, codes, weight = inputs
    gradients = [torch.zeros_like(t, dtype=terms.dtype) for t in inputs if trained]
    wide = states, codes.to(terms.dtype), weight.to(terms.dtype)
    total = terms.new_zeros(())
    for part in chunks(slots.counts, chunk):
        total += _add_chunk(part, wide, slots, terms, gradients or None)
    return total, gradients


def _add_chunk(
    part: Chunk,
    inputs: tuple[Tensor, Tensor, Tensor],
    slots: Slots,
    terms: Tensor,
    gradients: list[Tensor] | None,
) -> Tensor:
    """One chunk: fills its `terms`, adds to the `gradients` of `inputs`, returns its mixture [].

    A function of its own, so that its buffers are gone before those of the next chunk are made.
    """
    states, codes, weight = inputs
    rows, trained = part.rows, gradients is not None
    leaf = states[rows].detach().requires_grad_(trained)
    with torch.set_grad_enabled(trained):
        logits = slots.to_logits(leaf)
    z = logits.detach().to(weight.dtype).addmm_(codes[rows], weight.T)
    compared = _compare(z, slots, rows)
    worth = compared.terms.requires_grad_(trained)
    with torch.set_grad_enabled(trained):
        mixed = mixture(worth, part.grid(slots.grid), slots.objective, compared.known)
    terms[:, rows] = worth.detach()
    if gradients is not None:
        [coefficients] = torch.autograd.grad(mixed, worth)
        pull = compared.gradient(coefficients)
        [gradient] = torch.autograd.grad(logits, leaf, pull.to(logits.dtype))
        gradients[0][rows] = gradient
        torch.mm(pull, weight, out=gradients[1][rows])
        gradients[2].addmm_(pull.T, codes[rows])
    return mixed.detach()


@dataclass(eq=False)
class _Comparison:
    """q and p of a chunk, in the buffers of its logits, with what the gradient needs of them.

    q, p: [c, V']; p is the target's mass inside the draft vocabulary. gap: [c, V'], p - q.
    log_ratio: [c, V'] log(p/q), p renormalised; None if no term needs it. mass: [c, 1] sum of p,
    None: 1. overlap: [c, 1] sum of min(p, q); None if no term needs it. terms: [5, c].
    """

    q: Tensor
    p: Tensor
    gap: Tensor
    log_ratio: Tensor | None
    mass: Tensor | None
    overlap: Tensor | None
    labels: Tensor
    known: Tensor | None
    terms: Tensor

    def gradient(self, coefficients: Tensor) -> Tensor:
        """d (sum of coefficients [5, c] times terms) / d z, [c, V'], in the buffer of `gap`."""
        ce, l1, nla, kl, reverse_kl = coefficients[:, :, None]
        if self.known is not None:
            ce = ce * self.known[:, None]
        higher = self.gap.sign_().add_(1).mul_(0.5)  # H
        toward = 2 * l1
        if self.overlap is not None:
            toward = toward + nla / self.overlap
        pull = higher.sub_(_dot(self.q, higher)).mul_(-toward).add_(ce + kl)
        if self.log_ratio is not None:
            expected = self.terms[TERMS.index("reverse_kl")].detach()[:, None]
            pull.sub_(self.log_ratio.add_(expected).mul_(reverse_kl))
        pull.mul_(self.q)
        if self.log_ratio is not None:
            pull.sub_(self.p.mul_(kl if self.mass is None else kl / self.mass))
        return pull.scatter_add_(-1, self.labels[:, None], -ce)


def _compare(z: Tensor, slots: Slots, rows: slice) -> _Comparison:
    """Both softmaxes of a chunk and its terms; overwrites the wide drafter logits z [c, V']."""
    objective, vocabulary, labels = slots.objective, slots.vocabulary, slots.labels[rows]
    known = None if slots.known is None else slots.known[rows]
    z.sub_(z.amax(-1, keepdim=True))
    ce = -z.gather(-1, labels[:, None])[:, 0]
    p = slots.to_target_logits(slots.target_states[slots.target_rows[rows]]).to(z.dtype)
    p.sub_(p.amax(-1, keepdim=True))
    log_ratio = None
    if objective.divergences:
        log_ratio = (p if vocabulary is None else p[:, vocabulary.ids]) - z
    # p and q the same way, so that equal logits are at a distance of exactly zero.
    norm_p, norm_q = p.exp_().sum(-1, keepdim=True), z.exp_().sum(-1, keepdim=True)
    p, q = p.div_(norm_p), z.div_(norm_q)
    ce = ce + norm_q.log()[:, 0]
    if known is not None:
        ce = ce.masked_fill(~known, 0)
    mass, outside = None, torch.zeros_like(ce)
    if vocabulary is not None:
        whole, p = p, p[:, vocabulary.ids]
        mass = p.sum(-1, keepdim=True)
        outside = (whole.sum(-1) - mass[:, 0]).clamp_min(0)
        del whole
    zero = torch.zeros_like(ce)
    overlap, nla, kl, reverse_kl = None, zero, zero, zero
    gap = torch.empty_like(q)
    if objective.nla:
        overlap = torch.minimum(p, q, out=gap).sum(-1, keepdim=True)
        overlap.clamp_min_(torch.finfo(overlap.dtype).tiny)
        nla = -overlap.log()[:, 0]
    if log_ratio is not None:
        shift = norm_q.log() - norm_p.log()
        log_ratio.add_(shift if mass is None else shift - mass.log())
        kl = _dot(p, log_ratio)[:, 0] / (1 if mass is None else mass[:, 0])
        reverse_kl = -_dot(q, log_ratio)[:, 0]
    l1 = torch.linalg.vector_norm(torch.sub(p, q, out=gap), 1, dim=-1) + outside
    terms = torch.stack((ce, l1, nla, kl, reverse_kl))
    return _Comparison(q, p, gap, log_ratio, mass, overlap, labels, known, terms)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row, [c, V] and [c, V] -> [c, 1], without their product in memory."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0]
