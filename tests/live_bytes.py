"""How many bytes of tensors live at once, to the byte: every storage an operation makes is counted
from its making until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages made under it.

    What an operation needs inside itself (a library's workspace) is not seen: `live` and `peak`
    are what the program holds on to, which is what its schedule decides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

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
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    def reset_peak(self) -> None:
        """Start again from what lives now."""
        self.peak = self.live


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
