"""Where the tensors of a cache come from: memory of its own, or a pool's.

A cache asks its storage for each tensor that outlives a round: per KDA layer the recurrent state
and the convolution window, per MLA layer the latents. It writes them in place from then on, so a
pool that hands out views of its slabs really holds the state. What a round keeps besides (the
pending and the replayed rows, the lengths) is the cache's own and small.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Kind(Enum):
    """What a tensor of a cache holds.

    STATE    [B, H, K, V] float32, recurrent state of a KDA layer
    WINDOW   [B, W-1, C], last rows before the convolution of a KDA layer
    LATENTS  [B, L, X], latents of an MLA layer, L = the cache's max_length
    CONTEXT  any shape, what a drafter remembers beside the cache; its "layer" just counts them
    """

    STATE = "state"
    WINDOW = "window"
    LATENTS = "latents"
    CONTEXT = "draft context"


class Storage(Protocol):
    """A source of tensors. One storage serves one cache."""

    def take(
        self,
        kind: Kind,
        layer: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """A tensor of exactly this shape, its contents arbitrary (NaN allowed).

        States and windows must be contiguous: a kernel that had to copy a strided state would do so
        every round. Latents may have any stride between batch rows.
        May raise whatever says that there is no room; the cache then takes nothing.
        """
        ...

    def give_back(self, kind: Kind, layer: int, tensor: Tensor) -> None:
        """The cache reads and writes this tensor no more (offloaded, or its batch has shrunk)."""
        ...


class PrivateStorage:
    """Memory of the cache's own, freed with it."""

    def take(
        self,
        kind: Kind,
        layer: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def give_back(self, kind: Kind, layer: int, tensor: Tensor) -> None:
        """Nothing to do: the memory goes with its last reference."""


class Wanted(NamedTuple):
    """One tensor that is asked for."""

    kind: Kind
    layer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def take_all(
    storage: Storage,
    wanted: Sequence[Wanted],
    device: torch.device,
) -> list[Tensor]:
    """All of these tensors or, if the storage has no room for one of them, none.

    Raises:
        ValueError: the storage gave something else than was asked for.
    """
    taken: list[Tensor] = []
    try:
        for kind, layer, shape, dtype in wanted:
            taken.append(storage.take(kind, layer, shape, dtype, device))
            _check(taken[-1], kind, layer, shape, dtype)
    except BaseException:
        for (kind, layer, _, _), tensor in zip(wanted, taken, strict=False):
            storage.give_back(kind, layer, tensor)
        raise
    return taken


def _check(
    tensor: Tensor, kind: Kind, layer: int, shape: Sequence[int], dtype: torch.dtype
) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"storage gave {tuple(tensor.shape)} {tensor.dtype} for the {kind.value} of layer "
            f"{layer}; expected {tuple(shape)} {dtype}"
        )
    if kind in (Kind.STATE, Kind.WINDOW) and not tensor.is_contiguous():
        raise ValueError(f"storage gave a strided {kind.value} for layer {layer}")
