"""Small distributions, known in closed form, behind the interfaces that the runtime decodes with.

    target    p(next | previous)                         an order-1 Markov chain on V tokens
    drafter   slots_k + bias[class(previous)]            three classes of tokens
    c_k       a table of slot and class(previous)        so c_{k+1} really varies with x_k

Every batch row belongs to a *variant* of the world. Variants of a sampled world are the same laws
with the ids shifted around: rows differ in every table that they read, so that reading a
neighbour's shows, and yet all can be counted together after shifting back. Variants of a greedy
world are unrelated, with logits on a coarse grid so that ties are common.

Letters: N variants, B batch, G slots, V vocab, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dspark.draft.calibration import Calibration
from dspark.runtime.sampling import SamplingParams
from dspark.taps import TapSet

VOCAB, SLOTS, CLASSES = 24, 3, 3


@dataclass(frozen=True, eq=False)
class World:
    """Tables of N variants.

    target      [N, V, V] logits after each token
    slots       [N, G, V], bias [N, C, V]: logits of the drafter
    confidence  [G, C] logits
    classes     [N, V] int64
    shifts      [N] int64: id = canonical id + shift modulo V; the anchor is canonical token 0
    """

    target: Tensor
    slots: Tensor
    bias: Tensor
    confidence: Tensor
    classes: Tensor
    shifts: Tensor

    @classmethod
    def sampled(cls, seed: int = 0, variants: int = 3) -> World:
        """One world in shifted copies."""
        generator = torch.Generator().manual_seed(seed)
        base = 1.3 * torch.randn(CLASSES, VOCAB, generator=generator)
        classes = torch.arange(VOCAB) % CLASSES
        target = base[classes] + 0.7 * torch.randn(VOCAB, VOCAB, generator=generator)
        slots = 0.7 * torch.randn(SLOTS, VOCAB, generator=generator)
        shifts = 5 * torch.arange(variants)
        rolled = [
            (
                target.roll((shift, shift), (0, 1)),
                slots.roll(shift, 1),
                base.roll(shift, 1),
                classes.roll(shift),
            )
            for shift in shifts.tolist()
        ]
        targets, all_slots, biases, all_classes = (
            torch.stack(column) for column in zip(*rolled, strict=True)
        )
        return cls(targets, all_slots, biases, _confidence(), all_classes, shifts)

    @classmethod
    def greedy(cls, seed: int, variants: int) -> World:
        """Unrelated worlds, ties everywhere."""
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(variants, CLASSES, VOCAB, generator=generator)
        classes = torch.randint(CLASSES, (variants, VOCAB), generator=generator)
        noise = torch.randn(variants, VOCAB, VOCAB, generator=generator)
        target = base.gather(1, classes.unsqueeze(-1).expand(-1, -1, VOCAB)) + 0.5 * noise
        slots = 0.5 * torch.randn(variants, SLOTS, VOCAB, generator=generator)
        shifts = torch.zeros(variants, dtype=torch.int64)
        return cls(_grid(target), _grid(slots), _grid(base), _confidence(), classes, shifts)

    def law(self, params: SamplingParams) -> Tensor:
        """[V, V] float64 p(next | previous) of the first variant, not by the code under test."""
        return torch.stack([reference(row, params) for row in self.target[0]])


def _confidence() -> Tensor:
    """Chances 0.95 .. 0.15, high after one class and low after another, slot by slot another."""
    chances = torch.tensor([[0.92, 0.7, 0.4], [0.95, 0.2, 0.6], [0.25, 0.93, 0.5]])
    return chances.logit()


def _grid(logits: Tensor) -> Tensor:
    return (2 * logits).round() / 2


def reference(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] -> [V] float64: from the most likely token down until k tokens or mass p is reached."""
    x = logits.double() / params.temperature
    p = torch.exp(x - x.max())
    order = torch.argsort(p, descending=True)
    if 0 < params.top_k < len(p):
        p[p < p[order[params.top_k - 1]]] = 0
    p /= p.sum()
    needed = int((p[order].cumsum(0) < params.top_p - 1e-9).sum())
    p[p < p[order[min(needed, len(p) - 1)]]] = 0
    return p / p.sum()


class Tables:
    """A world's target and drafter for the rows `variant` [B] of a batch."""

    def __init__(self, world: World, variant: Tensor) -> None:
        self.world, self.variant = world, variant
        self.config = SimpleNamespace(block_size=SLOTS, mask_token_id=0)
        self.calibration: Calibration | None = None
        self.draft_ids: Tensor | None = None
        self.taps = TapSet((0,), "residual")
        self.vocab_size, self.device, self.dtype = VOCAB, torch.device("cpu"), torch.float32

    @property
    def anchor(self) -> Tensor:
        """[B]: canonical token 0."""
        return self.world.shifts[self.variant]

    def after(self, tokens: Tensor) -> Tensor:
        """Target logits [B, R, V] after tokens [B, R]."""
        return self.world.target[self.variant.unsqueeze(1), tokens]

    # As a target: states are rows of logits already. -------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens.unsqueeze(-1).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    # As a drafter. -----------------------------------------------------------------------------

    @property
    def markov_head(self) -> Any:
        return SimpleNamespace(
            start=lambda batch: None,
            step=lambda prev, hidden, state: (prev, state),
            bias=lambda code: self.world.bias[self.variant, self._class(code)],
            embed=lambda before: self.world.classes[self.variant.unsqueeze(1), before],
        )

    @property
    def confidence_head(self) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda hidden, embed: self.world.confidence[torch.arange(embed.shape[1]), embed]

    def block_hidden(self, block_embeds: Tensor, context: Any) -> Tensor:
        return self.world.slots[self.variant]

    def _class(self, tokens: Tensor) -> Tensor:
        return self.world.classes[self.variant, tokens]
