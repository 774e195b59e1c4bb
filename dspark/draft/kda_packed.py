"""The KDA backbone's weights laid out for drafting: fewer, larger matrix products.

Everything that a layer takes from its input (q, k, v, output gate, decay, beta) becomes one matrix,
and what a slot embedding adds to those products a bias of them: W (x + e) = W x + W e. What all
layers take from a context feature becomes one matrix too, with the layers as further heads of one
recurrence. All are copies, and the set is made anew for a context if any weight changed since
(`packed.py` says why).

Letters: L layers, D hidden, H heads, K head dim, W rows of the convolution, R gate rank, G slots,
F MLP width, C = 3 H K channels of q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.draft.kda import DraftKDA, KDALayer, wide


@dataclass(frozen=True)
class PackedKDALayer:
    """Weights of one layer.

    inputs [C + HK + R + H, D]: q, k, v, output gate, low-rank decay, beta
    slots [G, C + HK + R + H]: the same of the slot embeddings
    decay [R, HK]; dt_bias [H, K]; rate [H, 1], exp(A_log); conv [W, C]
    output_norm [K]; output [D, HK]; attention_norm, mlp_norm [D]; gate_up [2F, D]; down [D, F]
    sharpness, gain: of the softmax between slots, [H] and [H, 1], or None
    """

    inputs: Tensor
    slots: Tensor
    decay: Tensor
    dt_bias: Tensor
    rate: Tensor
    conv: Tensor
    output_norm: Tensor
    output: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    sharpness: Tensor | None
    gain: Tensor | None


@dataclass(frozen=True)
class PackedKDA:
    """All layers, and the context side of all layers in one.

    context [3*L*HK + L*R + L*H, D]: q of every layer, then k, v, low-rank decay and beta
    decay [L, R, HK]; dt_bias [L*H, K]; rate [L*H, 1]; conv [W, 3*L*HK]
    """

    layers: tuple[PackedKDALayer, ...]
    context: Tensor
    decay: Tensor
    dt_bias: Tensor
    rate: Tensor
    conv: Tensor


def pack_kda(layers: Iterable[KDALayer]) -> PackedKDA:
    """Packs the current weights, detached from autograd."""
    layers = list(layers)
    mixers = [layer.self_attn for layer in layers]
    names = ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj")
    with torch.no_grad():
        packed = tuple(_pack_layer(layer) for layer in layers)
        convs = [mixer.conv_taps().unflatten(-1, (3, -1)) for mixer in mixers]  # [W, 3, HK]
        return PackedKDA(
            packed,
            context=torch.cat([getattr(mixer, name).weight for name in names for mixer in mixers]),
            decay=torch.stack([layer.decay for layer in packed]),
            dt_bias=torch.cat([layer.dt_bias for layer in packed]),
            rate=torch.cat([layer.rate for layer in packed]),
            conv=torch.stack(convs, 2).flatten(1).contiguous(),
        )


def _pack_layer(layer: KDALayer) -> PackedKDALayer:
    mixer: DraftKDA = layer.self_attn
    mlp = layer.mlp
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    inputs = _rows(torch.cat([getattr(mixer, name).weight for name in names]))
    softmax = mixer.shape.block_softmax
    return PackedKDALayer(
        inputs=inputs,
        slots=F.linear(mixer.slot_embedding, inputs),
        decay=mixer.f_b_proj.weight.t().contiguous(),
        dt_bias=wide(mixer.dt_bias).clone().view(mixer.heads, -1),
        rate=wide(mixer.A_log).exp()[:, None],
        conv=mixer.conv_taps().contiguous(),
        output_norm=mixer.o_norm.weight.detach().clone(),
        output=_rows(mixer.o_proj.weight),
        attention_norm=layer.input_layernorm.weight.detach().clone(),
        mlp_norm=layer.post_attention_layernorm.weight.detach().clone(),
        gate_up=_rows(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))),
        down=_rows(mlp.down_proj.weight),
        sharpness=mixer.softmax_sharpness.detach().clone() if softmax else None,
        gain=mixer.softmax_gain.detach().clone()[:, None] if softmax else None,
    )


def _rows(weight: Tensor) -> Tensor:
    """A copy [outputs, inputs]: by rows in a GPU's memory, which kernels read so, and by columns in
    a CPU's, whose products of a few rows are faster so."""
    if weight.device.type == "cpu":
        return weight.t().clone(memory_format=torch.contiguous_format).t()
    return weight.clone(memory_format=torch.contiguous_format)
