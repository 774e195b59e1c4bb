"""The weights of a decoder as its static pass reads them: few matrices, no second copy of a big one.

    KDA    [q, k, v, gate, decay, beta]    one product of the normed row; gate and decay may then
                                           have a second, low-rank factor each
    MLA    [query, latent, gate]           one product; keys and values are absorbed
    MLP    [gate, up]                      one product

Packing re-points the parameters of the model to views of the packed matrices, so model and static
pass share them. Only vectors, and matrices of a few rows, are stored twice.

Letters: D hidden, H heads, K head dim of KDA, W rows of the convolution, R latent rank, n nope
width, p shared-key width, v value width, I intermediate, L width of an expert's input, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.k3.kda import KDA
from dspark.k3.layers import GatedMLP, Packable, RMSNorm
from dspark.k3.mla import MLA
from dspark.k3.model import DecoderLayer, K3ForCausalLM
from dspark.k3.moe import LatentMoE


@dataclass(frozen=True)
class KDAWeights:
    """inputs [O, D] of `splits` = (3HK, gate, decay, H) columns; decay [HK, K]; gate [HK, K] or None
    where it has full rank; conv [W, 3HK], A_log [H], dt_bias [HK], norm [K] float32;
    output [D, HK]."""

    inputs: Tensor
    splits: tuple[int, int, int, int]
    decay: Tensor
    gate: Tensor | None
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    output: Tensor


@dataclass(frozen=True)
class MLAWeights:
    """inputs [O, D] of `splits` = (query, R + p, gate or 0) columns; query_norm [q rank] and query
    [H (n + p), q rank], or None; latent_norm [R]; key [H, n, R]; value [H, v, R]; output [D, Hv]."""

    inputs: Tensor
    splits: tuple[int, int, int]
    query_norm: Tensor | None
    query: Tensor | None
    latent_norm: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


@dataclass(frozen=True)
class MLPWeights:
    """gate_up [2I, D], gate first; down [D, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class MoEWeights:
    """router [E, D]; bias [E] float32; w1, w3 [E, I, L]; w2 [E, L, I]; down [L, D], up [D, L] and
    norm [L] of the latent space, or None; shared MLP or None."""

    router: Tensor
    bias: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    down: Tensor | None
    up: Tensor | None
    norm: Tensor | None
    shared: MLPWeights | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer; the keys [D] float32 of its two reads of Attention Residuals, or None."""

    mixer: KDAWeights | MLAWeights
    mlp: MLPWeights | MoEWeights
    mixer_norm: Tensor
    mlp_norm: Tensor
    mixer_key: Tensor | None
    mlp_key: Tensor | None


@dataclass(frozen=True)
class StaticWeights:
    """embedding [V, D], layers, norm [D], key [D] of the last read or None, head [V, D]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    key: Tensor | None
    head: Tensor

    @property
    def shared_nbytes(self) -> int:
        """Bytes that every pass reads whatever its rows are: all but embedding and experts."""
        routed = {id(w) for layer in self.layers for w in _experts(layer)}
        held = [self.norm, self.head, *([] if self.key is None else [self.key])]
        held += [w for layer in self.layers for w in tensors(layer) if id(w) not in routed]
        return sum(w.numel() * w.element_size() for w in held)

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one routed expert of every layer that has some."""
        held = [w[0] for layer in self.layers for w in _experts(layer)]
        return sum(w.numel() * w.element_size() for w in held)


def tensors(weights: object) -> list[Tensor]:
    """All tensors of one of these records, those of records inside it too."""
    found: list[Tensor] = []
    for value in vars(weights).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif hasattr(value, "__dataclass_fields__"):
            found += tensors(value)
    return found


def _experts(layer: LayerWeights) -> list[Tensor]:
    return [layer.mlp.w1, layer.mlp.w3, layer.mlp.w2] if isinstance(layer.mlp, MoEWeights) else []


def pack(model: K3ForCausalLM) -> StaticWeights:
    """The weights of a model in inference mode, which goes on working and shares them."""
    for module in model.modules():
        if isinstance(module, Packable) and module.packed is None:
            module.pack_()
    base = model.model
    read = base.config.attn_res_block_size is not None
    with torch.no_grad():
        return StaticWeights(
            embedding=base.embed_tokens.weight.detach(),
            layers=tuple(_layer(layer, read) for layer in base.decoder_layers),
            norm=base.norm.weight.detach(),
            key=_key(base.output_attn_res_norm, base.output_attn_res_proj) if read else None,
            head=model.lm_head.weight.detach(),
        )


def _layer(layer: DecoderLayer, read: bool) -> LayerWeights:
    mixer = layer.self_attn
    return LayerWeights(
        mixer=_mla(mixer) if isinstance(mixer, MLA) else _kda(mixer),
        mlp=_moe(layer.block_sparse_moe) if layer.moe else _mlp(layer.mlp),
        mixer_norm=layer.input_layernorm.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        mixer_key=(
            _key(layer.self_attention_res_norm, layer.self_attention_res_proj) if read else None
        ),
        mlp_key=_key(layer.mlp_res_norm, layer.mlp_res_proj) if read else None,
    )


def _key(norm: RMSNorm, query: nn.Linear) -> Tensor:
    return (query.weight[0].float() * norm.weight.float()).detach()


def _packed(module: Packable) -> Tensor:
    assert module.packed is not None
    return module.packed.detach()


def _kda(mixer: KDA) -> KDAWeights:
    full = mixer.config.kda_full_rank_output_gate
    width = mixer.heads * mixer.width
    return KDAWeights(
        inputs=_packed(mixer),
        splits=(3 * width, width if full else mixer.width, mixer.width, mixer.heads),
        decay=mixer.f_b_proj.weight.detach(),
        gate=None if full else mixer.g_b_proj.weight.detach(),
        conv=mixer.conv_taps().detach(),
        A_log=mixer.A_log.detach().float(),
        dt_bias=mixer.dt_bias.detach().float(),
        norm=mixer.o_norm.weight.detach().float(),
        output=mixer.o_proj.weight.detach(),
    )


def _mla(mixer: MLA) -> MLAWeights:
    config, rank = mixer.config, mixer.config.q_lora_rank
    kv = mixer.kv_b_proj.weight.detach().view(mixer.heads, mixer.nope + mixer.value, -1)
    query = mixer.heads * (mixer.nope + mixer.rope) if rank is None else rank
    gate = mixer.heads * mixer.value if config.mla_output_gate else 0
    return MLAWeights(
        inputs=_packed(mixer),
        splits=(query, config.kv_lora_rank + mixer.rope, gate),
        query_norm=None if rank is None else mixer.q_a_layernorm.weight.detach(),
        query=None if rank is None else mixer.q_b_proj.weight.detach(),
        latent_norm=mixer.kv_a_layernorm.weight.detach(),
        key=kv[:, : mixer.nope],
        value=kv[:, mixer.nope :],
        output=mixer.o_proj.weight.detach(),
    )


def _mlp(mlp: GatedMLP) -> MLPWeights:
    return MLPWeights(_packed(mlp), mlp.down_proj.weight.detach())


def _moe(moe: LatentMoE) -> MoEWeights:
    experts = moe.experts
    return MoEWeights(
        router=moe.gate.weight.detach(),
        bias=moe.gate.e_score_correction_bias.detach().float(),
        w1=experts.w1.detach(),
        w3=experts.w3.detach(),
        w2=experts.w2.detach(),
        down=moe.routed_expert_down_proj.weight.detach() if moe.latent else None,
        up=moe.routed_expert_up_proj.weight.detach() if moe.latent else None,
        norm=moe.routed_expert_norm.weight.detach() if moe.normed else None,
        shared=_mlp(moe.shared_experts) if moe.shared else None,
    )
