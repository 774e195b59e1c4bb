"""A drafter of attention layers that starts as layers of a Llama target.

Where a drafter's layer has the target's shape, its weights are a copy of one of the target's: the
input norm moves into the projections (a drafter's context is normed already), and the query and key
norms, which the target has not, get the size that those projections give a normed input. The
context feature starts as the last tap with a little of the others. An MLP wider than the target's
holds it in its first channels; the others start fresh and write nothing yet.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.hf_target import HFTarget
from dspark.runtime.target import Target

OTHER_TAPS = 0.3
"""What is left of the fresh weights of `fc` beside the copy of the last tap."""


def layers_between(target_layers: int, count: int) -> list[int]:
    """`count` layers of the target, evenly spread, its last among them."""
    return [round((at + 1) * target_layers / count) - 1 for at in range(count)]


@torch.no_grad()
def start_from_layers(drafter: DSparkDrafter, target: Target) -> None:
    """Copy target layers into a fresh drafter. Raises UserError where shapes differ."""
    if not isinstance(target, HFTarget) or drafter.config.backbone != "attention":
        raise UserError("a start from target layers needs attention and a target of transformers")
    indices = layers_between(target.num_layers, drafter.config.num_layers)
    for own, index in zip(drafter.layers, indices, strict=True):
        _copy(own, target.parts.layers[index])
    width = drafter.config.hidden_size
    drafter.fc.weight.mul_(OTHER_TAPS)
    drafter.fc.weight[:, -width:] += torch.eye(width, device=drafter.fc.weight.device)


def _copy(own: nn.Module, theirs: nn.Module) -> None:
    pairs = dict(own.named_parameters())
    found = {name: weight.float() for name, weight in theirs.named_parameters()}
    norm = found["input_layernorm.weight"]
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"self_attn.{name}.weight"
        found[key] = found[key] * norm
    found["input_layernorm.weight"] = torch.ones_like(norm)
    for name in ("q", "k"):
        rows = found[f"self_attn.{name}_proj.weight"]
        size = rows.square().sum(1).mean().sqrt()
        found[f"self_attn.{name}_norm.weight"] = size.expand(len(pairs[_norm(name)]))
    for name, parameter in pairs.items():
        value = found.get(name)
        if value is not None and name.startswith("mlp."):
            value = _widened(parameter, value, writes=name == "mlp.down_proj.weight")
        _fill(name, parameter, value)


def _norm(name: str) -> str:
    return f"self_attn.{name}_norm.weight"


def _widened(parameter: Tensor, value: Tensor, *, writes: bool) -> Tensor:
    """An MLP's matrix in the parameter's width, where that is no narrower."""
    axis = 1 if writes else 0
    width = value.shape[axis]
    if parameter.shape[axis] <= width:
        return value
    rest = parameter.narrow(axis, width, parameter.shape[axis] - width)
    return torch.cat((value.to(rest), torch.zeros_like(rest) if writes else rest), axis)


def _fill(name: str, parameter: Tensor, value: Tensor | None) -> None:
    if value is None or value.shape != parameter.shape:
        shape = None if value is None else tuple(value.shape)
        raise UserError(
            f"{name} is {shape} in the target and {tuple(parameter.shape)} in the drafter; a start "
            "from target layers needs equal shapes"
        )
    parameter.copy_(value)
