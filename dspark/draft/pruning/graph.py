"""Removing units through torch-pruning's dependency graph.

torch-pruning finds what belongs together by walking autograd's graph. A drafter's own forward does
not survive that: a recurrence, sliced weights and free-standing parameters have no channels it
could follow, and frozen or unexecuted modules are left out in silence. So it is given a skeleton:
one `Port` for every piece of every axis, whose channels are the units, coupled by elementwise
products. Cutting a unit at any port then cuts it at all of them.

What comes out is checked tensor by tensor against a drafter of the size that was asked for. Nothing
is ever partly pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.axes import Axis, Piece


class Port(nn.Module):
    """Where one piece meets the graph: a product that autograd sees, with a channel per unit."""

    def __init__(self, piece: Piece, units: int, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.piece, self.tensors = piece, tensors
        self.scale = nn.Parameter(torch.ones(units))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def remove(self, units: Iterable[int]) -> None:
        """Take the units' part out of the tensor."""
        gone = set(self.piece.indices(units))
        tensor = self.tensors[self.piece.name]
        kept = [i for i in range(tensor.shape[self.piece.dim]) if i not in gone]
        index = torch.tensor(kept, device=tensor.device)
        self.tensors[self.piece.name] = tensor.index_select(self.piece.dim, index)


class Skeleton(nn.Module):
    """All ports, those of an axis in a chain; its outputs are one row of units per axis."""

    def __init__(self, axes: Iterable[Axis], tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.chains = nn.ModuleList(
            nn.Sequential(*(Port(piece, axis.units, tensors) for piece in axis.pieces))
            for axis in axes
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        return [chain(x) for chain in self.chains]


def remove_units(
    drafter: DSparkDrafter,
    axes: Sequence[Axis],
    kept: Mapping[str, Sequence[int]],
    config: DraftConfig,
) -> DSparkDrafter:
    """A smaller copy of a drafter.

    Args:
        drafter: Stays as it is. Frozen parameters are pruned like all others, and stay frozen.
        axes: Of `drafter`, at most one that touches each tensor along each dimension.
        kept: Axis name -> units that stay, ascending and at least one; other axes stay whole.
        config: Of the result.

    Raises:
        ValueError: No unit would be left, or a tensor does not come out as `config` says: a
            parameter that no axis knows of, say. Nothing has been changed then.
    """
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    skeleton = Skeleton(axes, tensors)
    for axis, chain in zip(axes, skeleton.chains, strict=True):
        stay = kept.get(axis.name, range(axis.units))
        if not stay or not set(stay) <= set(range(axis.units)):
            raise ValueError(
                f"{axis.name}: keep {list(stay)}; expected some of 0..{axis.units - 1}"
            )
        gone = sorted(set(range(axis.units)) - set(stay))
        if gone:
            _prune(skeleton, chain, gone)  # type: ignore[arg-type]
    return assembled(drafter, tensors, config)


def assembled(
    drafter: DSparkDrafter, tensors: Mapping[str, Tensor], config: DraftConfig
) -> DSparkDrafter:
    """A drafter of `config` made of `tensors`; what was frozen in `drafter` is frozen in it.

    Raises ValueError naming the first tensors whose shapes are not those of `config`.
    """
    with torch.device("meta"):
        smaller = DSparkDrafter(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in smaller.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{name} is {found.get(name, 'missing')}, {wanted.get(name, 'nothing')} was expected"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name)
    ]
    if wrong:
        raise ValueError(f"a drafter that cannot be pruned as a whole: {'; '.join(wrong[:4])}")
    smaller.load_state_dict(dict(tensors), assign=True)
    frozen = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return smaller.train(drafter.training)


def _prune(skeleton: Skeleton, chain: nn.Sequential, units: list[int]) -> None:
    pruner = _port_pruner()
    graph = _dependency_graph(skeleton, pruner)
    group = graph.get_pruning_group(chain[0], pruner.prune_out_channels, units)
    reached = {id(dep.target.module) for dep, _ in group if isinstance(dep.target.module, Port)}
    if reached != {id(port) for port in chain}:
        raise ValueError("torch-pruning did not reach every tensor of the axis")
    group.prune()


def _dependency_graph(skeleton: Skeleton, pruner: Any) -> Any:
    import torch_pruning as tp

    with torch.enable_grad():
        return tp.DependencyGraph().build_dependency(
            skeleton,
            example_inputs=torch.ones(1, 1),
            customized_pruners={Port: pruner},
            verbose=False,
        )


def _port_pruner() -> Any:
    import torch_pruning as tp

    class PortPruner(tp.BasePruningFunc):
        """Cuts units at a port; its inputs are its outputs."""

        TARGET_MODULES = Port

        def prune_out_channels(self, layer: Port, idxs: Sequence[int]) -> Port:
            layer.remove(idxs)
            return layer

        prune_in_channels = prune_out_channels

        def get_out_channels(self, layer: Port) -> int:
            return len(layer.scale)

        get_in_channels = get_out_channels

    return PortPruner()
