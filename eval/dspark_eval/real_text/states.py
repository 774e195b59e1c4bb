"""The target's states of all training rows, computed once in wide passes and held on the device.

A row's taps and final states lie side by side in one long buffer, row after row, so a batch is one
gather. The memory is tokens x (taps + 1) x hidden x bytes: 12,000 rows of 300 tokens of a target of
width 576 in bfloat16 take 25 GB. (`dspark.distill.taps` keeps rows one by one, which gives the same
bits whatever the batch; here the passes are fixed and every drafter of a study gets the same.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.distill.batches import Batch, make_batch
from dspark.distill.chat import TrainingRow
from dspark.distill.taps import Features, target_features
from dspark.runtime.target import Target
from dspark.taps import TapSet

PASS_TOKENS = 32_768
"""Tokens that the target runs over at once, padding included."""


class HeldStates:
    """A feature source over fixed rows; a batch's `row_ids` are places among them."""

    def __init__(self, target: Target, taps: TapSet, rows: Sequence[TrainingRow]) -> None:
        lengths = [len(row.ids) for row in rows]
        total, width = sum(lengths), target.hidden_size
        dtype, device = target.dtype, target.device
        # one more position, all zero, which stands for padding
        self._taps = torch.zeros(total + 1, len(taps.layer_ids) * width, dtype=dtype, device=device)
        self._hidden = torch.zeros(total + 1, width, dtype=dtype, device=device)
        starts, at = [], 0
        for length in lengths:
            starts.append(at)
            at += length
        self._starts, self._padding = torch.tensor(starts), total
        for ids in _passes(lengths):
            batch = make_batch(rows, ids, anchors=1, seed=0, epoch=0).to(target.device)
            found = target_features(target, batch, taps)
            places = self._places(batch.row_ids, batch.valid)[batch.valid]
            self._taps[places] = found.taps[batch.valid]
            self._hidden[places] = found.hidden[batch.valid]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._taps.nbytes + self._hidden.nbytes

    def __call__(self, batch: Batch) -> Features:
        """Features of a padded batch on the device, zero at padding."""
        places = self._places(batch.row_ids, batch.valid)
        return Features(self._taps[places], self._hidden[places])

    def _places(self, row_ids: tuple[int, ...], valid: Tensor) -> Tensor:
        """[B, S] positions in the buffers."""
        if not row_ids:  # a micro-batch without rows is one row of padding
            return torch.full_like(valid, self._padding, dtype=torch.int64)
        starts = self._starts[list(row_ids)].to(valid.device, non_blocking=True)
        steps = torch.arange(valid.shape[1], device=valid.device)
        return torch.where(valid, starts[:, None] + steps, self._padding)


class StatesOnce:
    """States of the same rows for one drafter after another: computed for the first of them."""

    def __init__(self, target: Target, rows: Sequence[TrainingRow]) -> None:
        self.rows = rows
        self._target = target
        self._held: dict[TapSet, HeldStates] = {}

    def states(self, taps: TapSet) -> HeldStates:
        """Those with these taps; others are let go, since two sets do not fit."""
        if taps not in self._held:
            self._held.clear()
            self._held[taps] = HeldStates(self._target, taps, self.rows)
        return self._held[taps]


def _passes(lengths: Sequence[int]) -> list[list[int]]:
    """Rows of about one length together, at most `PASS_TOKENS` in all."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    passes: list[list[int]] = []
    while order:
        count = max(1, PASS_TOKENS // max(1, lengths[order[0]]))
        passes.append(order[:count])
        order = order[count:]
    return passes
