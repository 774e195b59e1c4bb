"""How the slots of a batch are cut into chunks whose logits exist at one time.

Letters: n supervised slots, G slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.distill.terms import Grid


@dataclass(frozen=True)
class Chunk:
    """Slots `rows` of whole blocks, those from `first_block` to before `end_block`."""

    rows: slice
    first_block: int
    end_block: int

    def grid(self, grid: Grid) -> Grid:
        """Where its slots sit, counted from its own first block."""
        block = grid.block[self.rows] - self.first_block
        return Grid(block, grid.position[self.rows], self.end_block - self.first_block, grid.slots)


def chunks(counts: Sequence[int], size: int) -> list[Chunk]:
    """Runs of whole blocks with at most `size` slots, or one block; `counts`: slots of each."""
    found: list[Chunk] = []
    first_block = first_slot = block = slot = 0
    for count in counts:
        if slot > first_slot and slot + count - first_slot > size:
            found.append(Chunk(slice(first_slot, slot), first_block, block))
            first_block, first_slot = block, slot
        block, slot = block + 1, slot + count
    if slot > first_slot:
        found.append(Chunk(slice(first_slot, slot), first_block, block))
    return found
