"""The transformers caches of a batch of requests, one each, and how a block is taken back.

    before      keep the caches of all layers: attention tensors are replaced and never written, so
                a reference holds them; recurrent states are copied
    commit(n)   all rows: nothing to do.   Otherwise the kept state comes back, and
                every layer is attention     the first n rows are cut from what the block left
                some layer is not            the first n rows run once more

Counts are absolute lengths throughout: what `crop` means by a number differs between versions of
transformers, so it is never called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dspark.runtime.target import Cache, Snapshot

_REPLACING = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that never write into a tensor they hold."""


@dataclass(frozen=True, eq=False)
class LayerStates:
    """The cache layers of one request after `length` tokens; also what a snapshot is."""

    length: int
    layers: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        held: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            held.append(tensor)
            return tensor

        for layer in self.layers:
            _mapped(layer, note)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def to(self, device: torch.device | str) -> LayerStates:
        """The same on another device."""
        moved = [_mapped(layer, lambda tensor: tensor.to(device)) for layer in self.layers]
        return LayerStates(self.length, tuple(moved))

    def copied(self) -> LayerStates:
        """What no later pass can change."""
        return LayerStates(self.length, tuple(_kept(layer) for layer in self.layers))


@dataclass(eq=False)
class Request:
    """One batch row: its transformers cache, and what it was before the pending rows."""

    cache: Any
    length: int = 0
    pending: Tensor | None = None
    before: LayerStates | None = None

    def states(self) -> LayerStates:
        return LayerStates(self.length, tuple(self.cache.layers))

    def load(self, states: LayerStates) -> None:
        self.cache.layers = list(states.layers)
        self.length = states.length


@dataclass(eq=False)
class ReplayCache:
    """The caches of a batch of requests; see `dspark.runtime.target.Cache`."""

    fresh: Callable[[], Any]
    rerun: Callable[[Request, Tensor], object]
    device: torch.device
    requests: list[Request] = field(default_factory=list)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(
            [request.length for request in self.requests], dtype=torch.int64, device=self.device
        )

    @property
    def nbytes(self) -> int:
        kept = [request.before for request in self.requests if request.before is not None]
        return sum(states.nbytes for states in [*kept, *(r.states() for r in self.requests)])

    def commit(self, n: int | Tensor) -> None:
        if not self._is_pending:
            raise ValueError("no block is pending: there is nothing to commit")
        counts = [n] * len(self.requests) if isinstance(n, int) else [int(x) for x in n.tolist()]
        most = [0 if r.pending is None else r.pending.shape[0] for r in self.requests]
        if any(not 0 <= count <= limit for count, limit in zip(counts, most, strict=True)):
            raise ValueError(f"cannot accept {counts} rows of blocks with {most}")
        for request, count in zip(self.requests, counts, strict=True):
            self._keep(request, count)

    def commit_path(self, path: Tensor) -> None:
        """Keep a prefix, given as the rows 0, 1, ... of each batch row, -1 padded."""
        steps = torch.arange(path.shape[1], device=path.device)
        used = path >= 0
        counts = used.sum(1)
        expected = torch.where(steps < counts.unsqueeze(1), steps, -1)
        if not bool((path == expected).all()):
            raise ValueError("commit_path: this target runs chains only, so a path is 0, 1, 2, ...")
        self.commit(counts)

    def rollback(self) -> None:
        self.commit(0)

    def _keep(self, request: Request, count: int) -> None:
        rows, before = request.pending, request.before
        request.pending = request.before = None
        if rows is None or before is None or count == rows.shape[0]:
            return
        after = request.states()
        request.load(before)
        if count == 0:
            return
        if all(type(layer) is DynamicLayer for layer in after.layers):
            length = before.length + count
            cut = [_mapped(layer, lambda tensor: tensor[..., :length, :]) for layer in after.layers]
            request.load(LayerStates(length, tuple(cut)))
        else:
            self.rerun(request, rows[:count])

    @property
    def _is_pending(self) -> bool:
        return any(request.before is not None for request in self.requests)

    def settled(self, what: str) -> None:
        if self._is_pending:
            raise RuntimeError(f"a block is pending: commit or roll it back before {what}")

    def select(self, rows: Tensor) -> None:
        self.settled("selecting rows")
        self.requests = [self.requests[row] for row in rows.tolist()]

    def fork(self) -> ReplayCache:
        self.settled("forking")
        other = ReplayCache(self.fresh, self.rerun, self.device)
        for request in self.requests:
            other.requests.append(Request(self.fresh()))
            other.requests[-1].load(request.states().copied())
        return other

    def snapshot(self, row: int) -> LayerStates:
        self.settled("taking a snapshot")
        return self.requests[row].states().copied()

    def restore(self, row: int, snapshot: Snapshot) -> None:
        self.settled("restoring")
        if not isinstance(snapshot, LayerStates):
            raise ValueError(f"a {type(snapshot).__name__} of another kind of target")
        request = Request(self.fresh())
        request.load(snapshot.to(self.device).copied())
        self.requests[row] = request

    def put(self, row: int, other: Cache) -> None:
        if not isinstance(other, ReplayCache):
            raise ValueError(f"a {type(other).__name__} of another kind of target")
        if len(other.requests) != 1:
            raise ValueError(f"expected a cache of one row, got {len(other.requests)}")
        self.restore(row, other.snapshot(0))

    def reset(self, row: int) -> None:
        self.settled("resetting a row")
        self.requests[row] = Request(self.fresh())

    def offload(self) -> None:
        self.settled("moving the cache")
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for request in self.requests:
            request.load(request.states().to(device))


def _kept(layer: Any) -> Any:
    return copy.copy(layer) if type(layer) in _REPLACING else copy.deepcopy(layer)


def _mapped(layer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a cache layer whose tensors, also those in dicts and lists, went through `change`.

    Tensors of fewer than two dimensions are settings, not states, and stay.
    """
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(new, name, _changed(value, change))
    return new


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.dim() >= 2 else value
    if isinstance(value, dict):
        return {key: _changed(part, change) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value)(_changed(part, change) for part in value)  # type: ignore[call-arg]
    return value
