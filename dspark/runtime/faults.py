"""Logits that define no distribution, found on the device and reported on the host.

    fault[b] = 0                      every row that mattered was fine
             = 1 + 3 * position + kind      the first row of the target that was not
             = -(1 + 3 * position + kind)   the same, of the drafter

A fault is one integer per request, so that it can travel with the verdict: looking for it costs a
maximum per row, and nothing waits until the host reads the round anyway. Until then a bad row draws
some id of the vocabulary, which nobody gets to see.

Letters: B batch, T rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.runtime.sampling import BadLogits

_KINDS = ("NaN", "+inf", "nothing but -inf")


def fault_of(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """[B, T, V] target logits -> [B] int64 fault; rows that are not `valid` [B, T] do not count."""
    if logits.shape[1] == 0:
        return torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    peak = logits.amax(dim=-1)  # NaN, +inf or -inf exactly if the row is bad
    bad = ~torch.isfinite(peak)
    if valid is not None:
        bad = bad & valid
    position = bad.byte().argmax(dim=1, keepdim=True)
    found = peak.gather(1, position)
    kind = torch.where(found.isnan(), 0, torch.where(found > 0, 1, 2))
    return torch.where(bad.any(dim=1), (1 + 3 * position + kind).squeeze(1), 0)


def named(fault: int, row: int = 0) -> BadLogits | None:
    """What a fault says, of batch row `row`; None for 0."""
    if fault == 0:
        return None
    position, kind = divmod(abs(fault) - 1, 3)
    return BadLogits("target" if fault > 0 else "drafter", row, position, _KINDS[kind])


def raise_fault(faults: Sequence[int]) -> None:
    """Raise BadLogits for the first request of `faults` that has one."""
    for row, fault in enumerate(faults):
        if (error := named(fault, row)) is not None:
            raise error
