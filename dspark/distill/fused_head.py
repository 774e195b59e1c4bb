"""The fused loss on a GPU, where the LM head is nothing but a half-precision matrix W.

The same chunks and formulas as `fused.py`, but logits stay in W's dtype, z = (W2 u) + W h in one
accumulation, and two kernels (`ops.distill_terms`, `ops.distill_pull`) read them instead of a dozen
elementwise passes; the second leaves the gradient where z was. What is left is products:

    z = codes W2^T + states W^T     t = target W^T
    d states = dz W                 d codes = dz W2              d W2 = dz^T codes

Blocks overlap: slots of several blocks imitate the same position of the target, whose logits are
formed once a chunk (2,400 rows instead of 3,584 at 512 anchors of 7 slots in 4,096 positions).
Which these are, `imitate` finds before the drafter has run. A chunk holds two buffers in W's dtype,
[c, V] and [m, V]; bfloat16 products accumulate in float32.

Letters: c slots of a chunk, m positions of the target among them, D hidden, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark import ops
from dspark.devices import send_all
from dspark.distill.chunks import Chunk, chunks
from dspark.distill.terms import TERMS, Grid, Objective, mixture, worths
from dspark.products import add_product

if TYPE_CHECKING:
    from dspark.distill.fused import Slots

CHUNK_BYTES = 2**29
"""Drafter's logits of a chunk when none is asked for."""


def takes(head: Tensor | None, reduced: bool) -> bool:
    """Whether a loss goes this way.

    Args:
        head: [V, D] if the target's logits are the product with it and nothing else, or None.
        reduced: Whether the drafter has a vocabulary of its own.
    """
    return head is not None and head.dtype == torch.bfloat16 and not reduced


@dataclass(frozen=True, eq=False)
class Imitated:
    """What the slots of every chunk of `size` imitate, on the device.

    parts: rows of the target's states [m], and which of those each slot imitates [c].
    """

    size: int
    parts: list[tuple[Tensor, Tensor]]


def imitate(rows: Tensor, counts: Sequence[int], size: int, device: torch.device) -> Imitated:
    """Of the supervised slots of blocks, `counts` in each, that imitate states `rows` [n]."""
    found = [torch.unique(rows[part.rows], return_inverse=True) for part in chunks(counts, size)]
    sent = send_all([each for pair in found for each in pair], device)
    return Imitated(size, list(zip(sent[::2], sent[1::2], strict=True)))


def even_chunk(count: int, vocabulary: int, slots: int) -> int:
    """Slots of a chunk: as few chunks as `CHUNK_BYTES` allows, of about the same size.

    Chunks end with whole blocks of at most `slots`: the room for one more lets the last one not
    leave a remainder, whose products would read all of W for a few slots.
    """
    most = max(1, CHUNK_BYTES // (2 * vocabulary))
    return -(-max(1, count) // max(1, -(-count // most))) + slots - 1


def head_terms(
    inputs: tuple[Tensor, Tensor, Tensor], slots: Slots, chunk: int, terms: Tensor, trained: bool
) -> tuple[Tensor, list[Tensor]]:
    """The mixture [], and the gradients of states, codes and W2 if `trained`, else none.

    `terms` [5, n] is filled.
    """
    assert slots.head is not None
    states, codes, weight = (tensor.to(slots.head.dtype) for tensor in inputs)
    gradients = []
    if trained:
        gradients = [torch.empty_like(states), torch.empty_like(codes)]
    parts = chunks(slots.counts, chunk)
    imitated = slots.imitated
    if imitated is None:
        imitated = imitate(slots.target_rows, slots.counts, chunk, states.device)
    if trained:
        made = torch.empty_like if parts else torch.zeros_like
        gradients.append(made(weight, dtype=terms.dtype))
    for at, part in enumerate(parts):
        z = _pulled(part, imitated.parts[at], (states, codes, weight), slots, terms, trained)
        if trained:
            torch.mm(z, slots.head, out=gradients[0][part.rows])
            torch.mm(z, weight, out=gradients[1][part.rows])
            add_product(gradients[2], z.T, codes[part.rows], fresh=at == 0)
        del z
    return mixture(terms, slots.grid, slots.objective, None), gradients


def _pulled(
    part: Chunk,
    imitated: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    slots: Slots,
    terms: Tensor,
    trained: bool,
) -> Tensor:
    """The gradient of a chunk's mixture in its logits [c, V], or those, untrained."""
    assert slots.head is not None
    states, codes, weight = inputs
    rows, wanted = part.rows, slots.objective.divergences
    z = torch.mm(codes[rows], weight.T).addmm_(states[rows], slots.head.T)
    which, shared = imitated
    target = torch.mm(slots.target_states[which].to(slots.head.dtype), slots.head.T)
    found = ops.distill_terms(z, target, shared, slots.labels[rows], wanted)
    if not slots.objective.nla:
        found[0][TERMS.index("nla")] = 0
    terms[:, rows] = found[0]
    if trained:
        coefficients = _worths(found[0], part.grid(slots.grid), slots.objective)
        z = ops.distill_pull(z, target, shared, slots.labels[rows], wanted, found, coefficients)
    return z


def _worths(terms: Tensor, grid: Grid, objective: Objective) -> Tensor:
    """What each term of each slot is worth, [5, c]."""
    if not objective.length:
        return worths(terms, grid, objective, None)
    leaf = terms.detach().requires_grad_()
    with torch.enable_grad():
        mixed = mixture(leaf, grid, objective, None)
    [coefficients] = torch.autograd.grad(mixed, leaf)
    return coefficients
