"""A running mean of the weights, which is what gets evaluated and written.

    E <- d E + (1 - d) W        d = min(decay, (1 + t) / (10 + t)) after t updates

The bound lets the mean leave the first, random weights behind at once. Training goes on from W:
the mean never feeds back into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from dspark.distill.moments import Layout
from dspark.distill.rules import Named

COUNT = "average.count"


class Average:
    """Exponential moving average of float32 parameters."""

    def __init__(self, named: Named, decay: float) -> None:
        self._named, self._decay = named, decay
        self._count = 0
        self._mean: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        decay = min(self._decay, (1 + self._count) / (10 + self._count))
        self._count += 1
        for name, parameter in self._named:
            if name not in self._mean:
                self._mean[name] = parameter.detach().clone()
            self._mean[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters hold the mean inside, and exactly their own values again afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in self._named}
        self.settle()
        try:
            yield
        finally:
            self._copy(own)

    def settle(self) -> None:
        """Leave the mean in the parameters for good; before the first update they keep theirs."""
        if self._mean:
            self._copy(self._mean)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named:
            parameter.copy_(values[name])

    def state(self) -> dict[str, Tensor]:
        """`<parameter>.average` and the number of updates; empty before the first."""
        if not self._count:
            return {}
        state = {f"{name}.average": tensor for name, tensor in self._mean.items()}
        return state | {COUNT: torch.tensor(float(self._count))}

    def layout(self) -> Layout:
        """What `state` gives after an update."""
        layout: Layout = {
            f"{name}.average": (tuple(p.shape), torch.float32) for name, p in self._named
        }
        return layout | {COUNT: ((), torch.float32)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that fits `layout`."""
        self._count = int(tensors[COUNT])
        self._mean = {
            name: tensors[f"{name}.average"].to(p.device, copy=True) for name, p in self._named
        }
