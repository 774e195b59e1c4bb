"""The cache of a batch of requests: one state per layer, and requests that come, go and rest.

Blocks of rows are in ``dspark.k3.rounds``. Here requests are taken as wholes, by batch row:
``snapshot`` and ``restore``, ``put`` and ``reset``, ``select`` and ``fork``; and recurrent states
move to host memory and back. None of it changes another row by one bit. A row whose block is all
padding and that accepts nothing is an idle slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.k3.config import K3Config
from dspark.k3.rounds import Rounds
from dspark.k3.snapshot import Snapshot, check_pieces, to_host
from dspark.k3.state import KDAState, LatentState
from dspark.k3.storage import Kind, PrivateStorage, Storage, Wanted, take_all

RECURRENT = (Kind.STATE, Kind.WINDOW)
CACHED = (*RECURRENT, Kind.LATENTS)


class K3Cache(Rounds):
    """The state of a batch of requests in one target.

    Args:
        batch: number of requests B.
        max_length: most tokens that a request may hold, pending and padding rows included.
        dtype: of latents and convolution windows; KDA states are float32 always.
        storage: where states, windows and latents come from; None: memory of the cache's own.
    """

    def __init__(
        self,
        config: K3Config,
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        storage: Storage | None = None,
    ) -> None:
        self.config, self.dtype = config, dtype
        self._storage = storage or PrivateStorage()
        taken = iter(
            take_all(self._storage, wanted(config, batch, max_length, dtype, CACHED), device)
        )
        layers = [
            LatentState(next(taken))
            if config.is_full_attention(i)
            else KDAState(config, next(taken), next(taken))
            for i in range(config.num_hidden_layers)
        ]
        lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        super().__init__(layers, lengths, max_length, config.kda_conv_size)

    # --- one request ---------------------------------------------------------------------------

    def snapshot(self, row: int, start: int = 0) -> Snapshot:
        """The state of one request by itself; it shares nothing with this cache.

        Args:
            start: latents of the tokens before it are left out (see `restore`).

        Raises:
            RuntimeError: a block is pending, or the cache is offloaded.
            ValueError: no such row, or ``start`` outside 0..its length.
        """
        return self._view(row, start).clone()

    def _view(self, row: int, start: int = 0) -> Snapshot:
        self._settled("taking a snapshot")
        length = int(self.lengths[self._existing(row)])
        if not 0 <= start <= length:
            raise ValueError(f"a snapshot from token {start} of {length}; expected 0 to that many")
        return Snapshot(
            self.config,
            start,
            length,
            tuple(kda.parts(row) for kda in self._kda()),
            tuple(mla.latents[row, start:length] for mla in self._mla()),
        )

    def restore(self, row: int, snapshot: object, *before: Snapshot) -> None:
        """Replace one request by a snapshot.

        Args:
            before: earlier snapshots of the same text, in order, whose ranges end where the next
                begins: they hold the latents that ``snapshot`` was taken without.

        Raises:
            RuntimeError: a block is pending, or the cache is offloaded.
            TypeError: not a snapshot of a K3 cache.
            ValueError: no such row; snapshots of another configuration or dtype, that do not join,
                or longer than ``max_length``. Nothing has changed then.
        """
        self._settled("restoring a snapshot")
        self._existing(row)
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"expected a snapshot of a K3 cache, got {type(snapshot).__name__}")
        pieces = (*before, snapshot)
        check_pieces(pieces, self.config, self.dtype, self.max_length)
        snapshot.wait()
        for kda, (state, window) in zip(self._kda(), snapshot.recurrent, strict=True):
            kda.put(row, state, window)
        self._touch(snapshot.length, clear=len(self.lengths) > 1)
        for i, mla in enumerate(self._mla()):
            for piece in pieces:
                mla.latents[row, piece.start : piece.length] = piece.latents[i]
        self._end(row, snapshot.length)

    def put(self, row: int, other: object) -> None:
        """Replace one request by the only one of another cache, which stays as it is: it joins.

        Raises:
            RuntimeError: a block is pending in either, or one is offloaded.
            TypeError: not a K3 cache.
            ValueError: as `restore`, or the other cache holds more than one request.
        """
        if not isinstance(other, K3Cache):
            raise TypeError(f"expected a K3 cache, got {type(other).__name__}")
        if len(other.lengths) != 1:
            raise ValueError(f"expected a cache of one request, this one has {len(other.lengths)}")
        self.restore(row, other._view(0))

    def reset(self, row: int) -> None:
        """Empty one row: its request left, and the row is an idle slot or ready for another.

        Raises:
            RuntimeError: a block is pending, or the cache is offloaded.
            ValueError: no such row.
        """
        self._settled("a request leaves")
        self._existing(row)
        for kda in self._kda():
            kda.put(row, None, None)
        self._end(row, 0)

    def _existing(self, row: int) -> int:
        if not 0 <= row < len(self.lengths):
            raise ValueError(f"no row {row} in a batch of {len(self.lengths)}")
        return row

    def _end(self, row: int, length: int) -> None:
        """One row ends here; longer ones still see its other slots, so nothing stays in them."""
        if len(self.lengths) > 1:
            for mla in self._mla():
                mla.latents[row, length : self._touched].zero_()
        self.lengths = self.lengths.clone()
        self.lengths[row] = length
        self._measure()

    # --- all of them ---------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows (int64, distinct, at least one), in that order.

        Raises:
            RuntimeError: a block is pending, or the cache is offloaded.
            ValueError: a row that is missing or named twice.
        """
        self._settled("selecting rows")
        kept, batch = rows.tolist(), len(self.lengths)
        if not kept or len(set(kept)) < len(kept) or not all(0 <= row < batch for row in kept):
            raise ValueError(f"rows {kept}; expected distinct ones of 0..{batch - 1}")
        for kind, layer, old in self._renew(CACHED, rows):
            self._storage.give_back(kind, layer, old)
        for kda in self._kda():
            kda.replay = None if kda.replay is None else kda.replay.select(rows)
        self.lengths = self.lengths[rows]
        self._measure()

    def fork(self, storage: Storage | None = None) -> K3Cache:
        """A copy that goes its own way; its tensors come from ``storage``, None: private ones.

        Raises:
            RuntimeError: a block is pending, or the cache is offloaded.
        """
        self._settled("a fork")
        device = self.lengths.device
        twin = K3Cache(self.config, len(self.lengths), self.max_length, self.dtype, device, storage)
        twin.lengths = self.lengths.clone()
        twin._touched = self._touched
        for ours, theirs in zip(self._kda(), twin._kda(), strict=True):
            theirs.state.copy_(ours.state)
            theirs.window.copy_(ours.window)
            theirs.replay = None if ours.replay is None else ours.replay.clone()
        for mine, other in zip(self._mla(), twin._mla(), strict=True):
            other.latents[:, : self._touched].copy_(mine.latents[:, : self._touched])
        twin._measure()
        return twin

    def offload(self) -> None:
        """Move recurrent states and windows to host memory, pinned where there is a GPU.

        Latents stay, for they are most of a long request and are read in place. Until `onload`
        nothing but `nbytes` works.

        Raises:
            RuntimeError: a block is pending, or the cache is offloaded already.
        """
        self._settled("offloading")
        self.fold()
        for i, layer in enumerate(self.layers):
            for kind, held in layer.held():
                if kind in RECURRENT:
                    layer.hold(kind, to_host(held))
                    self._storage.give_back(kind, i, held)
        self.offloaded = True

    def onload(self) -> None:
        """Take back what `offload` moved away.

        Nothing happens if nothing was. Where the storage has no room it raises its own error, and
        the cache stays offloaded.
        """
        if not self.offloaded:
            return
        self._renew(RECURRENT, None)
        self.offloaded = False

    def _renew(
        self, kinds: tuple[Kind, ...], index: Tensor | None
    ) -> list[tuple[Kind, int, Tensor]]:
        """Fresh tensors of the storage with these batch rows (None: all); returns the old ones."""
        batch = len(self.lengths) if index is None else len(index)
        shapes = wanted(self.config, batch, self.max_length, self.dtype, kinds)
        taken = iter(take_all(self._storage, shapes, self.lengths.device))
        old = []
        for i, layer in enumerate(self.layers):
            for kind, held in layer.held():
                if kind not in kinds:
                    continue
                old.append((kind, i, held))
                used = held[:, : self._touched] if kind is Kind.LATENTS else held
                new = next(taken)
                new[:, : used.shape[1]].copy_(used if index is None else used[index])
                layer.hold(kind, new)
        return old

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor the cache holds, in host memory too: states, windows, latents,
        lengths, and the pending and replayed rows."""
        held = sum(_bytes(x) for layer in self.layers for _, x in layer.held())
        # rows are cut out of larger results, whose memory they keep
        memory = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._rows()
        }
        return held + sum(memory.values())

    @property
    def host_nbytes(self) -> int:
        """The part of ``nbytes`` that `offload` moved to host memory."""
        if not self.offloaded:
            return 0
        return sum(_bytes(x) for kda in self._kda() for _, x in kda.held())

    def _rows(self) -> list[Tensor]:
        block = self._pending
        kept = [self.lengths, *(x for kda in self._kda() for x in kda.round_tensors())]
        if block is not None:
            t = block.tree
            tree = () if t is None else (t.parents, t.valid, t.upto)
            kept += [x for x in (block.counts, block.lengths, *tree) if x is not None]
        return kept


def wanted(
    config: K3Config, batch: int, max_length: int, dtype: torch.dtype, kinds: tuple[Kind, ...]
) -> list[Wanted]:
    """The tensors of these kinds that a cache takes, in the order of layers."""
    H, K = config.kda_num_heads, config.kda_head_dim
    state = (batch, H, K, K)
    window = (batch, config.kda_conv_size - 1, 3 * H * K)
    latents = (batch, max_length, config.kv_lora_rank + config.qk_rope_head_dim)
    found = []
    for i in range(config.num_hidden_layers):
        if config.is_full_attention(i):
            found.append(Wanted(Kind.LATENTS, i, latents, dtype))
        else:
            found.append(Wanted(Kind.STATE, i, state, torch.float32))
            found.append(Wanted(Kind.WINDOW, i, window, dtype))
    return [one for one in found if one.kind in kinds]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
