"""A block whose rows form a tree: siblings share what came before them and never see each other.

Row t follows row parents[t], or the committed text where that is -1. Everything that a chain reads
by row order, a tree reads along the path from the root: attention and the delta rule by the mask of
ancestors, decays by their sum along the path, the convolution by the rows that really come before.

With u_j the rows before the convolution, window first, row t stands at W-1+t and

    before(W-1+t) = W-1 + parents[t]        before(j) = j-1 inside the window

so a root is preceded by the window's last row without a case of its own.

Letters: B batch, T rows, P rows of a path, W width of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """parents [B or 1, T] int64; valid [B, T] bool or None: all; upto [B or 1, T, T] bool: row j is
    row t or one of its ancestors."""

    parents: Tensor
    valid: Tensor | None
    upto: Tensor

    def readable(self, lengths: Tensor, visible: int) -> Tensor:
        """[B, T, visible] bool: the latent slots that each row may read, after ``lengths`` [B]."""
        rows = self.parents.shape[1]
        place = torch.arange(visible, device=lengths.device) - lengths.unsqueeze(1)
        inside = ((place >= 0) & (place < rows)).unsqueeze(1)
        index = place.clamp(0, rows - 1).unsqueeze(1).expand(-1, rows, -1)
        upto = self.upto.expand(len(lengths), -1, -1).gather(2, index)
        return (place < 0).unsqueeze(1) | (inside & upto)

    def behind(self, replayed: int) -> Tensor:
        """[B or 1, R+T, R+T]: ``upto`` with R replayed rows, a chain, before every row."""
        rows = self.parents.shape[1]
        upto = self.upto.new_ones(len(self.upto), replayed + rows, replayed + rows).tril_()
        upto[:, replayed:, replayed:] = self.upto
        return upto

    def taps(self, width: int) -> Tensor:
        """[B or 1, T, W]: where the convolution of each row reads, oldest first, itself last."""
        window, rows = width - 1, self.parents.shape[1]
        device = self.parents.device
        inside = torch.arange(-1, window - 1, device=device).expand(len(self.parents), -1)
        before = torch.cat((inside, window + self.parents), dim=1)
        at = [torch.arange(window, window + rows, device=device).expand(len(self.parents), -1)]
        for _ in range(window):
            at.append(before.gather(1, at[-1]))
        return torch.stack(at[::-1], dim=-1)


def plant(parents: Tensor, valid: Tensor | None, batch: int, rows: int) -> Tree:
    """The tree of a block of ``rows`` rows.

    Args:
        parents: [B, T] or [T] int64; a parent stands before its children, -1 is the committed text.
        valid: [B, T] bool; what a row that is not valid names as its parent does not matter.

    Raises:
        ValueError: another shape, a parent that does not stand before its child, or one that is not
            valid though its child is.
    """
    if parents.dtype != torch.int64 or parents.shape not in ((rows,), (batch, rows)):
        raise ValueError(
            f"parents {list(parents.shape)} {parents.dtype} for {batch} x {rows} rows; expected "
            "int64 [B, T] or [T]"
        )
    parents = parents.unsqueeze(0) if parents.dim() == 1 else parents
    if valid is not None:
        parents = parents.expand(batch, -1).masked_fill(~valid, -1)
    own = torch.arange(rows, device=parents.device)
    wrong = (parents < -1) | (parents >= own)
    if valid is not None:
        wrong = wrong | ((parents >= 0) & ~valid.gather(1, parents.clamp(min=0)))
    if bool(wrong.any()):
        raise ValueError(
            f"parents {parents.tolist()}: each is -1 or a valid row that stands before its own"
        )
    return Tree(parents, valid, ancestors(parents))


def ancestors(parents: Tensor) -> Tensor:
    """``upto`` [.., T, T] of parents [.., T]: ancestors-or-self, by squaring, 1, 2, 4, .. steps."""
    rows = parents.shape[-1]
    own = torch.arange(rows, device=parents.device)
    step = (parents.unsqueeze(-1) == own) | (own.unsqueeze(-1) == own)
    reach = step.float()
    for _ in range((rows - 1).bit_length()):
        reach = torch.matmul(reach, reach).clamp_(max=1.0)
    return reach > 0.5


@dataclass(frozen=True)
class Path:
    """The accepted rows of a block: rows [B, P] int64 in order, -1 at the end; counts [B], of which
    the greatest is P."""

    rows: Tensor
    counts: Tensor

    def window(self, width: int) -> Tensor:
        """[B, W-1]: the last W-1 of window and path, as places in window and block."""
        size = width - 1
        inside = torch.arange(size, device=self.rows.device).expand(len(self.rows), -1)
        line = torch.cat((inside, size + self.rows), dim=1)
        return line.gather(1, self.counts.unsqueeze(1) + inside)


def first_rows(counts: Tensor) -> Path:
    """The path of a chain: the first counts [B] rows."""
    steps = torch.arange(int(counts.max()), device=counts.device)
    return Path(torch.where(steps < counts.unsqueeze(1), steps, -1), counts)


def check_path(path: Tensor, parents: Tensor, valid: Tensor | None, batch: int) -> Path:
    """The path, cut to its longest row.

    Args:
        path: [B, P] int64.
        parents, valid: as in `Tree`.

    Raises:
        ValueError: not a path from the root: a row that is missing, twice, not valid or not the
            child of the one before it, or a -1 before the end.
    """
    if path.dim() != 2 or len(path) != batch or path.dtype != torch.int64:
        raise ValueError(
            f"path {list(path.shape)} {path.dtype}; expected int64 [B, P] with B = {batch}"
        )
    parents = parents.expand(batch, -1)
    taken = path >= 0
    counts = taken.sum(1)
    index = path.clamp(0, parents.shape[1] - 1)
    fits = (path == index) & (parents.gather(1, index) == F.pad(path, (1, 0), value=-1)[:, :-1])
    if valid is not None:
        fits &= valid.gather(1, index)
    together = torch.arange(path.shape[1], device=path.device) < counts.unsqueeze(1)
    fits = torch.where(taken, fits, path == -1) & (taken == together)
    if not bool(fits.all()):
        raise ValueError(
            f"path {path.tolist()} is none of the pending block, whose parents are "
            f"{parents.tolist()}; expected rows in order from the root, each the child of the one "
            "before it, then -1"
        )
    return Path(path[:, : int(counts.max())], counts)
