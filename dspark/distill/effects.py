"""What parts of a drafter are worth, measured on rows: scores inside an axis, prices between axes.

    taylor      mean over batches of |sum over a unit's output weights of w dL/dw|: to first order,
                what the distillation loss changes when the unit is taken out
    activation  mean square of what a unit adds, E |W_u x_u|^2, W_u its columns of the output
                projection and x_u what they read

Scores say which heads and channels of a layer go first. How far an axis is cut is decided by prices
(`plan.py`): the loss itself, with the axis cut to some sizes. Layers go in the order of the loss
without each of them; block influence, 1 - cos between a layer's input and output, stands beside it.

Ranks of gated and rnn heads are scored by `taylor` always: what they read passes no module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.distill.batches import Batch
from dspark.distill.objective import batch_sums
from dspark.distill.taps import FeatureSource
from dspark.distill.train_settings import TrainSettings
from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.axes import Axis, axes
from dspark.draft.pruning.cutting import MARKOV, cut_to, keep_layers
from dspark.draft.pruning.sizes import Grid, Size
from dspark.runtime.target import Target
from dspark.wording import counted

IMPORTANCES = ("taylor", "activation")
POINTS = (0.75, 0.5, 0.25)
"""Shares of an axis at which its price is measured, beside the smallest and the whole."""

Scores = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Bench:
    """A target, batches and a loss: everything that effects are measured with."""

    target: Target
    batches: Sequence[Batch]
    settings: TrainSettings
    source: FeatureSource | None = None

    @torch.no_grad()
    def loss(self, drafter: DSparkDrafter) -> float:
        """The training objective in nats."""
        total = weight = 0.0
        for batch in self.batches:
            sums = batch_sums(self.target, drafter, batch, self.settings, self.source)
            total += float(sums.objective)
            weight += float(sums.normaliser)
        return total / weight


def scores(bench: Bench, drafter: DSparkDrafter, importance: str) -> Scores:
    """Importance of every unit of every axis, by axis name; the drafter is left as it was."""
    found = list(axes(drafter.config).values())
    if importance == "taylor":
        return _taylor(bench, drafter, found)
    markov = [axis for axis in found if axis.name == MARKOV]
    rest = [axis for axis in found if axis.name != MARKOV]
    return _taylor(bench, drafter, markov) | _activation(bench, drafter, rest)


def _taylor(bench: Bench, drafter: DSparkDrafter, found: Sequence[Axis]) -> Scores:
    outputs = {axis.name: axis.output for axis in found}
    frozen = [p for p in drafter.parameters() if not p.requires_grad]
    total: Scores = {}
    try:
        drafter.requires_grad_(True)
        for batch in bench.batches:
            drafter.zero_grad(set_to_none=True)
            sums = batch_sums(bench.target, drafter, batch, bench.settings, bench.source)
            (sums.objective / sums.normaliser).backward()
            for axis in found:
                piece = outputs[axis.name]
                assert piece is not None
                weight = drafter.get_parameter(piece.name)
                assert weight.grad is not None
                change = (weight.detach() * weight.grad).sum(0)
                each = change.view(axis.units, piece.block).sum(1).abs() / len(bench.batches)
                total[axis.name] = total.get(axis.name, torch.zeros_like(each)) + each
    finally:
        drafter.zero_grad(set_to_none=True)
        for parameter in frozen:
            parameter.requires_grad_(False)
    return total


@torch.no_grad()
def _activation(bench: Bench, drafter: DSparkDrafter, found: Sequence[Axis]) -> Scores:
    grams: dict[str, Tensor] = {}
    modules: dict[str, nn.Module] = {}
    handles = []
    for axis in found:
        assert axis.output is not None
        modules[axis.name] = drafter.get_submodule(axis.output.name.removesuffix(".weight"))
        taking = _gram_of(grams, axis, axis.output.block)
        handles.append(modules[axis.name].register_forward_pre_hook(taking))
    try:
        bench.loss(drafter)
    finally:
        for handle in handles:
            handle.remove()
    result = {}
    for axis in found:
        weight = modules[axis.name].weight
        assert isinstance(weight, Tensor)
        by_unit = weight.unflatten(1, (axis.units, -1)).double()
        result[axis.name] = torch.einsum("duk,ukl,dul->u", by_unit, grams[axis.name], by_unit)
    return result


def _gram_of(grams: dict[str, Tensor], axis: Axis, block: int) -> Callable[..., None]:
    """A hook that adds up x_u x_u^T of every unit, [U, block, block] float64."""

    def take(_module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].reshape(-1, axis.units, block).double()
        gram = torch.einsum("nuk,nul->ukl", x, x) / 1e6  # a common factor, against overflow
        grams[axis.name] = grams[axis.name] + gram if axis.name in grams else gram

    return take


# ------------------------------------------------------------------------------------------- prices


@dataclass(frozen=True, eq=False)
class Prices:
    """The loss of the whole drafter, and what cutting costs.

    without: loss added by leaving out each layer. influence: block influence of each. order: of
    layers, the one that goes first standing first. lists: per axis, units kept -> loss added.
    """

    loss: float
    without: tuple[float, ...]
    influence: tuple[float, ...]
    order: tuple[int, ...]
    lists: dict[str, dict[int, float]]


def price(
    bench: Bench, drafter: DSparkDrafter, scored: Scores, tell: Callable[[str], None]
) -> Prices:
    """Measure the loss of cut drafters, one axis at a time."""
    whole, loss = Size.of(drafter.config), bench.loss(drafter)
    layers = whole.layers
    without = [0.0] * len(layers)
    if len(layers) > 1:
        for layer in layers:
            rest = [other for other in layers if other != layer]
            without[layer] = bench.loss(keep_layers(drafter, rest)) - loss
    order = tuple(sorted(layers, key=lambda layer: without[layer]))
    grid = Grid.of(drafter.config, order)
    sizes = {
        "layers": {n: replace(whole, layers=grid.layers(n)) for n in range(1, len(layers) + 1)},
        "heads": {n: replace(whole, heads=n) for n in points(grid.heads)},
        "mlp": {n: replace(whole, mlp=n) for n in points(grid.mlp)},
        "rank": {n: replace(whole, rank=n) for n in points(grid.ranks)},
    }
    lists: dict[str, dict[int, float]] = {}
    for name, cuts in sizes.items():
        tell(f"measuring what {name} are worth: {counted(len(cuts), 'size')}")
        lists[name] = {
            kept: 0.0 if size == whole else bench.loss(cut_to(drafter, size, scored)) - loss
            for kept, size in cuts.items()
        }
    return Prices(loss, tuple(without), _influence(bench, drafter), order, lists)


def points(available: Sequence[int]) -> list[int]:
    """The smallest, the whole, and what is nearest to `POINTS` between them."""
    whole = available[-1]
    near = {min(available, key=lambda n: (abs(n - share * whole), n)) for share in POINTS}
    return sorted(near | {available[0], whole})


@torch.no_grad()
def _influence(bench: Bench, drafter: DSparkDrafter) -> tuple[float, ...]:
    cosines: list[list[float]] = [[] for _ in drafter.layers]

    with _around(drafter.layers, cosines):
        bench.loss(drafter)
    return tuple(1 - sum(each) / len(each) for each in cosines)


@contextmanager
def _around(layers: nn.ModuleList, cosines: Sequence[list[float]]) -> Iterator[None]:
    def taking(places: list[float]) -> Callable[..., None]:
        def take(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            places.append(float(F.cosine_similarity(args[0].float(), output.float(), -1).mean()))

        return take

    handles = [
        layer.register_forward_hook(taking(places))
        for layer, places in zip(layers, cosines, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def as_document(prices: Prices, scored: Mapping[str, Tensor]) -> dict[str, Any]:
    """What was measured, as JSON."""
    return {
        "loss": prices.loss,
        "loss_without_layer": list(prices.without),
        "block_influence": list(prices.influence),
        "loss_added": {
            name: {str(kept): added for kept, added in measured.items()}
            for name, measured in prices.lists.items()
        },
        "scores": {
            name: [float(f"{x:.4g}") for x in each.tolist()] for name, each in scored.items()
        },
    }
