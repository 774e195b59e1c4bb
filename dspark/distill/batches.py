"""Which rows, and which anchors, step s trains on: pure functions of the seed.

    order of epoch e      = permutation from a generator seeded by (seed, "order", e)
    anchors of row i in e = sample from a generator seeded by (seed, "anchors", e, i)

No generator state lives between steps, so a resumed run, another number of processes or another
micro-batch size sees the same rows with the same anchors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.devices import one_thread, send, send_all
from dspark.distill.chat import TrainingRow
from dspark.draft.anchors import Anchors, sample_anchors


def derived_seed(*parts: int | str) -> int:
    """A 63-bit hash of `parts`; equal parts give equal seeds, anywhere."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def derived_generator(*parts: int | str) -> torch.Generator:
    """A CPU generator that draws the same wherever its parts are the same."""
    return torch.Generator().manual_seed(derived_seed(*parts))


@dataclass(frozen=True)
class Schedule:
    """How many steps a run has, and which rows each of them sees."""

    rows: int
    rows_per_step: int
    epochs: int
    max_steps: int | None
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last, partial window of an epoch is a step of its own."""
        return math.ceil(self.rows / self.rows_per_step)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        total = self.epochs * self.steps_per_epoch
        return total if self.max_steps is None else min(total, self.max_steps)

    @property
    def shortfall(self) -> str:
        """In words: that the epochs end before the steps that were asked for; mostly empty."""
        if self.total_steps >= (self.max_steps or 0):
            return ""
        return f" (not {self.max_steps}: {self.epochs} epochs have no more; raise train.epochs)"

    def step_rows(self, step: int) -> tuple[int, list[int]]:
        """(epoch, row ids) of optimiser step `step`, counted from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        generator = derived_generator(self.seed, "order", epoch)
        order = torch.randperm(self.rows, generator=generator).tolist()
        start = within * self.rows_per_step
        return epoch, order[start : start + self.rows_per_step]


def deal(
    row_ids: Sequence[int], lengths: Mapping[int, int], micro_rows: int, rank: int, world: int
) -> list[list[int]]:
    """This process's micro-batches of a step; every process gets equally many, some may be empty.

    Rows of like length share a micro-batch (less padding), and micro-batches go round the
    processes (like work for each).
    """
    by_length = sorted(row_ids, key=lambda row: (-lengths[row], row))
    size = min(micro_rows, math.ceil(len(by_length) / world))
    groups = [by_length[i : i + size] for i in range(0, len(by_length), size)]
    while len(groups) % world:
        groups.append([])
    return groups[rank::world]


@dataclass(frozen=True)
class Batch:
    """Right-padded rows with their anchors.

    row_ids: as dealt, empty for a micro-batch without rows. ids, valid, loss_mask: [B, S] int64,
    bool, bool. anchors: positions and valid, [B, A]. noise: [B, S] Gumbel draws for anchors that
    are to be chosen by a score, else None. A batch without rows is one row of padding, so that
    every process runs the same code.
    """

    row_ids: tuple[int, ...]
    ids: Tensor
    valid: Tensor
    loss_mask: Tensor
    anchors: Anchors
    noise: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        positions, drawn = self.anchors.positions, self.anchors.valid
        own = [self.ids, self.valid, self.loss_mask, positions, drawn]
        ids, valid, loss_mask, positions, drawn = send_all(own, device)
        return Batch(
            self.row_ids,
            ids,
            valid,
            loss_mask,
            Anchors(positions, drawn),
            None if self.noise is None else send(self.noise, device),
        )

    def row(self, at: int, length: int) -> Batch:
        """Row `at` alone, its first `length` tokens."""
        one = slice(at, at + 1)
        return Batch(
            self.row_ids[one],
            self.ids[one, :length],
            self.valid[one, :length],
            self.loss_mask[one, :length],
            Anchors(self.anchors.positions[one], self.anchors.valid[one]),
            None if self.noise is None else self.noise[one, :length],
        )

    @property
    def tokens(self) -> int:
        """Real tokens, without padding."""
        return int(self.valid.sum())


@one_thread()
def make_batch(
    rows: Sequence[TrainingRow],
    row_ids: Sequence[int],
    *,
    anchors: int,
    seed: int,
    epoch: int,
    noise: bool = False,
) -> Batch:
    """Pad the rows `row_ids` and draw at most `anchors` anchors in each, and `noise` for others.

    There are as many as the row with the most has: a block that none uses costs as much as others.
    """
    length = max([len(rows[i].ids) for i in row_ids], default=2)
    count = max(1, len(row_ids))
    ids = torch.zeros(count, length, dtype=torch.int64)
    valid = torch.zeros(count, length, dtype=torch.bool)
    loss_mask = torch.zeros(count, length, dtype=torch.bool)
    positions = torch.zeros(count, anchors, dtype=torch.int64)
    anchor_valid = torch.zeros(count, anchors, dtype=torch.bool)
    gumbel = torch.zeros(count, length)
    for at, row_id in enumerate(row_ids):
        row = rows[row_id]
        n = len(row.ids)
        ids[at, :n] = torch.as_tensor(row.ids)
        valid[at, :n] = True
        loss_mask[at, :n] = torch.as_tensor(row.loss_mask)
        generator = derived_generator(seed, "anchors", epoch, row_id)
        drawn = sample_anchors(loss_mask[at : at + 1, :n], anchors, generator)
        positions[at] = drawn.positions[0]
        anchor_valid[at] = drawn.valid[0]
        if noise:
            generator = derived_generator(seed, "anchor noise", epoch, row_id)
            gumbel[at, :n] = -torch.empty(n).exponential_(generator=generator).log()
    most = max(1, int(anchor_valid.sum(1).max()))
    used = Anchors(positions[:, :most], anchor_valid[:, :most])
    return Batch(tuple(row_ids), ids, valid, loss_mask, used, gumbel if noise else None)
