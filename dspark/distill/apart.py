"""Gradients of one process on a GPU: where autograd leaves them, in the dtype it makes them in.

`optim.FlatGradients` keeps one float32 buffer, which every process reduces. Alone there is nobody
to reduce with, and the buffer costs: it lives beside all activations, is zeroed, and takes every
gradient a second time. Here a gradient exists from its layer's backward pass to the update, when
the activations it replaces are gone, and is scaled inside the update.

Matrices that compute in bfloat16 do so in *copies*, made by the update itself. Their gradients are
what autocast would give, bfloat16, before it widens them to float32. With several micro-batches in
a step they are added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dspark import ops
from dspark.devices import fetch
from dspark.distill.processes import Processes
from dspark.distill.rules import Named, master_weights


class ApartGradients:
    """A gradient per parameter, or none where the loss does not reach it in this step.

    Attributes:
        named: Name and float32 master of everything that trains.
        copies: By name, [as the master] bfloat16 leaf that computes in its place.
        scale: [] float32 on the device, what the update multiplies gradients by.
    """

    def __init__(self, module: nn.Module, half: Collection[str] = ()) -> None:
        """`half`: names of the parameters that compute in bfloat16."""
        self.named: Named = master_weights(module)
        self.scale = torch.ones((), device=self.named[0][1].device)
        self.copies = {
            name: p.detach().to(torch.bfloat16).requires_grad_(True)
            for name, p in self.named
            if name in half
        }
        self._owners = [
            (owner, key, name)
            for path, owner in module.named_modules()
            for key in owner._parameters
            if (name := f"{path}.{key}" if path else key) in self.copies
        ]
        self._versions = dict.fromkeys(self.copies, -1)
        self._sums: dict[str, Tensor] | None = None
        self._norms: Tensor | None = None
        self._landed: Callable[[], Tensor] | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the module computes with the copies."""
        masters = [owner._parameters[key] for owner, key, _ in self._owners]
        for owner, key, name in self._owners:
            owner._parameters[key] = self.copies[name]
        try:
            yield
        finally:
            for (owner, key, _), master in zip(self._owners, masters, strict=True):
                owner._parameters[key] = master

    def zero(self, micro_batches: int) -> None:
        """Start a step of so many micro-batches."""
        self._sums = {} if micro_batches > 1 else None
        self.drop()
        for name, parameter in self.named:
            # Whoever else wrote a master (a checkpoint, a mean of the weights) left its mark here.
            if name in self.copies and self._versions[name] != parameter._version:
                self.copies[name].data.copy_(parameter.detach())
                self._versions[name] = parameter._version

    def drop(self) -> None:
        """Free all gradients."""
        for name, parameter in self.named:
            parameter.grad = None
            if name in self.copies:
                self.copies[name].grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """After every micro-batch."""
        if self._sums is None:
            return
        for name, parameter in self.named:
            source = self.copies.get(name, parameter)
            if source.grad is None:
                continue
            if name in self._sums:
                self._sums[name] += source.grad
            else:
                self._sums[name] = source.grad.float()
            source.grad = None

    def of(self, name: str, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter, unscaled."""
        if self._sums is not None:
            return self._sums.get(name)
        return self.copies.get(name, parameter).grad

    def reduce(self, processes: Processes) -> None:
        """Nothing is left to add up: this process is alone."""

    @torch.no_grad()
    def measure(self) -> None:
        """Queue the norms, one a parameter; `finish` reads them."""
        found = [self.of(name, p) for name, p in self.named]
        nothing = self.scale.new_zeros(1)
        self._norms = ops.grad_norms([nothing if g is None else g for g in found])
        self._landed = fetch(self._norms)

    @torch.no_grad()
    def settle(self, weight: Tensor, finite: Tensor, limit: float) -> None:
        """Set `scale` on the device: divided by the step's weight [], clipped to a norm of `limit`.

        It is NaN, which changes nothing, where a norm is not finite, `weight` is zero or `finite`
        [] says no.
        """
        assert self._norms is not None, "measure() comes first"
        weight = weight.double()
        norm = self._norms.double().square().sum().sqrt() / weight
        scale = (limit / norm).clamp(max=1.0) / weight
        self.scale.copy_(torch.where(finite & torch.isfinite(norm), scale, torch.nan))

    def finish(self, weight: float, limit: float) -> tuple[float, str | None]:
        """The norm before clipping, and the first bad name, if any, of what `settle` was given."""
        del limit
        assert self._landed is not None, "measure() comes first"
        norms = self._landed().tolist()
        bad = next((n for (n, _), v in zip(self.named, norms, strict=True) if v - v != 0), None)
        return sum(value**2 for value in norms) ** 0.5 / weight, bad
