"""How many bytes of tensors live at once, to the byte.

On a CPU every storage that an operation makes is counted from its making until it is freed; what an
operation needs inside itself is not seen. On a GPU it is the allocator's own count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages made under it. `live` and `peak` are what the program holds on to, which
    is what its schedule decides."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._live = self._peak = 0
        self._seen: set[int] = set()

    @property
    def live(self) -> int:
        """Bytes now."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._live

    @property
    def peak(self) -> int:
        """Most bytes since `reset_peak`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._peak

    def reset_peak(self) -> None:
        """Start again from what lives now."""
        self._peak = self._live
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in given | self._seen:
                self._watch(tensor)
        return out

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), _key(tensor)
        self._seen.add(key)
        self._live += size
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._live -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
