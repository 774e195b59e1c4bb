"""Sizes that a drafter can be cut to, and what each costs before it exists.

A size is the layers that stay and how many units each axis keeps. All layers keep equally many
heads and MLP channels, as every layout that drafters are exchanged in has one number for all
layers; *which* ones stay is each layer's own. MLP widths and ranks go down in aligned steps, heads
one by one, and at least one unit of everything stays.

Parameters and bytes are sums over layers of terms in heads and in MLP width, plus one in the rank:

    cost(n, h, f, r) = c_n + h a_n + f b_n + d_r        n layers, h heads, f MLP channels, rank r

so a handful of configurations that nobody allocates (`cost.py`) give those of all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark.draft.config import DraftConfig
from dspark.draft.pruning.axes import head_units

MLP_STEP, RANK_STEP = 16, 8
"""Alignment of what stays of MLP width and rank."""

Cost = Callable[[DraftConfig], int]


@dataclass(frozen=True)
class Size:
    """What stays: ids of layers (ascending), heads or key-value groups, MLP channels, ranks."""

    layers: tuple[int, ...]
    heads: int
    mlp: int
    rank: int

    @classmethod
    def of(cls, config: DraftConfig) -> Size:
        """All of a drafter."""
        layers = tuple(range(config.num_layers))
        return cls(layers, head_units(config), config.intermediate_size, config.markov_rank)


def resized(config: DraftConfig, size: Size) -> DraftConfig:
    """The configuration of a drafter cut to `size`."""
    shared = config.num_attention_heads // head_units(config)
    kinds = config.layer_types and tuple(config.layer_types[layer] for layer in size.layers)
    slides = kinds is not None and "sliding_attention" in kinds
    return replace(
        config,
        num_layers=len(size.layers),
        num_attention_heads=size.heads * shared,
        num_key_value_heads=size.heads,
        intermediate_size=size.mlp,
        markov_rank=size.rank,
        layer_types=kinds if slides else None,
        sliding_window=config.sliding_window if slides else None,
    )


@dataclass(frozen=True, eq=False)
class Grid:
    """Every size there is, along four axes.

    Attributes:
        order: Layer ids, the one that goes first standing first.
        heads, mlp, ranks: Numbers of units that can stay, ascending.
    """

    config: DraftConfig
    order: tuple[int, ...]
    heads: tuple[int, ...]
    mlp: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, config: DraftConfig, order: Sequence[int]) -> Grid:
        """All sizes of a drafter whose layers go in `order`."""
        whole = Size.of(config)
        return cls(
            config,
            tuple(order),
            tuple(range(1, whole.heads + 1)),
            _steps(whole.mlp, MLP_STEP),
            _steps(whole.rank, RANK_STEP),
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How many numbers of layers, heads, MLP channels and ranks there are."""
        return len(self.order), len(self.heads), len(self.mlp), len(self.ranks)

    def size(self, index: Sequence[int]) -> Size:
        """The size at an index of the grid."""
        layers, heads, mlp, rank = index
        return Size(self.layers(layers + 1), self.heads[heads], self.mlp[mlp], self.ranks[rank])

    def layers(self, count: int) -> tuple[int, ...]:
        """The layers that stay if `count` do."""
        return tuple(sorted(self.order[len(self.order) - count :]))

    def costs(self, cost: Cost) -> np.ndarray:
        """cost [layers, heads, mlp, ranks] of every size, from few configurations."""
        top = self.ranks[-1]

        def at(layers: int, heads: int, mlp: int, rank: int) -> int:
            return cost(resized(self.config, Size(self.layers(layers), heads, mlp, rank)))

        counts = range(1, len(self.order) + 1)
        base = np.array([at(n, 1, 1, top) for n in counts])
        head = np.array([at(n, 2, 1, top) for n in counts]) - base
        channel = np.array([at(n, 1, 2, top) for n in counts]) - base
        rank = np.array([at(1, 1, 1, r) for r in self.ranks]) - base[0]
        heads, mlp = np.array(self.heads) - 1, np.array(self.mlp) - 1
        return (
            base[:, None, None, None]
            + (head[:, None] * heads)[:, :, None, None]
            + (channel[:, None] * mlp)[:, None, :, None]
            + rank
        )


def _steps(whole: int, step: int) -> tuple[int, ...]:
    """Multiples of `step` below `whole`, and `whole`."""
    return (*range(step, whole, step), whole)
