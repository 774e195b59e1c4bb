"""A drafter cut to a size: the units of each layer that score highest stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.axes import Axis, axes
from dspark.draft.pruning.graph import assembled, remove_units
from dspark.draft.pruning.low_rank import lower_rank
from dspark.draft.pruning.sizes import Size, resized

MARKOV = "markov"


def cut_to(drafter: DSparkDrafter, size: Size, scores: Mapping[str, Tensor]) -> DSparkDrafter:
    """A smaller copy; the drafter stays as it is.

    Args:
        drafter: To cut. Its calibration does not come along: acceptance changes.
        size: Of the result.
        scores: Axis name -> importance of its units, for all axes of which something goes; not for
            the rank of a vanilla head, whose best lower rank is known (`low_rank.py`).

    Raises:
        ValueError: A size that is not inside the drafter's, or a drafter that cannot be pruned as a
            whole.
    """
    whole, config = Size.of(drafter.config), drafter.config
    check_inside(size, whole)
    vanilla = config.markov_head_type == "vanilla"
    found = list(axes(config).values())
    kept = {
        axis.name: _kept(axis, size, scores) for axis in found if not vanilla or _is_layer(axis)
    }
    units = replace(size, layers=whole.layers, rank=whole.rank if vanilla else size.rank)
    cut = remove_units(drafter, found, kept, resized(config, units))
    cut = keep_layers(cut, size.layers)
    return lower_rank(cut, size.rank) if vanilla else cut


def keep_layers(drafter: DSparkDrafter, layers: Sequence[int]) -> DSparkDrafter:
    """A copy with these layers only, ids ascending."""
    place = {layer: index for index, layer in enumerate(layers)}
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            if int(layer) not in place:
                continue
            name = f"layers.{place[int(layer)]}.{rest}"
        tensors[name] = tensor.detach().clone()
    size = replace(Size.of(drafter.config), layers=tuple(layers))
    return assembled(drafter, tensors, resized(drafter.config, size))


def best_units(scores: Tensor, count: int) -> list[int]:
    """The `count` units that score highest, ascending; of equal ones the lower first."""
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def check_inside(size: Size, whole: Size) -> None:
    """Raises ValueError unless a drafter of size `whole` can be cut to `size`."""
    for name in ("heads", "mlp", "rank"):
        if not 1 <= getattr(size, name) <= getattr(whole, name):
            raise ValueError(
                f"{name}: {getattr(size, name)} given, expected 1..{getattr(whole, name)}"
            )
    ids = size.layers
    if not ids or list(ids) != sorted(set(ids)) or not set(ids) <= set(whole.layers):
        raise ValueError(f"layers: {list(ids)} given, expected some of {list(whole.layers)}")


def _is_layer(axis: Axis) -> bool:
    return axis.name != MARKOV


def _kept(axis: Axis, size: Size, scores: Mapping[str, Tensor]) -> list[int]:
    count = size.rank if axis.name == MARKOV else getattr(size, axis.name.rsplit(".", 1)[1])
    if count == axis.units:
        return list(range(axis.units))
    return best_units(scores[axis.name], count)
