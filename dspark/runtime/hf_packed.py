"""Projections that read the same rows, as one product: queries, keys and values; gate and up.

    [W_q; W_k; W_v] x       in place of three

The weights of a group move into one matrix, of which the parameters of the model become views:
nothing is held twice, and the model goes on working. The first of a group that is called makes all
of them; the others take their part if they are given the very same rows, and else make their own.

Letters: D width of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that stand side by side in a module."""


class PackedProjections:
    """The groups of a model whose products may be made at once. Moves their weights."""

    def __init__(self, model: nn.Module) -> None:
        owners = _owners(model)
        found = ([getattr(m, n, None) for n in names] for m in model.modules() for names in GROUPS)
        fitting = (_fit(group, owners) for group in found)
        self._groups = [_Group(group) for group in fitting if group is not None]

    def __len__(self) -> int:
        return len(self._groups)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, one step of the model runs so."""
        for group in self._groups:
            group.begin()
        try:
            yield
        finally:
            for group in self._groups:
                group.end()


class _Group:
    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._weight = _joined([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers]
        self._bias = None if biases[0] is None else _joined(biases)
        self._rows: Tensor | None = None
        self._made: list[Tensor] = []

    def begin(self) -> None:
        for index, layer in enumerate(self._layers):
            layer.forward = self._maker(index)  # type: ignore[assignment]

    def end(self) -> None:
        self._rows, self._made = None, []
        for layer in self._layers:
            del layer.forward

    def _maker(self, index: int) -> Callable[[Tensor], Tensor]:
        def make(rows: Tensor) -> Tensor:
            if self._rows is not rows:
                if index:  # out of turn: the others would be made for nothing
                    return F.linear(rows, self._layers[index].weight, self._layers[index].bias)
                self._rows = rows
                self._made = list(F.linear(rows, self._weight, self._bias).split(self._sizes, -1))
            return self._made[index]

        return make


def _owners(model: nn.Module) -> dict[int, int]:
    """By parameter, in how many places it is."""
    count: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            count[id(parameter)] = count.get(id(parameter), 0) + 1
    return count


def _fit(group: Sequence[object], owners: dict[int, int]) -> list[nn.Linear] | None:
    """The group, if they are plain linear layers of their own, alike but for their outputs."""
    layers = [layer for layer in group if type(layer) is nn.Linear and "forward" not in vars(layer)]
    kinds = {
        (layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device)
        for layer in layers
    }
    alone = all(owners[id(p)] == 1 for layer in layers for p in layer.parameters())
    return layers if len(layers) == len(group) and len(kinds) == 1 and alone else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor [sum of n, ..] of parameters [n, ..], which become views of it, or are already."""
    first, ends = parts[0], [part.data_ptr() + part.nbytes for part in parts]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    follow = all(part.data_ptr() == end for part, end in zip(parts[1:], ends, strict=False))
    whole = all(part.is_contiguous() for part in parts)
    if len(storages) == 1 and follow and whole:
        size = (sum(len(part) for part in parts), *first.shape[1:])
        return first.detach().as_strided(size, first.stride())
    # of the kind that the parameters are, whatever mode this is: the model is used in others too
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        joined = torch.cat([part.detach() for part in parts])
        for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = rows
    return joined
