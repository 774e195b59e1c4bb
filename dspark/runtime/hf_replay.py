"""transformers models whose cache cannot forget: a recurrent state is restored and run again.

Linear attention, Mamba and the like fold every row into a state that no crop can undo, and their
batches take left padding only. So each request has a transformers cache of its own, batch row by
batch row, and a block is judged like this:

    before      keep the caches of all layers: attention tensors are replaced and never written, so
                a reference holds them; recurrent states are copied
    commit(n)   all rows: nothing to do.   Otherwise the kept state comes back, and
                every layer is attention     the first n rows are cut from what the block left
                some layer is not            the first n rows run once more

Right for any cache of transformers, and slow: one pass per batch row, a second one after each
rejection. Models that cannot continue from a state with several rows at once run row by row.

Letters: B batch, T rows, D hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dspark.runtime.hf_target import HFTarget
from dspark.runtime.target import Cache, TargetOutput
from dspark.taps import TapSet

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
        sizes: list[int] = []
        for layer in self.layers:
            _mapped(layer, lambda t: sizes.append(t.numel() * t.element_size()) or t)
        return sum(sizes)

    def to(self, device: torch.device | str) -> LayerStates:
        """The same on another device."""
        moved = [_mapped(layer, lambda tensor: tensor.to(device)) for layer in self.layers]
        return LayerStates(self.length, tuple(moved))

    def copied(self) -> LayerStates:
        """What no later pass can change."""
        return LayerStates(self.length, tuple(_kept(layer) for layer in self.layers))


@dataclass(eq=False)
class _Request:
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
    rerun: Callable[[_Request, Tensor], object]
    device: torch.device
    requests: list[_Request] = field(default_factory=list)

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

    def _keep(self, request: _Request, count: int) -> None:
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

    def _settled(self, what: str) -> None:
        if self._is_pending:
            raise RuntimeError(f"a block is pending: commit or roll it back before {what}")

    def select(self, rows: Tensor) -> None:
        self._settled("selecting rows")
        self.requests = [self.requests[row] for row in rows.tolist()]

    def fork(self) -> ReplayCache:
        self._settled("forking")
        other = ReplayCache(self.fresh, self.rerun, self.device)
        for request in self.requests:
            other.requests.append(_Request(self.fresh()))
            other.requests[-1].load(request.states().copied())
        return other

    def snapshot(self, row: int) -> LayerStates:
        self._settled("taking a snapshot")
        return self.requests[row].states().copied()

    def restore(self, row: int, snapshot: LayerStates) -> None:
        self._settled("restoring")
        request = _Request(self.fresh())
        request.load(snapshot.to(self.device).copied())
        self.requests[row] = request

    def put(self, row: int, other: ReplayCache) -> None:
        if len(other.requests) != 1:
            raise ValueError(f"expected a cache of one row, got {len(other.requests)}")
        self.restore(row, other.snapshot(0))

    def reset(self, row: int) -> None:
        self._settled("resetting a row")
        self.requests[row] = _Request(self.fresh())

    def offload(self) -> None:
        self._settled("moving the cache")
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for request in self.requests:
            request.load(request.states().to(device))


class ReplayTarget(HFTarget):
    """A model with recurrent layers, or one that only its own cache fits.

    Args:
        one_by_one: Rows after the first pass of a request run one at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        end_token_ids: tuple[int, ...],
        vocab_size: int | None = None,
        *,
        one_by_one: bool = False,
    ) -> None:
        super().__init__(model, name, end_token_ids, vocab_size)
        self._one_by_one = one_by_one
        slow = ["slow: batch rows run one after the other, rejected blocks run twice"]
        if one_by_one:
            slow.append("slow: its cache takes one token at a time, so a block saves no pass")
        self.notes = tuple(slow)

    def new_cache(self, batch: int, max_length: int) -> ReplayCache:
        """See `Target.new_cache`."""
        requests = [_Request(self._fresh()) for _ in range(batch)]
        return ReplayCache(self._fresh, self._run, self.device, requests)

    def _fresh(self) -> DynamicCache:
        return DynamicCache(config=self.parts.config)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache,
        *,
        valid: Tensor | None = None,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
        commit: bool,
    ) -> TargetOutput:
        """See `Target.forward`. Raises ValueError for trees: a state has one past."""
        if not isinstance(cache, ReplayCache):
            raise TypeError(f"expected a cache of this target, got {type(cache).__name__}")
        if parents is not None:
            raise ValueError(
                f"target {self.name} verifies chains only: its state cannot branch; use siblings 0"
            )
        cache._settled("the next forward")
        batch, rows = tokens.shape
        hidden = torch.zeros(batch, rows, self.hidden_size, dtype=self.dtype, device=self.device)
        width = 0 if taps is None else len(taps.layer_ids) * self.hidden_size
        tapped = hidden.new_zeros(batch, rows, width)
        for b, request in enumerate(cache.requests):
            real = slice(None) if valid is None else valid[b].nonzero()[:, 0]
            fresh = tokens[b, real]
            if not commit:
                request.before, request.pending = request.states().copied(), fresh
            if fresh.shape[0]:
                hidden[b, real], seen = self._run(request, fresh, taps)
                if seen is not None:
                    tapped[b, real] = seen
        return TargetOutput(hidden, None if taps is None else tapped)

    def _run(
        self, request: _Request, rows: Tensor, taps: TapSet | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows [T] after what the request holds -> [T, D], and taps."""
        step = 1 if self._one_by_one and request.length else max(1, rows.shape[0])
        outputs: list[tuple[Tensor, Tensor | None]] = []
        for piece in rows.split(step):
            given: dict[str, Tensor] = {}
            at = torch.arange(request.length, request.length + len(piece), device=self.device)
            if self.parts.takes("position_ids"):
                given["position_ids"] = at.unsqueeze(0)
            if self.parts.takes("cache_position"):
                given["cache_position"] = at
            outputs.append(self.parts.run(piece.unsqueeze(0), request.cache, taps, **given))
            request.length += len(piece)
        seen = [tap[0] for _, tap in outputs if tap is not None]
        return torch.cat([out[0] for out, _ in outputs]), torch.cat(seen) if seen else None


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
