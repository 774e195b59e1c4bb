"""What a prefix cache keeps of one text: enough to go on behind its last token.

A recurrent state cannot be cut back, so a prefix can be used only where somebody kept the state at
its very end: that is a checkpoint. Attention latents can be shared: a checkpoint holds those from
the end of an earlier one on, and is restored together with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from torch import Tensor

from dspark.k3.snapshot import Snapshot as K3Snapshot
from dspark.runtime.target import Cache, Snapshot


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state after `length` tokens; nobody writes its tensors.

    start    the state holds latents of the tokens from here on; 0: it needs no other checkpoint
    state    of the target
    context  of the drafter, a batch of one; None without a drafter
    hidden   [1, D], of the last token: what the next one is drawn from
    on_host  the target's states are in host memory (only their latents are not)
    """

    start: int
    length: int
    state: Snapshot
    context: Any | None
    hidden: Tensor
    on_host: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        context = 0 if self.context is None else self.context.nbytes
        return self.state.nbytes + context + self.hidden.nbytes

    @property
    def host_nbytes(self) -> int:
        """Of them, in host memory."""
        return self.movable if self.on_host else 0

    @property
    def movable(self) -> int:
        """Bytes that `to_host` moves."""
        state = self.state
        return state.states_nbytes if isinstance(state, K3Snapshot) else state.nbytes

    def to_host(self) -> Checkpoint:
        """With the target's states in host memory."""
        state = self.state
        moved = state.states_to_host() if isinstance(state, K3Snapshot) else state.to("cpu")
        return replace(self, state=moved, on_host=True)

    def behind(self, length: int) -> Checkpoint:
        """What is left to hold once there is a checkpoint at `length` tokens."""
        if self.start >= length or not isinstance(self.state, K3Snapshot):
            return self
        return replace(self, start=length, state=self.state.after(length))


def take(
    cache: Cache, drafter: Any | None, context: Any | None, hidden: Tensor, start: int
) -> Checkpoint:
    """The state of the only request of a cache and of its draft context.

    Args:
        start: there is a checkpoint of the same text at this length, or it is 0.

    Raises:
        ValueError: the two have not read the same number of tokens.
    """
    state: Snapshot
    if "start" in signature(cache.snapshot).parameters:
        state = cache.snapshot(0, start)  # type: ignore[call-arg]
    else:
        state, start = cache.snapshot(0), 0
    if context is None:
        return Checkpoint(start, state.length, state, None, hidden.clone())
    assert drafter is not None
    read = int(context.lengths[0])
    if read != state.length:
        raise ValueError(f"the target has read {state.length} tokens, the drafter {read}")
    kept = drafter.new_context(1, state.length)
    kept.put(0, context)
    return Checkpoint(start, state.length, state, kept, hidden.clone())


def restore(chain: Sequence[Checkpoint], cache: Cache, context: Any | None) -> None:
    """Make an empty cache of one request, and its draft context, what the last of these was taken
    of; each of them starts where the one before it ends."""
    *before, last = (checkpoint.state for checkpoint in chain)
    cache.restore(0, last, *before)
    if context is not None:
        context.put(0, chain[-1].context)
