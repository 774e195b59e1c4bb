"""A request's place in a state pool: where the tensors of its cache and draft context are taken."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dspark.k3.storage import Kind
from dspark.runtime.extents import Extent
from dspark.runtime.target import Cache

if TYPE_CHECKING:
    from dspark.runtime.pool import StatePool

FIXED = (Kind.STATE, Kind.WINDOW)
"""What has the same size whatever the request's length."""


class NoRun(Exception):
    """No free run is long enough for one tensor."""


class Lease:
    """A request's place in a pool: the storage of its cache and of its draft context.

    Usable as a context manager: released at the end, whatever happens.

    Attributes:
        max_length: most tokens of its texts, whole pages.
        batch: texts.
    """

    def __init__(self, pool: StatePool, max_length: int, batch: int) -> None:
        self.pool, self.max_length, self.batch = pool, max_length, batch
        self._held: dict[int, tuple[Extent, int]] = {}
        self._cache: Cache | None = None
        self._context: Any = None
        self._released = False
        pool.leases.add(self)

    def open(self) -> None:
        """Make the cache and the context; `StatePool.admit` calls it."""
        pool = self.pool
        self._cache = pool.target.new_cache(self.batch, self.max_length, self)
        if pool.drafter is not None:
            self._context = pool.drafter.new_context(self.batch, self.max_length, self)

    @property
    def cache(self) -> Cache:
        """The target's cache, empty at first. RuntimeError once released."""
        if self._cache is None:
            raise RuntimeError("this lease was released: its bytes may be another request's")
        return self._cache

    @property
    def context(self) -> Any:
        """The drafter's context, or None without a drafter. RuntimeError once released."""
        return self.cache and self._context

    def grow(self, max_length: int) -> Lease:
        """Make room for a longer text: the lease that replaces this one, holding what it held.

        Both are in the pool while one is copied into the other.

        Raises:
            PoolFull: there is no room; this lease is as before.
        """
        if self.batch != 1:
            raise ValueError("grow: only a lease of one text can grow")
        larger = self.pool.admit(max_length)
        try:
            larger.cache.put(0, self.cache)
            if self.context is not None:
                larger.context.put(0, self.context)
        except BaseException:
            larger.release()
            raise
        self.release()
        return larger

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that live here."""
        return sum(size for _, size in self._held.values())

    def take(
        self,
        kind: Kind,
        layer: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """See `Storage.take`; raises PoolFull, as when an offloaded cache comes back too early."""
        if self._released:
            raise RuntimeError("this lease was released: its cache can hold nothing more")
        pool = self.pool
        if device != pool.slab.device:
            raise ValueError(f"{kind.value} on {device}, but the pool is on {pool.slab.device}")
        size = torch.Size(shape).numel() * dtype.itemsize
        extent = pool.extents.take(size, from_end=kind in FIXED)
        if extent is None and self._cache is None:
            raise NoRun  # while it is let in, `admit` says what the whole request needs
        if extent is None:
            raise pool.full(self.max_length, size)
        self._held[extent.start] = (extent, size)
        return pool.slab[extent.start : extent.start + size].view(dtype).view(tuple(shape))

    def give_back(self, kind: Kind, layer: int, tensor: Tensor) -> None:
        """See `Storage.give_back`."""
        extent, _ = self._held.pop(int(tensor.storage_offset()) * tensor.element_size())
        self.pool.extents.give(extent)

    def release(self) -> None:
        """Return everything; a second time does nothing. The cache and the context are dead."""
        if self._released:
            return
        self._released, self._cache, self._context = True, None, None
        self.pool.leases.discard(self)
        for extent, _ in self._held.values():
            self.pool.extents.give(extent)
        self._held.clear()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
