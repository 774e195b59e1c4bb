"""What one supervised slot can be taught by, and how slots and terms are mixed into one number.

With the drafter's distribution q, the target's p, the data token x (softmaxes at temperature 1):

    ce          -log q(x)                      l1    sum |q - p| = 2 TV
    nla         -log sum min(p, q)             kl    sum p log(p/q)      reverse_kl  sum q log(q/p)
    lk_hybrid   s kl + (1 - s) TV,  s = exp(-3 (1 - TV)) held constant   (arXiv 2602.23881)
    length      - sum_k prod_{i<=k} (1 - TV_i), once a block: minus the drafted tokens it gets in

1 - TV is the chance that a slot's proposal is accepted. Slots weigh `decay`, exp(-k / decay), or

    dpace       w_j = sum_{m>=j} prod_{i<=m} (q_i(x_i) + 1) / 2  held constant   (arXiv 2605.18810)

which follows how far a block is likely to get. The mixture divides by the sum of decay weights, or
under dpace by the number of blocks (weights that sum to less where the drafter fails must not be
scaled back up), both taken over the whole global batch.

Letters: n supervised slots, G slots of a block, m blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

TERMS = ("ce", "l1", "nla", "kl", "reverse_kl")
"""Per-slot numbers the fused loss delivers, in this order; everything else follows from them."""

SLOT_WEIGHTS = ("decay", "dpace")

_DPACE_FLOOR = 0.5
_HYBRID_RATE = 3.0


@dataclass(frozen=True)
class Objective:
    """Coefficients of the terms, and how slots weigh. The defaults are DeepSpec's."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    kl: float = 0.0
    reverse_kl: float = 0.0
    nla: float = 0.0
    lk_hybrid: float = 0.0
    length: float = 0.0
    slot_weights: str = "decay"
    decay: float = 4.0

    @property
    def divergences(self) -> bool:
        """Whether a term compares logarithms of p and q."""
        return self.kl > 0 or self.reverse_kl > 0 or self.lk_hybrid > 0

    @property
    def per_block(self) -> bool:
        """Whether the mixture is divided by blocks instead of decay weights."""
        return self.slot_weights == "dpace"


@dataclass(frozen=True)
class Grid:
    """Where n slots sit in a table [m, G] of blocks.

    block, position: [n] int64. blocks: m. slots: G.
    """

    block: Tensor
    position: Tensor
    blocks: int
    slots: int

    def table(self, values: Tensor) -> Tensor:
        """Values of the slots [n] as [m, G], zero elsewhere; differentiable."""
        flat = values.new_zeros(self.blocks * self.slots)
        flat = flat.index_put((self.block * self.slots + self.position,), values)
        return flat.view(self.blocks, self.slots)

    def per_position(self, values: Tensor) -> Tensor:
        """Sums of values [..., n] over blocks, [..., G]."""
        sums = values.new_zeros(*values.shape[:-1], self.slots)
        return sums.index_add(-1, self.position, values)


def slot_weights(block_size: int, decay: float, like: Tensor) -> Tensor:
    """exp(-k / decay) for k = 0..G-1: largest at the first slot, [G]; shared, not to be written."""
    return _slot_weights(block_size, decay, like.device, like.dtype)


@lru_cache(maxsize=16)
def _slot_weights(
    block_size: int, decay: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    with torch.inference_mode(False):
        return torch.exp(-torch.arange(block_size, device=device, dtype=dtype) / decay)


@lru_cache(maxsize=16)
def _constants(objective: Objective, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Coefficients of the terms, [5, 1]."""
    named = [getattr(objective, name) for name in TERMS]
    with torch.inference_mode(False):
        return torch.tensor(named, dtype=dtype, device=device)[:, None]


def block_unit(slots: int, objective: Objective, like: Tensor) -> Tensor:
    """What one whole block counts for in the normaliser, []."""
    if objective.per_block:
        return like.new_ones(())
    return slot_weights(slots, objective.decay, like).sum()


def confidence_weights(weight: Tensor, grid: Grid, objective: Objective) -> Tensor:
    """Decay weights [n] scaled so that those of a whole block add up to its `block_unit`."""
    if not objective.per_block:
        return weight
    return weight / slot_weights(grid.slots, objective.decay, weight).sum()


def mixture(terms: Tensor, grid: Grid, objective: Objective, known: Tensor | None) -> Tensor:
    """The number to minimise, before its normaliser: [], differentiable in the terms.

    Args:
        terms: [5, n] as in `TERMS`; those without a coefficient are not read.
        grid: Where the slots sit. Only whole blocks may be given.
        objective: Coefficients and slot weights.
        known: [n] bool, labels that the draft vocabulary holds; None: all.
    """
    ce, l1, nla, kl, reverse_kl = terms
    per_slot = objective.ce * ce + objective.l1 * l1
    if objective.nla:
        per_slot = per_slot + objective.nla * nla
    if objective.kl:
        per_slot = per_slot + objective.kl * kl
    if objective.reverse_kl:
        per_slot = per_slot + objective.reverse_kl * reverse_kl
    if objective.lk_hybrid:
        share = torch.exp(-_HYBRID_RATE * (1 - l1.detach() / 2))
        hybrid = share * kl + (1 - share) * l1 / 2
        per_slot = per_slot + objective.lk_hybrid * hybrid
    total = (_weights(ce, grid, objective, known) * per_slot).sum()
    if objective.length:
        unit = block_unit(grid.slots, objective, ce)
        total = total - objective.length * unit * grid.table(1 - l1 / 2).cumprod(-1).sum()
    return total


def worths(terms: Tensor, grid: Grid, objective: Objective, known: Tensor | None) -> Tensor:
    """The gradient of `mixture` in the terms, [5, n], of an objective without `length`."""
    if objective.length:
        raise ValueError("the terms of a block depend on each other under `length`")
    ce, l1 = terms[:2]
    found = _weights(ce, grid, objective, known) * _constants(objective, ce.device, ce.dtype)
    if objective.lk_hybrid:
        weight = objective.lk_hybrid * _weights(ce, grid, objective, known)
        share = torch.exp(-_HYBRID_RATE * (1 - l1 / 2))
        found[TERMS.index("kl")] += weight * share
        found[TERMS.index("l1")] += weight * (1 - share) / 2
    return found


def _weights(ce: Tensor, grid: Grid, objective: Objective, known: Tensor | None) -> Tensor:
    """What slots weigh, [n], constants."""
    if objective.slot_weights == "dpace":
        return dpace_weights(ce, grid, known)
    return slot_weights(grid.slots, objective.decay, ce)[grid.position]


def dpace_weights(ce: Tensor, grid: Grid, known: Tensor | None) -> Tensor:
    """w_j of the slots, [n], constants: how much of the block's progress runs through slot j."""
    chance = torch.exp(-ce.detach())
    if known is not None:
        chance = chance * known
    smooth = grid.table((1 - _DPACE_FLOOR) * chance + _DPACE_FLOOR)
    reached = smooth.cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)[grid.block, grid.position]
