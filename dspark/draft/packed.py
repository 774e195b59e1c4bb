"""The attention backbone's weights laid out for drafting: fewer, larger matrix products.

Drafting at batch 1 multiplies eight rows, so time goes into the number of calls. Query, key and
value of a layer become one matrix, gate and up another, and the keys and values that all layers
take from a context feature a third.

All of these are copies, as are the stacked per-head norms `qk_norm` and `context_norm`. The norms
of layer inputs, `output` and `down` alias the live parameters, so a weight written in place while a
context is in use would reach these and none of the copies. That is why nothing is patched: every
new context asks for the packed weights, and the whole set is built again if any weight was
replaced, moved or updated in place since. It is never part of a checkpoint.

Letters: L layers, D hidden, H query heads, J key heads, K head dim, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import ops
from dspark.draft.attention import (
    SITU_BETA,
    SITU_LINEAR_BETA,
    DraftAttention,
    DraftLayer,
)

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class PackedMLP:
    """Norm, MLP and residual of a layer: norm [D], gate_up [2F, D], down [D, F]."""

    norm: Tensor
    gate_up: Tensor
    down: Tensor
    act: str
    eps: float

    @classmethod
    def of(cls, layer: DraftLayer) -> PackedMLP:
        """The MLP of `layer`, detached."""
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        return cls(
            norm.weight.detach(),
            torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
            mlp.down_proj.weight.detach(),
            mlp.act,
            norm.eps,
        )

    def add(self, hidden: Tensor) -> Tensor:
        """hidden [rows, D] -> hidden + mlp(norm(hidden))."""
        betas = None if self.act == "silu" else (SITU_BETA, SITU_LINEAR_BETA)
        inner = ops.gated_rows(hidden, self.gate_up, norm=self.norm, eps=self.eps, situ=betas)
        return ops.linear_rows(inner, self.down, residual=hidden)


@dataclass(frozen=True)
class PackedLayer:
    """Weights of one layer.

    norm [D], of the layer's input; qkv [(H+2J)*K, D]; qk_norm [H+J, K], the per-head norm weights
    of queries then keys; output [D, H*K].
    """

    norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    output: Tensor
    mlp: PackedMLP


@dataclass(frozen=True)
class PackedWeights:
    """All layers, and the context projections of all layers in one.

    context [2*L*J*K, D]: keys of every layer, then values of every layer.
    context_norm [L, 1, K]: key norm weights, one row per layer.
    """

    layers: tuple[PackedLayer, ...]
    context: Tensor
    context_norm: Tensor


def pack(layers: nn.ModuleList) -> PackedWeights:
    """Packs the current weights, detached from autograd."""
    attentions: list[DraftAttention] = [layer.self_attn for layer in layers]  # type: ignore[misc]
    with torch.no_grad():
        keys = [attention.k_proj.weight for attention in attentions]
        values = [attention.v_proj.weight for attention in attentions]
        return PackedWeights(
            tuple(_pack_layer(layer) for layer in layers),  # type: ignore[arg-type]
            torch.cat(keys + values),
            torch.stack([attention.k_norm.weight for attention in attentions])[:, None],
        )


def _pack_layer(layer: DraftLayer) -> PackedLayer:
    attention = layer.self_attn
    assert isinstance(attention, DraftAttention)
    return PackedLayer(
        norm=layer.input_layernorm.weight.detach(),
        qkv=torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)),
        qk_norm=torch.cat(
            (
                attention.q_norm.weight.expand(attention.heads, -1),
                attention.k_norm.weight.expand(attention.key_heads, -1),
            )
        ),
        output=attention.o_proj.weight.detach(),
        mlp=PackedMLP.of(layer),
    )


class Packing(Generic[Weights]):
    """The packed form of layers, built again whenever one of their weights has changed."""

    def __init__(self, layers: nn.ModuleList, pack: Callable[[nn.ModuleList], Weights]) -> None:
        self.layers, self.pack = layers, pack
        self._last: tuple[tuple[tuple[int, int], ...], Weights] | None = None

    def current(self) -> Weights:
        """The weights of this moment."""
        stamp = weight_stamp(self.layers.parameters())
        if self._last is None or self._last[0] != stamp:
            self._last = (stamp, self.pack(self.layers))
        return self._last[1]


def weight_stamp(weights: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """Changes whenever one of the tensors is replaced, moved, cast or written in place."""
    # Tensors made under inference_mode keep no version and cannot be trained, only replaced.
    return tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, [B, n, I] -> [B, n, O]: of few rows as products that only read weights are done."""
    if x.shape[0] * x.shape[1] > ops.FEW_ROWS:
        return F.linear(x, weight)
    return ops.linear_rows(x.flatten(0, 1), weight).unflatten(0, x.shape[:2])
