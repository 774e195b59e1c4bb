"""The optimiser step of data-parallel training: flat gradients, a schedule, checked updates.

Gradients of all parameters are views into one float32 buffer. A step's loss is a sum over slots and
its normaliser W is the sum of slot weights over every row of the step, so

    g = (sum over processes and micro-batches of d(sum of losses)) / W

is one all-reduce of the buffer and one division, and does not depend on how rows were dealt out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from dspark.distill.apart import ApartGradients
from dspark.distill.average import Average
from dspark.distill.kernel_adamw import KernelAdamW
from dspark.distill.moments import CODECS
from dspark.distill.muon import Muon, hidden_matrices
from dspark.distill.processes import Processes
from dspark.distill.rules import (
    AdamW,
    Named,
    PackedAdamW,
    Rule,
    adamw_layout,
    check_state,
    master_weights,
)
from dspark.distill.train_settings import TrainSettings


def learning_rate(step: int, total: int, settings: TrainSettings) -> float:
    """Rate of optimiser step `step` (from 0) of `total`: a pure function, resume cannot bend it.

    Linear warm-up to the peak over the first `warmup * total` steps, then a cosine that reaches 0
    at `total`. Continuous where they meet and never above the peak.
    """
    warm = math.ceil(settings.warmup * total)
    if step < warm:
        return settings.lr * (step + 1) / (warm + 1)
    progress = (step - warm) / max(1, total - warm)
    return settings.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class FlatGradients:
    """One float32 buffer behind the gradients of all parameters of a module.

    Every parameter always has a gradient (zero if the loss does not reach it), so every process
    reduces the same buffer whatever its rows hold, and an unused head needs no graph search.
    """

    def __init__(self, module: nn.Module) -> None:
        self.named = master_weights(module)
        size = sum(p.numel() for _, p in self.named)
        self.buffer = torch.zeros(size, dtype=torch.float32, device=self.named[0][1].device)
        self._attach()

    def _attach(self) -> None:
        offset = 0
        for _, parameter in self.named:
            view = self.buffer[offset : offset + parameter.numel()]
            parameter.grad = view.view_as(parameter)
            offset += parameter.numel()

    def zero(self, micro_batches: int = 1) -> None:
        """Start a new step of so many micro-batches."""
        del micro_batches
        self.buffer.zero_()

    def collect(self) -> None:
        """After every micro-batch; its gradients are in the buffer already."""

    def reduce(self, processes: Processes) -> None:
        """Add up over processes, once all micro-batches of the step are in."""
        processes.sum(self.buffer)

    def first_bad(self) -> str | None:
        """Name of the first parameter whose gradient holds NaN or infinity."""
        if bool(torch.isfinite(self.buffer).all()):
            return None
        return next(n for n, p in self.named if not bool(torch.isfinite(_grad(p)).all()))

    def clip(self, limit: float) -> float:
        """Scale the whole gradient to a norm of at most `limit`; returns the norm before."""
        norm = float(torch.linalg.vector_norm(self.buffer))
        if norm > limit:
            self.buffer.mul_(limit / norm)
        return norm

    def measure(self) -> None:
        """Nothing can be prepared for `finish`."""

    def finish(self, weight: float, limit: float) -> tuple[float, str | None]:
        """Divide by the step's weight and clip: the norm before, and the first bad name, if any."""
        self.buffer.div_(weight)
        bad = self.first_bad()
        return (0.0 if bad else self.clip(limit)), bad


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "FlatGradients attached a gradient to every parameter"
    return parameter.grad


class Optimiser:
    """Update rules over float32 master weights, whose state goes in and out as named tensors.

    AdamW over everything, or Muon over the matrices of the hidden layers and AdamW over the rest;
    AdamW's moments as they are or packed; and, if asked for, a running mean of the weights.

    Args:
        module: What trains.
        settings: Rule and rates.
        apart: Gradients of one process alone, where they are not to be flat; AdamW then runs as
            kernels.
    """

    def __init__(
        self, module: nn.Module, settings: TrainSettings, apart: ApartGradients | None = None
    ) -> None:
        self.gradients: FlatGradients | ApartGradients = apart or FlatGradients(module)
        self._rules: list[Rule] = (
            _rules(module, self.gradients.named, settings)
            if apart is None
            else [KernelAdamW(apart, settings)]
        )
        self._average = Average(self.gradients.named, settings.ema) if settings.ema else None
        self._clip, self._begun = settings.clip, False

    def begin_step(self, lr: float, weight: Tensor, finite: Tensor) -> None:
        """Queue the update of `step` before the host knows whether there is to be one.

        Only where gradients are apart, else nothing is done yet. `weight` and `finite`, [] on the
        device: see `ApartGradients.settle`. `step` or `drop_step` comes next.
        """
        if isinstance(self.gradients, ApartGradients):
            self.gradients.settle(weight, finite, self._clip)
            self._begun = True
            self._apply(lr)

    def step(self, lr: float) -> None:
        """Apply the gradient buffer at rate `lr`, if that has not begun."""
        if not self._begun:
            self._apply(lr)
        self._begun = False
        if self._average is not None:
            self._average.update()

    def drop_step(self) -> None:
        """There is no update: a step that has begun, and changes nothing, is not counted."""
        if self._begun:
            for rule in self._rules:
                assert isinstance(rule, KernelAdamW)
                rule.undo()
        self._begun = False

    def _apply(self, lr: float) -> None:
        for rule in self._rules:
            rule.step(lr)

    def computing(self) -> AbstractContextManager[None]:
        """Inside, the module computes with its copies in half precision, if it has any."""
        gradients = self.gradients
        return gradients.computing() if isinstance(gradients, ApartGradients) else nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the module holds the mean of its weights, if one is kept; then its own again."""
        return nullcontext() if self._average is None else self._average.in_place()

    def settle(self) -> None:
        """Leave the mean of the weights in the module, if one is kept. Training ends with this."""
        if self._average is not None:
            self._average.settle()

    def state_tensors(self) -> dict[str, Tensor]:
        """What the next update depends on, as `<parameter>.<key>`; empty before the first.

        AdamW: `.exp_avg`, `.exp_avg_sq`, `.step`, float32 (or the packed parts of the first two).
        Muon: `.momentum`. Running mean: `.average`, and their number.
        """
        return {name: tensor for part in self._parts() for name, tensor in part.state().items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` gave. Raises KeyError or ValueError if it does not fit."""
        if not tensors:  # saved before the first update
            return
        layouts = [part.layout() for part in self._parts()]
        check_state(tensors, {name: entry for each in layouts for name, entry in each.items()})
        for part, layout in zip(self._parts(), layouts, strict=True):
            part.load({name: tensors[name] for name in layout})

    def _parts(self) -> list[Rule | Average]:
        return [*self._rules, *([] if self._average is None else [self._average])]


def _rules(module: nn.Module, named: Named, settings: TrainSettings) -> list[Rule]:
    matrices = hidden_matrices(module) if settings.optimizer == "muon" else set()
    rest = [(name, p) for name, p in named if name not in matrices]
    rules: list[Rule] = []
    if settings.moments == "fp32":
        rules.append(AdamW(rest, settings))
    else:
        rules.append(PackedAdamW(rest, settings, CODECS[settings.moments]))
    if matrices:
        rules.append(Muon([(name, p) for name, p in named if name in matrices], settings))
    return rules


def check_moments(tensors: Mapping[str, Tensor], named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise KeyError or ValueError unless `tensors` are AdamW's state of these parameters."""
    check_state(tensors, adamw_layout(named))
