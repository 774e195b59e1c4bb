"""Which slots of a key-value buffer a new row may read, as the additive mask that models take.

Every batch row keeps its own tokens at slots of its own, so rows of different lengths, padded
blocks and trees are the same case. A buffer holds position p of a text at slot p, or, behind a
sliding window, at slot p mod C. New rows lie at the slots that follow. A new row sees

    committed slots of its batch row    whose position is less than `window` behind its own
    new rows                            which are its ancestors or itself, with the same limit

A slot that a new row has taken over is new, whatever it held before.

Letters: B batch, T new rows, S slots, C slots of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Ring:
    """How one kind of layer lays positions out.

    window    positions a row sees, its own included; None: all before it
    capacity  slots of the ring; None: a buffer that holds every position
    """

    window: int | None = None
    capacity: int | None = None

    def slot(self, position: Tensor) -> Tensor:
        """Positions of any shape -> their slots."""
        return position if self.capacity is None else position % self.capacity


@dataclass(frozen=True, eq=False)
class NewRows:
    """A block of new rows: where each lies and what it descends from.

    order      [B, T] int64, place among the real rows of its batch row, 0, 1, ...
    depth      [B, T] int64, rows between it and the text: 0 for a row that follows it directly
    valid      [B, T] bool, real rows
    ancestors  [B, T, T] bool, [b, i, j]: row j is row i or one of its ancestors
    tree       whether they may be more than a chain
    """

    order: Tensor
    depth: Tensor
    valid: Tensor
    ancestors: Tensor
    tree: bool


def new_rows(valid: Tensor, parents: Tensor | None) -> NewRows:
    """Rows of a chain (`parents` None: each follows the real row before it) or of a tree.

    Args:
        valid: [B, T] bool.
        parents: [B, T] or [T] int64, index of the row that each follows, -1: the text itself.

    Raises ValueError for a parent that does not come before its row or is not a real row.
    """
    batch, rows = valid.shape
    order = valid.long().cumsum(1) - 1
    if parents is None:
        below = torch.ones(rows, rows, dtype=torch.bool, device=valid.device).tril()
        return NewRows(order, order, valid, below & valid.unsqueeze(1) & valid.unsqueeze(2), False)
    parents = parents.to(valid.device).expand(batch, rows)
    index = torch.arange(rows, device=valid.device)
    if bool((valid & ((parents >= index) | (parents < -1))).any()):
        raise ValueError("parents: each row must follow an earlier row, or -1")
    ancestors = torch.zeros(batch, rows, rows, dtype=torch.bool, device=valid.device)
    each = torch.arange(batch, device=valid.device)
    for row in range(rows):
        parent = parents[:, row]
        inherited = ancestors[each, parent.clamp(min=0)] & (parent >= 0).unsqueeze(1)
        ancestors[:, row] = inherited & valid[:, row, None]
        ancestors[:, row, row] = valid[:, row]
    orphan = (parents >= 0) & ~valid.gather(1, parents.clamp(min=0)) & valid
    if bool(orphan.any()):
        raise ValueError("parents: a real row follows a row that is padding")
    return NewRows(order, ancestors.sum(-1) - 1, valid, ancestors, True)


def visible(lengths: Tensor, rows: NewRows, ring: Ring, width: int) -> Tensor:
    """[B, T, width] bool, may a new row read a slot? `lengths` [B] int64: committed tokens."""
    column = torch.arange(width, device=lengths.device)
    last = lengths.unsqueeze(1) - 1
    held = column if ring.capacity is None else last - (last - column) % ring.capacity
    position = lengths[:, None, None] + rows.depth.unsqueeze(2)
    allowed = ((held >= 0) & (held <= last)).unsqueeze(1) & rows.valid.unsqueeze(2)
    near = rows.ancestors
    if ring.window is not None:
        allowed = allowed & (position - held.expand(len(lengths), width).unsqueeze(1) < ring.window)
        near = near & (position - position.transpose(1, 2) < ring.window)
    slots = torch.where(rows.valid, ring.slot(lengths.unsqueeze(1) + rows.order), width)
    room = F.pad(allowed, (0, 1))  # the last column takes padding
    return room.scatter(2, slots.unsqueeze(1).expand_as(near), near)[..., :width]


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, S] bool -> [B, 1, T, S], 0 where allowed. Finite, so that a padding row is no NaN."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min).unsqueeze(1)
