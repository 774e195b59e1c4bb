"""The optimiser step of data-parallel training: flat gradients, a schedule, checked AdamW.

Gradients of all parameters are views into one float32 buffer. A step's loss is a sum over slots and
its normaliser W is the sum of slot weights over every row of the step, so

    g = (sum over processes and micro-batches of d(sum of losses)) / W

is one all-reduce of the buffer and one division, and does not depend on how rows were dealt out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dspark.distill.processes import Processes
from dspark.distill.settings import TrainSettings


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


def master_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter of everything that trains.

    Raises TypeError for parameters in any other dtype than float32: just below 1.0 a bfloat16
    weight cannot move by less than 0.004, and norm weights would silently stay as they were.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise TypeError(f"{name} is {parameter.dtype}: master weights must be float32")
    return named


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

    def zero(self) -> None:
        """Start a new step."""
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


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "FlatGradients attached a gradient to every parameter"
    return parameter.grad


class Optimiser:
    """AdamW over float32 master weights, whose state goes in and out as named tensors."""

    def __init__(self, module: nn.Module, settings: TrainSettings) -> None:
        self.gradients = FlatGradients(module)
        self._adamw = torch.optim.AdamW(
            [p for _, p in self.gradients.named],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def step(self, lr: float) -> None:
        """Apply the gradient buffer at rate `lr`."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and update counts, float32: `<parameter>.exp_avg`, `.exp_avg_sq`, `.step`."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.gradients.named:
            for key, value in self._adamw.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = value.detach().contiguous()
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` gave. Raises KeyError or ValueError if it does not fit."""
        if not tensors:  # saved before the first update
            return
        check_moments(tensors, self.gradients.named)
        for name, parameter in self.gradients.named:
            self._adamw.state[parameter] = {
                key: tensors[f"{name}.{key}"].to(parameter.device if key != "step" else "cpu")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


def check_moments(
    tensors: Mapping[str, Tensor], named: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """Raise KeyError or ValueError unless `tensors` are AdamW's state of these parameters."""
    expected = {
        f"{name}.{key}": torch.Size([]) if key == "step" else p.shape
        for name, p in named
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    if tensors.keys() != expected.keys():
        odd = sorted(tensors.keys() ^ expected.keys())
        raise KeyError(f"optimiser state does not fit the drafter: {', '.join(odd[:5])}")
    for name, shape in expected.items():
        if tensors[name].shape != shape or tensors[name].dtype != torch.float32:
            raise ValueError(f"optimiser state {name}: expected float32 {tuple(shape)}")
