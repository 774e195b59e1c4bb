"""Gradients and moments shared out among the processes, for drafters that do not fit n times.

Parameters are laid out in *buckets*, one flat float32 vector each, padded to a multiple of the
number of processes; process r owns the r-th part of every bucket. (ZeRO, Rajbhandari et al. 2020,
stage 2.)

    backward    a bucket whose gradients are all there is summed over processes, and of the sum each
                process keeps its own part; the gradients themselves are dropped at once
    update      AdamW on the own parts, which are views into the bucket
    afterwards  every process gathers the updated parts of the others into its buckets

What a process holds, in bytes per parameter with w processes: 4 for weights (it computes with all
of them), 4/w for gradients, 8/w for moments. Sums run over the same numbers as in `optim.py`, so
the weights are the same up to rounding. A checkpoint holds whole tensors under their names: it
knows nothing of w, and a run may go on with another number of processes, or without sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dspark.distill.optim import check_moments
from dspark.distill.processes import Processes
from dspark.distill.rules import MOMENTS, TorchAdamW, master_weights
from dspark.distill.train_settings import TrainSettings

BUCKET = 8 << 20
"""Parameters that a bucket is closed after: 32 MiB of gradients exist beyond the own parts."""


@dataclass(eq=False)
class Bucket:
    """Some parameters in one flat vector `weights`, of which this process owns the part `own`."""

    names: list[str]
    parameters: list[nn.Parameter]
    weights: Tensor
    own: nn.Parameter
    waiting: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, named: Sequence[tuple[str, nn.Parameter]], processes: Processes) -> Bucket:
        """Move parameters into a bucket of their own; they become views of it."""
        parameters = [p for _, p in named]
        size = sum(p.numel() for p in parameters)
        part = -(-size // processes.world)
        weights = parameters[0].detach().new_zeros(part * processes.world)
        own = nn.Parameter(weights[processes.rank * part : (processes.rank + 1) * part])
        bucket = cls([name for name, _ in named], parameters, weights, own)
        for parameter, place in bucket.places(weights):
            place.copy_(parameter.detach())
            parameter.data = place
        return bucket

    def places(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its view of a vector that is laid out like the bucket."""
        offset = 0
        for parameter in self.parameters:
            size = parameter.numel()
            yield parameter, flat[offset : offset + size].view_as(parameter)
            offset += size

    def named_copies(self, flat: Tensor, key: str) -> dict[str, Tensor]:
        """The pieces of such a vector as `<parameter>.<key>`, on CPU."""
        pieces = zip(self.names, self.places(flat), strict=True)
        return {f"{name}.{key}": place.to("cpu", copy=True) for name, (_, place) in pieces}

    def own_part(self, flat: Tensor, rank: int) -> Tensor:
        """This process's part of a vector that is laid out like the bucket."""
        return flat[rank * len(self.own) : (rank + 1) * len(self.own)]

    def name_at(self, position: int) -> str:
        """Name of the parameter at a position of the flat vector."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if position < parameter.numel():
                return name
            position -= parameter.numel()
        return "padding"


class ShardedGradients:
    """`FlatGradients` of which a process holds only its parts; `buffer` is those.

    Buckets are summed in one fixed order, as soon as they and all before them are complete, so that
    processes whose graphs differ (or that had nothing to learn) still meet in the same calls.
    """

    def __init__(self, module: nn.Module, processes: Processes) -> None:
        self._processes = processes
        self.buckets = [Bucket.of(named, processes) for named in _split(module, BUCKET)]
        sizes = [len(b.own) for b in self.buckets]
        self.buffer = torch.zeros(sum(sizes), device=self.buckets[0].weights.device)
        for entry, part in zip(self.buckets, self.buffer.split(sizes), strict=True):
            entry.own.grad = part
        self._next = 0
        for at, entry in enumerate(self.buckets):
            for parameter in entry.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrival(at))
        self._expect_all()

    def zero(self, micro_batches: int = 1) -> None:
        """Start a new step of so many micro-batches."""
        del micro_batches
        self.buffer.zero_()

    def collect(self) -> None:
        """After every micro-batch, on every process: sum what its backward pass left open."""
        while self._next < len(self.buckets):
            self._sum_next()
        self._expect_all()

    def reduce(self, processes: Processes) -> None:
        """Nothing is left to add up over processes: `collect` did."""

    def first_bad(self) -> str | None:
        """Name of a parameter whose gradient holds NaN or infinity, the same on all processes."""
        bad = torch.nonzero(~torch.isfinite(self.buffer))
        found = self._processes.sum(torch.tensor([float(len(bad))], device=self.buffer.device))
        if not float(found):
            return None
        return self._processes.texts(self._name(int(bad[0])) if len(bad) else None)[0]

    def clip(self, limit: float) -> float:
        """Scale the whole gradient to a norm of at most `limit`; returns the norm before."""
        square = torch.linalg.vector_norm(self.buffer, dtype=torch.float64).square()
        norm = float(self._processes.sum(square.reshape(1)).sqrt())
        if norm > limit:
            self.buffer.mul_(limit / norm)
        return norm

    def measure(self) -> None:
        """Nothing can be prepared for `finish`."""

    def finish(self, weight: float, limit: float) -> tuple[float, str | None]:
        """As `FlatGradients.finish`."""
        self.buffer.div_(weight)
        bad = self.first_bad()
        return (0.0 if bad else self.clip(limit)), bad

    def _expect_all(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.waiting = {id(p) for p in bucket.parameters}

    def _arrival(self, at: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if at < self._next:
                raise RuntimeError("a gradient came after its bucket was summed over processes")
            self.buckets[at].waiting.discard(id(parameter))
            while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
                self._sum_next()

        return arrived

    def _sum_next(self) -> None:
        bucket = self.buckets[self._next]
        whole = torch.zeros_like(bucket.weights)
        for parameter, place in bucket.places(whole):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                parameter.grad = None
        assert bucket.own.grad is not None, "attached when the buckets were made"
        bucket.own.grad += self._processes.scatter_sum(whole)
        self._next += 1

    def _name(self, position: int) -> str:
        for bucket in self.buckets:
            if position < len(bucket.own):
                return bucket.name_at(self._processes.rank * len(bucket.own) + position)
            position -= len(bucket.own)
        raise IndexError(position)


class ShardedOptimiser:
    """`Optimiser` (AdamW) with gradients and moments shared out among `processes`."""

    def __init__(self, module: nn.Module, settings: TrainSettings, processes: Processes) -> None:
        self._processes = processes
        self.gradients = ShardedGradients(module, processes)
        self._adamw = TorchAdamW([bucket.own for bucket in self.gradients.buckets], settings)

    def step(self, lr: float) -> None:
        """Apply the gradients at rate `lr`; afterwards all processes hold all weights."""
        self._adamw.step_at(lr)
        for bucket in self.gradients.buckets:
            self._processes.gather_parts(bucket.weights)

    def computing(self) -> AbstractContextManager[None]:
        """As `Optimiser.computing`; there are no copies."""
        return nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        """As `Optimiser.averaged`; a mean of shared-out weights is refused by the settings."""
        return nullcontext()

    def settle(self) -> None:
        """As `Optimiser.settle`."""

    def state_tensors(self) -> dict[str, Tensor]:
        """As `Optimiser.state_tensors`, on process 0; all processes must call it, others get {}."""
        tensors: dict[str, Tensor] = {}
        for bucket in self.gradients.buckets:
            state = self._adamw.state.get(bucket.own)
            if not state:
                continue
            for name in bucket.names:
                tensors[f"{name}.step"] = state["step"].clone()
            for key in MOMENTS:
                whole = torch.zeros_like(bucket.weights)
                bucket.own_part(whole, self._processes.rank).copy_(state[key])
                self._processes.gather_parts(whole)
                if self._processes.is_main:
                    tensors |= bucket.named_copies(whole, key)
        return tensors if self._processes.is_main else {}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the own parts of what `state_tensors` gave, however many processes saved it.

        Raises KeyError or ValueError if it does not fit.
        """
        if not tensors:  # saved before the first update
            return
        buckets = self.gradients.buckets
        check_moments(
            tensors, [pair for b in buckets for pair in zip(b.names, b.parameters, strict=True)]
        )
        for bucket in buckets:
            state = {"step": tensors[f"{bucket.names[0]}.step"].cpu().clone()}
            for key in MOMENTS:
                whole = torch.zeros_like(bucket.weights)
                for name, (_, place) in zip(bucket.names, bucket.places(whole), strict=True):
                    place.copy_(tensors[f"{name}.{key}"])
                state[key] = bucket.own_part(whole, self._processes.rank).clone()
            self._adamw.state[bucket.own] = state


def _split(module: nn.Module, size: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters in runs of about `size` elements, roughly in the order their gradients arrive.

    That is last layers first. Norms are small and some come late: in a bucket with the matrices of
    their layer they would hold all of it back, so they go last.
    """
    run: list[tuple[str, nn.Parameter]] = []
    backwards = reversed(master_weights(module))
    for entry in sorted(backwards, key=lambda named: named[1].ndim < 2):
        run.append(entry)
        if sum(p.numel() for _, p in run) >= size:
            yield run
            run = []
    if run:
        yield run
