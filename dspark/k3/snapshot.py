"""One request's state by itself: what a prefix cache keeps and a request brings along.

A snapshot at n tokens holds, per KDA layer, the recurrent state and the convolution window after
them, and per MLA layer the latents of the tokens [start, n). Latents never change once written, so
of several snapshots along one text only the first needs those from the beginning: pieces whose
ranges join are one state, with the recurrent part of the last.

States that leave a GPU do so on a stream of their own, into pinned memory: the GPU goes on with
what is queued behind them, and the host with whatever it does. Who reads them waits for their
arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from dspark.k3.config import K3Config


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state after ``length`` tokens. ``recurrent`` has (state [H, K, V] float32, window
    [W-1, C]) per KDA layer, ``latents`` [length - start, X] per MLA layer; nobody writes them.
    ``arrived`` has passed once states that are on their way to the host are there: see `wait`."""

    config: K3Config
    start: int
    length: int
    recurrent: tuple[tuple[Tensor, Tensor], ...]
    latents: tuple[Tensor, ...]
    arrived: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(x.numel() * x.element_size() for x in self._tensors())

    def to(self, device: torch.device | str) -> Snapshot:
        """The same on another device; from a GPU to the host in pinned memory."""
        device = torch.device(device)
        return self._map(lambda x: _move(x, device))

    def states_to_host(self) -> Snapshot:
        """With states and windows in host memory; latents, which attention reads, stay.

        From a GPU they go as one piece of each kind, since a copy costs the host what it costs
        whatever its size, and this returns at once.
        """
        states, windows = zip(*self.recurrent, strict=True) if self.recurrent else ((), ())
        if not any(x.is_cuda for x in (*states, *windows)):
            pairs = tuple((to_host(state), to_host(window)) for state, window in self.recurrent)
            return replace(self, recurrent=pairs)
        gpu = states[0].device
        leaving = _leaving(gpu)
        leaving.wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.stream(leaving):
            sent = [_send(x, leaving) for x in (states, windows)]
            arrived = leaving.record_event()
        return replace(self, recurrent=tuple(zip(*sent, strict=True)), arrived=arrived)

    def wait(self) -> None:
        """Until what `states_to_host` sent is there: before anybody reads it."""
        if self.arrived is not None:
            self.arrived.synchronize()

    @property
    def states_nbytes(self) -> int:
        """Bytes of states and windows."""
        return self.nbytes - sum(x.numel() * x.element_size() for x in self.latents)

    def after(self, start: int) -> Snapshot:
        """Without the latents of the tokens before ``start``, in memory of its own.

        Raises:
            ValueError: ``start`` outside its range.
        """
        if not self.start <= start <= self.length:
            raise ValueError(f"token {start} is not in {self.start}..{self.length}")
        skipped = start - self.start
        return replace(self, start=start, latents=tuple(x[skipped:].clone() for x in self.latents))

    def clone(self) -> Snapshot:
        """The same in memory of its own."""
        return self._map(Tensor.clone)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Snapshot:
        self.wait()
        return replace(
            self,
            arrived=None,
            recurrent=tuple((change(state), change(window)) for state, window in self.recurrent),
            latents=tuple(change(x) for x in self.latents),
        )

    def _tensors(self) -> Iterator[Tensor]:
        for state, window in self.recurrent:
            yield state
            yield window
        yield from self.latents


def check_pieces(
    pieces: Sequence[Snapshot], config: K3Config, dtype: torch.dtype, max_length: int
) -> None:
    """Refuses what is not one state of this target.

    Raises:
        ValueError: another configuration or dtype, ranges that do not join, or more tokens than
            ``max_length``.
    """
    end = 0
    for piece in pieces:
        if piece.config != config:
            raise ValueError("this snapshot is of a target of another configuration")
        for given in {x.dtype for x in (*piece.latents, *(w for _, w in piece.recurrent))}:
            if given != dtype:
                raise ValueError(f"this snapshot is {given}, the cache {dtype}")
        if piece.start != end:
            raise ValueError(f"a snapshot from token {piece.start} cannot follow {end} tokens")
        end = piece.length
    if end > max_length:
        raise ValueError(f"{end} tokens do not fit into the cache's max_length {max_length}")


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where that makes the way back faster."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


@cache
def _leaving(gpu: torch.device) -> torch.cuda.Stream:
    """What states leave a GPU on, beside its computing."""
    return torch.cuda.Stream(gpu)


def _send(tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> tuple[Tensor, ...]:
    """Copies of tensors of one shape in pinned memory, on their way; the memory they leave is not
    used again before."""
    piece = torch.stack(list(tensors))
    host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
    host.copy_(piece, non_blocking=True)
    for tensor in tensors:
        tensor.record_stream(stream)
    return host.unbind(0)


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    return to_host(tensor) if tensor.is_cuda and device.type == "cpu" else tensor.to(device)
