"""Online taps: what the target thinks about a batch of rows, computed where it is needed.

One pass of the frozen target over right-padded rows gives the drafter's input (taps) and the state
whose logits the drafter imitates (post-norm hidden). Nothing is written to disk, so there is no
cache to outgrow or to go stale; logits are formed later and only for supervised slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


@torch.no_grad()
def target_features(target: Target, batch: Batch, taps: TapSet) -> Features:
    """Run the target over a batch. Raises BadFeatures if a real token has a non-finite state.

    States of padding are set to zero: whatever the target leaves there cannot reach a loss.
    """
    rows, length = batch.ids.shape
    cache = target.new_cache(rows, length)
    output = target.forward(batch.ids, cache, valid=batch.valid, taps=taps, commit=True)
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
