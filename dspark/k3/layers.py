"""What every layer of the decoder shares: RMS norm, SiTU, the gated MLP, packed projections.

    rms_norm(x) = x / sqrt(mean x^2 + eps) * w
    situ(g, u)  = b tanh(g / b) sigmoid(g) * l tanh(u / l)

Statistics are float32 and the normed value is cast back before it meets w. In SiTU b = 4 bounds the
gate and l = 25 clips the up branch softly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.k3.config import K3Config

LORA_NORM_EPS = 1e-6
"""Eps of q_a_layernorm and kv_a_layernorm: Moonshot's code leaves the class default there."""

Activation = Callable[[Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Any float dtype; the result has the dtype that x and weight promote to.
    """
    if x.dtype == torch.float32 == weight.dtype:
        return x / rms(x, eps) * weight if x.is_cpu else F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def rms(x: Tensor, eps: float) -> Tensor:
    """sqrt(mean x^2 + eps) over the last dimension, kept: [..., 1].

    On a CPU `F.rms_norm` is nine small operations; with this it is five, at 0.4 of the time for a
    row of 192 (torch 2.13).
    """
    scale = x.shape[-1] ** -0.5
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True) * scale
    return torch.hypot(norm, norm.new_full((), eps**0.5))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU in float32 or wider, cast back to the dtype of ``up``. Shapes equal."""
    wide = torch.promote_types(up.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    bounded = torch.tanh(g / beta) * torch.sigmoid(g)
    return (bounded * torch.tanh(u / linear_beta) * (beta * linear_beta)).to(up.dtype)


def silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def activation(config: K3Config) -> Activation:
    """The gated activation of the MLPs and experts."""
    if config.hidden_act == "silu":
        return silu
    return lambda gate, up: situ(gate, up, config.situ_beta, config.situ_linear_beta)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def pack_rows(linears: Sequence[nn.Linear]) -> Tensor:
    """Put the weights of linears into one [sum out, in] matrix and make them views of it.

    One product instead of several, and not a byte more: at batch 1 a decode step of a small model
    is bound by the number of operations, and of a large one by launches between the weight reads.
    """
    packed = torch.cat([layer.weight.detach() for layer in linears])
    share_rows(linears, packed)
    return packed


def share_rows(linears: Sequence[nn.Linear], packed: Tensor) -> None:
    """Make the weights of linears views of one [sum out, in] matrix that holds them."""
    row = 0
    for layer in linears:
        rows = layer.weight.shape[0]
        layer.weight.data = packed[row : row + rows]
        row += rows


class Packable(nn.Module):
    """A module that may hold its projections packed; moving or casting it drops the packing.

    ``pack_()`` is for inference only: it re-points parameters to views, so call it after loading.
    """

    _packed: Tensor | None = None

    @property
    def packed(self) -> Tensor | None:
        """The weights of all packed projections, one below the other; None: not packed."""
        return self._packed

    def _packable(self) -> list[nn.Linear]:
        raise NotImplementedError

    def pack_(self) -> None:
        self._packed = pack_rows(self._packable())

    def hold_packed(self, packed: Tensor) -> None:
        """Go on with another tensor that holds the packed weights."""
        share_rows(self._packable(), packed)
        self._packed = packed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._packed = None
        return super()._apply(fn, recurse)

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """The outputs of the packable linears, in their order."""
        linears = self._packable()
        if self._packed is None:
            return [layer(x) for layer in linears]
        return F.linear(x, self._packed).split([layer.out_features for layer in linears], dim=-1)


class GatedMLP(Packable):
    """down(act(gate(x), up(x))): the dense MLP and the shared expert."""

    def __init__(self, config: K3Config, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, width)
        self.up_proj = linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size)
        self.act = activation(config)

    def _packable(self) -> list[nn.Linear]:
        return [self.gate_proj, self.up_proj]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._project(x)
        return self.down_proj(self.act(gate, up))
