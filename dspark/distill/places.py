"""Which slots of a batch of blocks are trained, found where their mask lies.

A mask on the host costs the device no wait: indices are sent, and nothing is read back.

Letters: m blocks in use, n supervised slots, G slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dspark.devices import send_all


@dataclass(frozen=True, eq=False)
class Places:
    """Supervised slots of blocks that have any.

    Attributes:
        used: [m] int64, blocks in use among all; None: every block.
        on: [m, G] bool, their supervised slots.
        block, position: [n] int64, where the slots sit in `on`.
        whole: Whether every slot of the blocks in use is supervised.
    """

    used: Tensor | None
    on: Tensor
    block: Tensor
    position: Tensor
    whole: bool

    @classmethod
    def of(cls, supervised: Tensor) -> Places:
        """Of a mask [..., G]; its tensors are where that is."""
        flat = supervised.reshape(-1, supervised.shape[-1])
        used = flat[:, 0].nonzero().squeeze(-1)
        on = flat[used]
        block, position = on.nonzero(as_tuple=True)
        every = None if len(used) == len(flat) else used
        return cls(every, on, block, position, len(block) == on.numel())

    @cached_property
    def counts(self) -> list[int]:
        """Supervised slots of each block in use."""
        counts: list[int] = self.on.sum(-1).tolist()
        return counts

    def to(self, device: torch.device) -> Places:
        """The same on a device."""
        every = self.used is None
        own = [self.on, self.block, self.position, *([] if self.used is None else [self.used])]
        on, block, position, *used = send_all(own, device)
        return Places(None if every else used[0], on, block, position, self.whole)

    def in_use(self, values: Tensor, trailing: int = 1) -> Tensor:
        """[..., G, *] with `trailing` dimensions from G on -> [m, G, *]."""
        flat = values.flatten(0, -1 - trailing)
        return flat if self.used is None else flat[self.used]

    def picked(self, values: Tensor) -> Tensor:
        """[m, G, *] -> [n, *]."""
        return values.flatten(0, 1) if self.whole else values[self.block, self.position]
