"""The processes of a data-parallel run, and the few things they tell each other.

One process needs no library. Started by `torchrun` or `accelerate launch`, accelerate sets up the
group (gloo on CPU, nccl on GPU) and this file is the only one that knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dspark.devices import find_device
from dspark.errors import UserError

# torch 2.13 gave these two new names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_PATIENCE = timedelta(hours=6)  # answers to prompts are shared out and take unequal time


@dataclass(frozen=True)
class Processes:
    """Who this process is among `world`, and where its tensors live."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @classmethod
    def start(cls, device: str) -> Processes:
        """Join the launcher's group if there is one. `device`: auto | cpu | cuda.

        Raises UserError for a GPU that is not there.
        """
        if device != "auto":
            find_device(device, "target.device")
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(torch.device("cpu" if on_cpu else "cuda"))
        if not on_cpu:  # the launcher gives every process of a machine a GPU of its own
            rank = os.environ.get("LOCAL_RANK", "0")
            find_device(f"cuda:{rank}", f"process {rank} of this machine:")
        from accelerate import PartialState

        state = PartialState(cpu=on_cpu, timeout=_PATIENCE)
        return cls(state.device, state.process_index, state.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def texts(self, text: str | None) -> list[str]:
        """The texts of all processes that have one."""
        gathered = [text]
        if self.world > 1:
            gathered = [None] * self.world
            dist.all_gather_object(gathered, text)
        return [entry for entry in gathered if entry is not None]

    def from_main(self, text: str) -> str:
        """The text of process 0, everywhere."""
        if self.world == 1:
            return text
        shared = [text]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for every process at the end; a UserError of one inside is raised on all.

        Without it, a full disk on one of them would leave the others waiting for it.
        """
        own: UserError | None = None
        try:
            yield
        except UserError as error:
            own = error
        faults = self.texts(None if own is None else str(own))
        if own is not None:
            raise own
        if faults:
            raise UserError("; ".join(dict.fromkeys(faults)))

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This process's part (of `world` equal ones) of the sum of a vector over processes."""
        if self.world == 1:
            return whole
        part = whole.new_empty(len(whole) // self.world)
        _reduce_scatter(part, whole)
        return part

    def gather_parts(self, whole: Tensor) -> None:
        """Fill a vector from the part of it that each process holds, in place."""
        if self.world > 1:
            size = len(whole) // self.world
            part = whole[self.rank * size : (self.rank + 1) * size].clone()
            _all_gather(whole, part)

    def same_weights(self, module: nn.Module) -> None:
        """Give every process the weights of process 0."""
        if self.world > 1:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)
