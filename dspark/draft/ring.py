"""Buffers of a context: the last R committed positions of every batch row, then room for one block.

A committed position s lies in slot s mod R. Softmax attention does not care for the order of its
keys, and each key has its own position turned into it, so a ring needs no unrolling. A layer that
sees the whole context has R = the longest text and never wraps; a sliding layer has R = its window,
so that neither its memory nor its reads grow with the text.

While a block is drafted its rows lie behind the min(length, R) committed ones, where the next rows
overwrite them. Buffers are allocated once; nothing is copied or grown.

While all rows of a batch have one length (always so at batch 1) every operation is a slice and
attention needs no mask.

Letters: B batch, J heads that have keys, C = R + G slots, n new rows, G block slots, K width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.draft.context import DraftContext


@dataclass(frozen=True)
class BlockPlace:
    """Where the rows of a block go in a ring, and which slots it attends to.

    start: first slot, or None where batch rows differ
    index: [B, G] slots where batch rows differ, or None
    stop: slots 0..stop-1 are read
    mask: [B or 1, 1, 1 or G, stop] bool, or None where all of them are seen
    """

    start: int | None
    index: Tensor | None
    stop: int
    mask: Tensor | None

    def write(self, buffer: Tensor, rows: Tensor) -> Tensor:
        """Puts rows [B, J, G, K] into buffer [B, J, C, K]; the slots to read, [B, J, stop, K]."""
        if self.start is not None:
            buffer[:, :, self.start : self.stop] = rows
        else:
            assert self.index is not None
            buffer.scatter_(-2, self.index[:, None, :, None].expand(rows.shape), rows)
        return buffer[:, :, : self.stop]


@dataclass(frozen=True)
class Ring:
    """The geometry of one kind of layers; the buffers themselves are its caller's.

    Attributes:
        size: R.
        slots: G.
    """

    size: int
    slots: int

    @property
    def capacity(self) -> int:
        """C, rows of a buffer."""
        return self.size + self.slots

    def append(self, buffer: Tensor, rows: Tensor, start: int) -> None:
        """Writes rows [..., n, K] of positions start.. into buffer [..., C, K], one length."""
        late = max(0, rows.shape[-2] - self.size)  # earlier rows would be overwritten at once
        rows, first = rows[..., late:, :], (start + late) % self.size
        head = min(rows.shape[-2], self.size - first)
        buffer[..., first : first + head, :] = rows[..., :head, :]
        if head < rows.shape[-2]:
            buffer[..., : rows.shape[-2] - head, :] = rows[..., head:, :]

    def append_ragged(
        self, buffers: list[tuple[Tensor, Tensor]], context: DraftContext, kept: list[int] | Tensor
    ) -> None:
        """Writes the first kept[b] of rows [..., B, J, n, K] into buffers [..., B, J, C, K].

        What is not kept, or would be overwritten at once, goes into the room for the block.
        """
        slot = self.ragged_slots(context, buffers[0][1].shape[-2], kept)
        for buffer, rows in buffers:
            buffer.scatter_(-2, slot[:, None, :, None].expand(rows.shape), rows)

    def ragged_slots(self, context: DraftContext, count: int, kept: list[int] | Tensor) -> Tensor:
        """[B, count] slots of the rows after each length, R where a row is not to be kept.

        No other slot appears twice in a batch row: which of two writes wins is not defined.
        """
        offset = torch.arange(count, device=context.device)
        keep = torch.as_tensor(kept, device=context.device)[:, None]
        used = (offset < keep) & (offset >= keep - self.size)
        return ((context.lengths[:, None] + offset) % self.size).where(used, self.size)

    def copy_row(self, buffer: Tensor, rows: Tensor, other: Ring, length: int) -> None:
        """Puts the text of `length` in rows [..., C', K] of another ring into buffer [..., C, K].

        Zeros go everywhere else. Rings of one layer differ in size only where the smaller one was
        made for texts that fit into it, so the smaller of the two holds all that is needed.
        """
        held = min(length, self.size, other.size)
        at = torch.arange(length - held, length, device=buffer.device)
        buffer.zero_()
        buffer[..., at % self.size, :] = rows[..., at % other.size, :]

    def starts(self, context: DraftContext) -> Tensor:
        """[B] int64, the slot of each batch row where a block begins."""
        length = context.common_length
        if length is None:
            return context.lengths.clamp(max=self.size)
        return torch.full((context.batch,), min(length, self.size), device=context.device)

    def place(self, context: DraftContext, causal: bool) -> BlockPlace:
        """The block anchored at the context's lengths."""
        length, device = context.common_length, context.device
        if length is not None:
            start = min(length, self.size)
            stop = start + self.slots
            if not causal:
                return BlockPlace(start, None, stop, None)
            last = torch.arange(start, stop, device=device)[:, None]
            mask = torch.arange(stop, device=device) <= last
            return BlockPlace(start, None, stop, mask[None, None])
        slot = torch.arange(self.slots, device=device)
        starts = context.lengths.clamp(max=self.size)[:, None]
        longest = self.size if context.fixed else min(max(context.row_lengths), self.size)
        stop = longest + self.slots
        columns = torch.arange(stop, device=device)
        last = starts[..., None] + (slot[:, None] if causal else self.slots - 1)
        return BlockPlace(None, starts + slot, stop, (columns <= last)[:, None])
