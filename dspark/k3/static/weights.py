"""The weights of a decoder as its static pass reads them: few matrices, no big one stored twice.

    KDA    [q, k, v, gate, decay, beta]    one product of the normed row; gate and decay may then
                                           have a second, low-rank factor each
    MLA    [query, latent, gate]           one product; keys and values are absorbed
    MLP    [gate, up]                      one product

Packing re-points the parameters of the model to views of the packed matrices, so model and static
pass share them. Only vectors, and matrices of a few rows, are stored twice.

Letters: D hidden, H heads, K head dim of KDA, W rows of the convolution, R latent rank, n nope
width, p shared-key width, v value width, I width inside an MLP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass

import torch
from torch import Tensor, nn

from dspark import ops
from dspark.k3.config import K3Config
from dspark.k3.kda import KDA
from dspark.k3.layers import GatedMLP, Packable, RMSNorm
from dspark.k3.mla import MLA
from dspark.k3.model import DecoderLayer, K3ForCausalLM
from dspark.k3.moe import Experts, LatentMoE
from dspark.k3.mxfp4 import quantise


@dataclass(frozen=True)
class KDAWeights:
    """inputs [O, D] of `splits` = (3HK, gate, decay, H) columns; second factors of the
    low-rank ones, of gate and decay [2, HK, K] or of the decay alone [1, HK, K]; conv [W, 3HK],
    A_log [H], dt_bias [HK], norm [K] float32; output [D, HK]."""

    inputs: Tensor
    splits: tuple[int, int, int, int]
    second: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    output: Tensor


@dataclass(frozen=True)
class MLAWeights:
    """inputs [O, D] of `splits` = (query, R + p, gate or 0) columns; query_norm [q rank] and query
    [H (n + p), q rank], or None; latent_norm [R]; key [H, n, R]; value [H, v, R]; output
    [D, Hv]."""

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
class LayerWeights:
    """One layer; the keys [D] float32 of its two reads of Attention Residuals, or None."""

    mixer: KDAWeights | MLAWeights
    mlp: MLPWeights | ops.MoE
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
        return _nbytes(tensors(self)) - _nbytes([self.embedding, *self._routed()])

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one routed expert of every layer that has some."""
        return _nbytes(x[0] for x in self._routed())

    def _routed(self) -> list[Tensor]:
        experts = (x.mlp.experts for x in self.layers if isinstance(x.mlp, ops.MoE))
        return [x for each in experts for x in tensors(each)]


def tensors(weights: object) -> list[Tensor]:
    """All tensors of one of these records, those of records inside it too."""
    if isinstance(weights, Tensor):
        return [weights]
    if isinstance(weights, tuple):
        return [x for each in weights for x in tensors(each)]
    if not is_dataclass(weights):
        return []
    return [x for each in vars(weights).values() for x in tensors(each)]


def _nbytes(held: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in held)


def pack(model: K3ForCausalLM, *, mxfp4: bool = False) -> StaticWeights:
    """The weights of a model in inference mode, which goes on working and shares them.

    Args:
        mxfp4: Read the routed experts in MXFP4: a copy of a quarter of their size, exact where they
            came from MXFP4. The model keeps its own for prompts.

    Raises:
        ValueError: ``mxfp4`` and an expert's width that is no multiple of 32.
    """
    for module in model.modules():
        if isinstance(module, Packable) and module.packed is None:
            module.pack_()
    base = model.model
    read = base.config.attn_res_block_size is not None
    with torch.no_grad():
        return StaticWeights(
            embedding=base.embed_tokens.weight.detach(),
            layers=tuple(_layer(layer, base.config, mxfp4) for layer in base.decoder_layers),
            norm=base.norm.weight.detach(),
            key=_key(base.output_attn_res_norm, base.output_attn_res_proj) if read else None,
            head=model.lm_head.weight.detach(),
        )


def _layer(layer: DecoderLayer, config: K3Config, mxfp4: bool) -> LayerWeights:
    mixer, read = layer.self_attn, config.attn_res_block_size is not None
    return LayerWeights(
        mixer=_mla(mixer) if isinstance(mixer, MLA) else _kda(mixer),
        mlp=_moe(layer.block_sparse_moe, config, mxfp4) if layer.moe else _mlp(layer.mlp),
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
    factors = [mixer.f_b_proj] if full else [mixer.g_b_proj, mixer.f_b_proj]
    second = torch.stack([factor.weight.detach() for factor in factors])
    for factor, weight in zip(factors, second, strict=True):
        factor.weight.data = weight
    return KDAWeights(
        inputs=_packed(mixer),
        splits=(3 * width, width if full else mixer.width, mixer.width, mixer.heads),
        second=second,
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


def _moe(moe: LatentMoE, config: K3Config, mxfp4: bool) -> ops.MoE:
    shared = _mlp(moe.shared_experts) if moe.shared else None
    packed = ops.pack_moe(
        moe.gate.weight.detach(),
        moe.gate.e_score_correction_bias.detach().float(),
        _experts(moe.experts, mxfp4),
        down=moe.routed_expert_down_proj.weight.detach() if moe.latent else None,
        up=moe.routed_expert_up_proj.weight.detach() if moe.latent else None,
        shared_gate_up=None if shared is None else shared.gate_up,
        shared_down=None if shared is None else shared.down,
        norm=moe.routed_expert_norm.weight.detach() if moe.normed else None,
        norm_eps=config.rms_norm_eps,
        top_k=config.num_experts_per_token,
        renormalise=config.moe_renormalize,
        scaling=config.routed_scaling_factor,
        situ=situ_betas(config),
    )
    _share(moe, packed)
    return packed


def situ_betas(config: K3Config) -> tuple[float, float] | None:
    """Betas of SiTU; None: SiLU."""
    return (config.situ_beta, config.situ_linear_beta) if config.hidden_act == "situ" else None


def _experts(experts: Experts, mxfp4: bool) -> ops.Experts:
    if experts.w2.stride(-1) != 1:  # `Experts.pack_` is for a CPU
        experts.w2.data = experts.w2.data.contiguous()
    w1, w3, w2 = experts.w1.detach(), experts.w3.detach(), experts.w2.detach()
    if not mxfp4:
        return ops.Experts(w1, w3, w2)
    (c1, s1), (c3, s3), (c2, s2) = quantise(w1), quantise(w3), quantise(w2)
    return ops.Experts(c1, c3, c2, (s1, s3, s2))


def _share(moe: LatentMoE, packed: ops.MoE) -> None:
    """Point the layer's own small matrices at the packed ones."""
    experts, width = packed.experts.count, packed.experts.width
    moe.gate.weight.data = packed.inputs[:experts]
    if moe.latent:
        assert packed.outputs is not None
        moe.routed_expert_down_proj.weight.data = packed.inputs[experts : experts + width]
        moe.routed_expert_up_proj.weight.data = packed.outputs[:, :width]
    if moe.shared:
        assert packed.outputs is not None
        moe.shared_experts.hold_packed(packed.inputs[-2 * packed.shared :])
        moe.shared_experts.down_proj.weight.data = packed.outputs[:, -packed.shared :]
