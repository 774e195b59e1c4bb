"""Copies of the target's embedding and LM head: compared on the way in, made on the way out.

A drafter runs with its target's tables. A copy that differs from them was another target's, or was
trained along: dropping it would run another drafter than the one that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dspark.draft.checkpoint import TargetCopies
from dspark.errors import UserError


def compare_copies(
    folder: Path, copies: Mapping[str, Tensor], target: TargetCopies, ids: Tensor | None
) -> None:
    """Refuses a copy that is not the target's table, in the coarser dtype of the two.

    Args:
        folder: For the message.
        copies: Tables by name.
        target: The target's own.
        ids: Target ids [V'] of a reduced vocabulary, whose rows the LM head may be.
    """
    for name, copy in copies.items():
        whole = target.embed if name.startswith("embed") else target.lm_head
        wanted = _rows(whole, len(copy), ids)
        if wanted is None or wanted.shape[1:] != copy.shape[1:]:
            raise UserError(
                f"{folder}: {name} has shape {tuple(copy.shape)}, the target's is "
                f"{tuple(whole.shape)}"
            )
        # rows past the target's last logit pad the table and are never read
        copy = copy[: len(wanted)]
        dtype = copy.dtype if copy.dtype.itemsize <= wanted.dtype.itemsize else wanted.dtype
        if not torch.equal(copy.to(dtype).float(), wanted.to(dtype).float()):
            worst = (copy.float() - wanted.float()).abs().max().item()
            raise UserError(
                f"{folder}: {name} differs from the target's by up to {worst:.3g}: the drafter was "
                "distilled with another table; give the target it belongs to"
            )


def copies_of(target: TargetCopies, names: Sequence[str], ids: Tensor | None) -> dict[str, Tensor]:
    """The tables that a layout stores along; the LM head of a reduced vocabulary is its rows."""
    tables = {"embed_tokens.weight": target.embed, "lm_head.weight": target.lm_head}
    if ids is not None:
        tables["lm_head.weight"] = target.lm_head[ids]
    return {name: tables[name] for name in names}


def _rows(whole: Tensor, rows: int, ids: Tensor | None) -> Tensor | None:
    """The rows of the target's table that a copy with so many should be; None: none fit."""
    if ids is not None and rows == len(ids):
        return whole[ids]
    return whole if len(whole) <= rows else None
