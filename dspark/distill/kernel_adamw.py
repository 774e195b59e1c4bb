"""AdamW through `ops.adamw`: one kernel a parameter, moments in any of their forms.

The rule, the state and its names are those of `rules.AdamW` and `rules.PackedAdamW`, so a run may
begin on one and go on with the other. What differs is the noise that packed moments are rounded
with (drawn in the kernel), and that the gradient is scaled on the way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dspark import ops
from dspark.distill.apart import ApartGradients
from dspark.distill.batches import derived_seed
from dspark.distill.moments import CODECS, Layout
from dspark.distill.rules import MOMENTS
from dspark.distill.train_settings import TrainSettings


class KernelAdamW:
    """See `dspark.distill.rules.Rule`. Masters and copies of `gradients` move together."""

    def __init__(self, gradients: ApartGradients, settings: TrainSettings) -> None:
        self._gradients, self._settings = gradients, settings
        self._updates = 0
        self._moments: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update at rate `lr` of gradients times their `scale`."""
        if not self._updates:
            self._moments = {
                name: torch.zeros(shape, dtype=dtype, device=self._gradients.scale.device)
                for name, (shape, dtype) in self._moment_layout().items()
            }
        self._updates += 1
        for name, parameter in self._gradients.named:
            self._update(name, parameter, lr)

    def undo(self) -> None:
        """Forget an update whose gradients had a `scale` that changes nothing."""
        self._updates -= 1

    def _update(self, name: str, parameter: Tensor, lr: float) -> None:
        settings, gradient = self._settings, self._gradients.of(name, parameter)
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        rates = ops.Rates(
            lr, settings.beta1, settings.beta2, settings.eps, settings.weight_decay, self._updates,
            derived_seed(settings.seed, "moments", self._updates, name) >> 33,
        )  # fmt: skip
        copy = self._gradients.copies.get(name)
        ops.adamw(
            parameter.detach().view(-1),
            gradient.reshape(-1),
            self._moments_of(name),
            self._gradients.scale,
            rates,
            None if copy is None else copy.detach().view(-1),
        )

    def _moments_of(self, name: str) -> ops.Moments:
        first, second = (f"{name}.{key}" for key in MOMENTS)
        if self._settings.moments != "int8":
            return ops.Moments(*(self._moments[key].view(-1) for key in (first, second)))
        parts = (f"{key}{part}" for part in (".codes", ".scales") for key in (first, second))
        return ops.Moments(*(self._moments[part] for part in parts))

    def state(self) -> dict[str, Tensor]:
        """What the next update depends on, as `<parameter>.<key>`; empty before the first."""
        if not self._updates:
            return {}
        count = torch.tensor(float(self._updates))
        return {f"{name}.step": count.clone() for name, _ in self._gradients.named} | self._moments

    def layout(self) -> Layout:
        """What `state` gives after an update."""
        steps: Layout = {f"{name}.step": ((), torch.float32) for name, _ in self._gradients.named}
        return steps | self._moment_layout()

    def _moment_layout(self) -> Layout:
        layout: Layout = {}
        for name, parameter in self._gradients.named:
            for key in MOMENTS:
                if self._settings.moments == "fp32":
                    layout[f"{name}.{key}"] = (tuple(parameter.shape), torch.float32)
                    continue
                codec = CODECS[self._settings.moments]
                parts = codec.layout(parameter.shape, key == MOMENTS[0])
                layout |= {f"{name}.{key}{part}": entry for part, entry in parts.items()}
        return layout

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that fits `layout`."""
        names = self._moment_layout()
        self._updates = int(tensors[f"{self._gradients.named[0][0]}.step"])
        device = self._gradients.scale.device
        self._moments = {name: tensors[name].to(device, copy=True) for name in names}
