"""The backbone's weights laid out for drafting: fewer, larger matrix products.

Drafting at batch 1 multiplies eight rows, so time goes into the number of calls. Query, key and
value of a layer become one matrix, gate and up another, and the keys and values that all layers
take from a context feature a third.

All of these are copies, as are the transposed `output` and `down` and the stacked per-head norms
`qk_norm` and `context_norm`. Only `attention_norm` and `mlp_norm` alias the live parameters, so
a weight written in place while a context is in use would reach these two and none of the copies.
That is why nothing is patched: every new context asks for the packed weights, and the whole set is
built again if any weight was replaced, moved or updated in place since. It is never part of a
checkpoint.

Letters: L layers, D hidden, H query heads, J key heads, K head dim, F MLP width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.draft.attention import DraftLayer


@dataclass(frozen=True)
class PackedLayer:
    """Weights of one layer; those that add to the residual are transposed for `addmm`.

    qkv [(H+2J)*K, D]; qk_norm [H+J, K], the per-head norm weights of queries then keys;
    output [H*K, D]; gate_up [2F, D]; down [F, D]; attention_norm, mlp_norm [D].
    """

    qkv: Tensor
    qk_norm: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor


@dataclass(frozen=True)
class PackedWeights:
    """All layers, and the context projections of all layers in one.

    context [2*L*J*K, D]: keys of every layer, then values of every layer.
    context_norm [L, 1, K]: key norm weights, one row per layer.
    """

    layers: tuple[PackedLayer, ...]
    context: Tensor
    context_norm: Tensor


def pack(layers: Iterable[DraftLayer]) -> PackedWeights:
    """Packs the current weights, detached from autograd."""
    layers = list(layers)
    attentions = [layer.self_attn for layer in layers]
    with torch.no_grad():
        keys = [attention.k_proj.weight for attention in attentions]
        values = [attention.v_proj.weight for attention in attentions]
        return PackedWeights(
            tuple(_pack_layer(layer) for layer in layers),
            torch.cat(keys + values),
            torch.stack([attention.k_norm.weight for attention in attentions])[:, None],
        )


def _pack_layer(layer: DraftLayer) -> PackedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return PackedLayer(
        qkv=torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)),
        qk_norm=torch.cat(
            (
                attention.q_norm.weight.expand(attention.heads, -1),
                attention.k_norm.weight.expand(attention.key_heads, -1),
            )
        ),
        output=attention.o_proj.weight.t().contiguous(),
        gate_up=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
        down=mlp.down_proj.weight.t().contiguous(),
        attention_norm=layer.input_layernorm.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
    )


def weight_stamp(weights: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """Changes whenever one of the tensors is replaced, moved, cast or written in place."""
    # Tensors made under inference_mode keep no version and cannot be trained, only replaced.
    return tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
