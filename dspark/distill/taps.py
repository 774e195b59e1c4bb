"""Online taps: what the target thinks about a batch of rows, computed where it is needed.

One pass of the frozen target over right-padded rows gives the drafter's input (taps) and the state
whose logits the drafter imitates (post-norm hidden); logits are formed later and only for
supervised slots. (`cache.py` has the states on disk instead.)

A run of several epochs meets every row again. `KeptFeatures` then runs each row through the target
once, *alone*, and keeps what fits in memory. Alone, because a row's states differ in the last bits
with the company it is padded in: this way they are the same whenever they are computed, and a
resumed run, which computes them again, ends with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.distill.batches import Batch
from dspark.errors import UserError
from dspark.runtime.target import Target
from dspark.taps import TapSet


class BadFeatures(UserError):
    """A target state is not finite; the message names the tensor, the row and the position."""


@dataclass(frozen=True, eq=False)
class Features:
    """taps: [B, S, N*D]; hidden: [B, S, D], so that `target.logits(hidden)` are its logits."""

    taps: Tensor
    hidden: Tensor


FeatureSource = Callable[[Batch], Features]
"""Where the target's states of a batch come from: zero at padding, in the target's dtype and on its
device. A source promises the same states for a row whenever and in whatever batch it is asked."""


class KeptFeatures:
    """Features of each row computed alone, once, and kept while they fit into `budget` bytes."""

    def __init__(self, target: Target, taps: TapSet, budget: int) -> None:
        self._target, self._taps, self._free = target, taps, budget
        self._kept: dict[tuple[int, ...], Features] = {}

    def __call__(self, batch: Batch) -> Features:
        """Features of a padded batch, zero at padding. Raises BadFeatures as `target_features`."""
        counts = batch.valid.sum(1).tolist()
        rows = [self._row(batch, at, n) for at, n in enumerate(counts)]
        return pad_rows(rows, batch.ids.shape[1])

    def _row(self, batch: Batch, at: int, count: int) -> Features:
        ids = batch.ids[at : at + 1, : max(1, count)]
        key = tuple(ids[0].tolist())
        if key not in self._kept:
            made = target_features(self._target, batch.row(at, max(1, count)), self._taps)
            size = sum(x.numel() * x.element_size() for x in (made.taps, made.hidden))
            if size > self._free:
                return made
            self._free -= size
            self._kept[key] = made
        return self._kept[key]


def pad_rows(rows: Sequence[Features], length: int) -> Features:
    """Features of single rows, zero from their end to `length`."""

    def padded(parts: list[Tensor]) -> Tensor:
        return torch.cat([F.pad(x, (0, 0, 0, length - x.shape[1])) for x in parts])

    return Features(padded([r.taps for r in rows]), padded([r.hidden for r in rows]))


@torch.no_grad()
def target_features(target: Target, batch: Batch, taps: TapSet) -> Features:
    """Run the target over a batch. Raises BadFeatures if a real token has a non-finite state.

    States of padding are set to zero: whatever the target leaves there cannot reach a loss.
    """
    rows, length = batch.ids.shape
    cache = target.new_cache(rows, length)
    valid = None if bool(batch.valid.all()) else batch.valid
    output = target.forward(batch.ids, cache, valid=valid, taps=taps, commit=True)
    assert output.taps is not None, "taps were asked for"
    keep = batch.valid[..., None]
    features = Features(output.taps.masked_fill(~keep, 0.0), output.hidden.masked_fill(~keep, 0.0))
    for name, tensor in (("taps", features.taps), ("hidden", features.hidden)):
        _check_finite(name, tensor, batch.row_ids)
    return features


def _check_finite(name: str, tensor: Tensor, row_ids: tuple[int, ...]) -> None:
    # A sum is one read without a mask the size of the tensor; it is NaN or infinite if any is.
    if bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return
    row, position, channel = torch.nonzero(~torch.isfinite(tensor))[0].tolist()
    where = row_ids[row] if row < len(row_ids) else "padding"
    raise BadFeatures(
        f"target {name} not finite in row {where} at position {position}, channel {channel}"
    )
