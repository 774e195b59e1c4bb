"""One byte budget for everything that requests hold: latents, states, windows, draft contexts.

The pool is one slab of memory, allocated once. The tensors of a request's cache and draft context
are views of it from the beginning to the end of the request, so at batch 1 nothing is gathered, and
what the pool says is taken is taken. A request that does not fit is refused before it holds a byte.

- States and convolution windows have a fixed size and come from the end of the slab, so that one
  that left makes room for exactly another.
- Latents and draft contexts are as long as the request may become, rounded up to whole pages of
  tokens, and come from the beginning, a run per layer.
- Runs are contiguous, since a decode step reads them without a table. The price is fragmentation:
  bytes may be free and no run be long enough. Such a request is refused as well, and told so.

A round's own rows (pending and replayed inputs, activations) are no part of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.k3.storage import Kind, Storage
from dspark.runtime.extents import ALIGNMENT, Extents, aligned
from dspark.runtime.lease import Lease, NoRun
from dspark.runtime.target import Cache

PAGE_TOKENS = 64


class PoolFull(UserError):
    """A request that the pool has no room for now.

    needed   bytes that it would hold
    free     bytes that nobody holds;  largest  of the longest free run;  budget  of the pool
    """

    def __init__(self, what: str, needed: int, free: int, largest: int, budget: int) -> None:
        why = "; in pieces too small" if needed <= free else ""
        super().__init__(
            f"state pool: {what} needs {needed:,} bytes, {free:,} of {budget:,} are free (longest "
            f"run {largest:,}){why}; wait for a request to end, shorten this one or enlarge the "
            "pool"
        )
        self.needed, self.free, self.largest, self.budget = needed, free, largest, budget


class PooledTarget(Protocol):
    """A target whose caches can live in given memory."""

    name: str
    device: torch.device

    def new_cache(self, batch: int, max_length: int, storage: Storage | None = None) -> Cache: ...


class PooledDrafter(Protocol):
    """A drafter whose contexts can."""

    def new_context(self, batch: int, max_length: int, storage: Storage | None = None) -> Any: ...


class _Measure:
    """A storage that gives tensors without memory and remembers how large they were."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def take(
        self,
        kind: Kind,
        layer: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.sizes.append(tensor.nbytes)
        return tensor

    def give_back(self, kind: Kind, layer: int, tensor: Tensor) -> None:
        """Nothing was taken."""


@dataclass(frozen=True)
class PoolStats:
    """Bytes of a pool at one moment.

    budget   of the slab;  taken  in runs that requests have;  tensors  of the tensors in them,
    less than `taken` by what rounds runs up to `ALIGNMENT`
    free     budget - taken;  largest  of the longest free run
    leases   requests that are in;  refused  how often one was not let in since the pool was made
    """

    budget: int
    taken: int
    tensors: int
    free: int
    largest: int
    leases: int
    refused: int


class StatePool:
    """A slab and who has which bytes of it.

    Args:
        target: its caches must take a storage (`PooledTarget`).
        drafter: likewise; None where requests have no draft context.
        budget_bytes: of the slab, which is allocated here; rounded down to whole runs.
        page_tokens: requests get lengths that are multiples of it.

    Raises:
        UserError: a budget too small for anything, or a target whose caches have memory of their
            own.
    """

    def __init__(
        self,
        target: PooledTarget,
        drafter: PooledDrafter | None,
        budget_bytes: int,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens {page_tokens}: expected at least 1")
        if "storage" not in signature(target.new_cache).parameters:
            raise UserError(
                f"state pool: caches of target {target.name} have memory of their own; only "
                "targets whose caches take a storage can share a pool"
            )
        self.target, self.drafter, self.page_tokens = target, drafter, page_tokens
        self._sizes: dict[tuple[int, int], list[int]] = {}
        least = self.bytes_for(1)
        budget_bytes -= budget_bytes % ALIGNMENT
        if budget_bytes < least:
            raise UserError(
                f"state pool: {budget_bytes:,} bytes hold no request; the shortest needs {least:,}"
            )
        self.extents = Extents(budget_bytes)
        self.slab = torch.empty(budget_bytes, dtype=torch.uint8, device=target.device)
        self.leases: set[Lease] = set()
        self._refused = 0

    def pages(self, max_length: int) -> int:
        """`max_length` in tokens, rounded up to whole pages."""
        return -(-max_length // self.page_tokens) * self.page_tokens

    def bytes_for(self, max_length: int, batch: int = 1) -> int:
        """Bytes that a request of at most `max_length` tokens takes from the budget."""
        return sum(aligned(size) for size in self._measured(self.pages(max_length), batch))

    def admit(self, max_length: int, batch: int = 1) -> Lease:
        """Let a request of at most `max_length` tokens (pending ones included) in.

        Raises:
            PoolFull: there is no room; nothing has changed.
        """
        if max_length < 1 or batch < 1:
            raise ValueError(f"max_length {max_length}, batch {batch}: expected at least 1")
        needed = self.bytes_for(max_length, batch)
        if needed > self.extents.free:
            raise self.full(max_length, needed)
        lease = Lease(self, self.pages(max_length), batch)
        try:
            lease.open()
        except NoRun:
            lease.release()
            raise self.full(max_length, needed) from None
        except BaseException:
            lease.release()
            raise
        return lease

    def stats(self) -> PoolStats:
        free = self.extents.free
        return PoolStats(
            budget=self.extents.size,
            taken=self.extents.size - free,
            tensors=sum(lease.nbytes for lease in self.leases),
            free=free,
            largest=self.extents.largest,
            leases=len(self.leases),
            refused=self._refused,
        )

    def full(self, max_length: int, needed: int) -> PoolFull:
        """What to raise for a request that is not let in; counts it."""
        self._refused += 1
        free, largest = self.extents.free, self.extents.largest
        return PoolFull(
            f"a request of {max_length:,} tokens", needed, free, largest, self.extents.size
        )

    def _measured(self, length: int, batch: int) -> list[int]:
        """Sizes of all tensors of such a request; a dry run, so they cannot differ from the real
        ones."""
        if (length, batch) not in self._sizes:
            measure = _Measure()
            self.target.new_cache(batch, length, measure)
            if self.drafter is not None:
                self.drafter.new_context(batch, length, measure)
            self._sizes[length, batch] = measure.sizes
        return self._sizes[length, batch]
