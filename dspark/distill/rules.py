"""Update rules: from a gradient to a step of the weights, with a state that can be saved.

AdamW (decoupled weight decay) comes twice: as torch's own over float32 moments, and over moments
that are packed between steps (`moments.py`): unpack, update, step, pack.

    m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
    w <- (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from dspark.distill.batches import derived_seed
from dspark.distill.moments import Codec, Layout
from dspark.distill.train_settings import TrainSettings

Named = Sequence[tuple[str, nn.Parameter]]
MOMENTS = ("exp_avg", "exp_avg_sq")


class Rule(Protocol):
    """Updates some parameters from their `.grad`."""

    def step(self, lr: float) -> None:
        """One update at rate `lr`."""

    def state(self) -> dict[str, Tensor]:
        """What the next update depends on, as `<parameter>.<key>`; empty before the first."""

    def layout(self) -> Layout:
        """What `state` gives after an update."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that fits `layout`."""


def adamw_layout(named: Named) -> Layout:
    """State of AdamW with float32 moments."""
    sizes = {f"{name}.{key}": tuple(p.shape) for name, p in named for key in MOMENTS}
    sizes |= {f"{name}.step": () for name, _ in named}
    return {name: (shape, torch.float32) for name, shape in sizes.items()}


def check_state(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise KeyError or ValueError unless `tensors` have exactly these names, shapes, dtypes."""
    if tensors.keys() != layout.keys():
        odd = sorted(tensors.keys() ^ layout.keys())
        raise KeyError(f"optimiser state does not fit the drafter: {', '.join(odd[:5])}")
    for name, (shape, dtype) in layout.items():
        if tuple(tensors[name].shape) != shape or tensors[name].dtype != dtype:
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(f"optimiser state {name}: expected {kind} {shape}")


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


class TorchAdamW(torch.optim.AdamW):
    """torch's AdamW as the settings ask for it."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: TrainSettings) -> None:
        super().__init__(
            parameters,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def step_at(self, lr: float) -> None:
        """One update at rate `lr`."""
        for group in self.param_groups:
            group["lr"] = lr
        self.step()


class AdamW:
    """torch's AdamW, whose state goes in and out as named tensors."""

    def __init__(self, named: Named, settings: TrainSettings) -> None:
        self._named = named
        self._adamw = TorchAdamW([p for _, p in named], settings)

    def step(self, lr: float) -> None:
        self._adamw.step_at(lr)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value.detach().contiguous()
            for name, parameter in self._named
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def layout(self) -> Layout:
        return adamw_layout(self._named)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named:
            moments = {
                key: tensors[f"{name}.{key}"].to(parameter.device, copy=True) for key in MOMENTS
            }
            self._adamw.state[parameter] = {
                "step": tensors[f"{name}.step"].to("cpu", copy=True),
                **moments,
            }


class PackedAdamW:
    """AdamW whose moments are packed by `codec` between steps.

    Packing rounds at random, or small changes of a moment would be lost every step; the noise is a
    pure function of the seed, the parameter and the number of updates, so a resumed run sees it
    again.
    """

    def __init__(self, named: Named, settings: TrainSettings, codec: Codec) -> None:
        self._named, self._settings, self._codec = named, settings, codec
        self._updates = 0
        self._packed: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self._updates += 1
        for name, parameter in self._named:
            self._update(name, parameter, lr)

    def _update(self, name: str, parameter: nn.Parameter, lr: float) -> None:
        settings, gradient = self._settings, parameter.grad
        assert gradient is not None, "every parameter that trains has a gradient"
        if self._updates == 1:
            first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
        else:
            first, second = (self._unpack(f"{name}.{key}", parameter) for key in MOMENTS)
        first.lerp_(gradient, 1 - settings.beta1)
        second.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
        scale = 1 - settings.beta2**self._updates
        rate = lr / (1 - settings.beta1**self._updates)
        parameter.mul_(1 - lr * settings.weight_decay)
        parameter.addcdiv_(first, (second / scale).sqrt_().add_(settings.eps), value=-rate)
        generator = torch.Generator(parameter.device)
        generator.manual_seed(derived_seed(settings.seed, "moments", self._updates, name))
        for key, value in zip(MOMENTS, (first, second), strict=True):
            for part, tensor in self._codec.pack(value, key == MOMENTS[0], generator).items():
                self._packed[f"{name}.{key}{part}"] = tensor

    def _unpack(self, name: str, like: Tensor) -> Tensor:
        parts = {part: self._packed[name + part] for part in self._codec.parts}
        return self._codec.unpack(parts, like.shape, name.endswith(MOMENTS[0]))

    def state(self) -> dict[str, Tensor]:
        if not self._updates:
            return {}
        steps = {f"{name}.step": torch.tensor(float(self._updates)) for name, _ in self._named}
        return steps | self._packed

    def layout(self) -> Layout:
        layout: Layout = {f"{name}.step": ((), torch.float32) for name, _ in self._named}
        for name, parameter in self._named:
            for key in MOMENTS:
                parts = self._codec.layout(parameter.shape, key == MOMENTS[0])
                layout |= {f"{name}.{key}{part}": entry for part, entry in parts.items()}
        return layout

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named:
            self._updates = int(tensors[f"{name}.step"])
            for key in MOMENTS:
                for part in self._codec.parts:
                    entry = f"{name}.{key}{part}"
                    self._packed[entry] = tensors[entry].to(parameter.device)
