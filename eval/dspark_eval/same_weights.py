"""transformers' Kimi-Linear on the weights of one of our decoders, for a comparison at equal bytes.

Everything but the stacked experts and the convolutions is shared, not copied. transformers picks
fla's kernels where that package is installed, and says so nowhere: `peer_kernels` does.
"""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.k3.config import K3Config
from dspark.k3.kda import KDA
from dspark.k3.model import DecoderLayer, K3ForCausalLM
from dspark_eval.transformers_peer import kimi_linear_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def peer_model(model: K3ForCausalLM) -> PreTrainedModel:
    """A ``KimiLinearForCausalLM`` with the weights of a plain Kimi-Linear.

    Raises:
        ValueError: a feature that Kimi-Linear does not have.
    """
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = model.config
    _check(config)
    settings = kimi_linear_settings(config) | {
        "moe_intermediate_size": config.moe_intermediate_size,
        "routed_scaling_factor": config.routed_scaling_factor,
        "moe_renormalize": config.moe_renormalize,
        "rms_norm_eps": config.rms_norm_eps,
    }
    with torch.device("meta"):
        peer = KimiLinearForCausalLM(KimiLinearConfig(**settings))
    weights = {
        "model.embed_tokens.weight": model.model.embed_tokens.weight,
        "model.norm.weight": model.model.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for i, layer in enumerate(model.model.decoder_layers):
        prefix = f"model.layers.{i}."
        weights |= {prefix + name: value for name, value in _layer(layer).items()}
    with torch.no_grad():
        detached = {name: value.detach() for name, value in weights.items()}
        missing = peer.load_state_dict(detached, strict=False, assign=True)
    if missing.missing_keys or missing.unexpected_keys:
        raise ValueError(f"kimi_linear has other names than expected: {missing}")
    return peer.eval().requires_grad_(False)


def peer_kernels() -> str:
    """What transformers runs its KDA layers with."""
    return "fla" if util.find_spec("fla") is not None else "torch"


def _check(config: K3Config) -> None:
    if config.model_type != "kimi_linear" or config.mla_output_gate or config.latent_moe_norm:
        raise ValueError("transformers' kimi_linear has neither Attention Residuals nor gated MLA")
    if config.kda_gate_lower_bound is not None or config.kda_full_rank_output_gate:
        raise ValueError("transformers' kimi_linear has a softplus gate and a low-rank output gate")


def _layer(layer: DecoderLayer) -> dict[str, Tensor]:
    own = dict(layer.named_parameters())
    named: dict[str, Tensor] = {}
    for name, value in own.items():
        part, _, rest = name.partition(".")
        if part == "block_sparse_moe":
            if rest.startswith("experts."):
                continue
            named[f"mlp.{rest}"] = value
        elif part == "self_attn" and rest in ("A_log", "dt_bias"):
            shape = (1, 1, -1, 1) if rest == "A_log" else (-1,)
            named[f"self_attn.forget_gate.{rest}"] = value.view(shape)
        elif rest in ("f_a_proj.weight", "f_b_proj.weight"):
            named[f"self_attn.forget_gate.{rest}"] = value
        elif "conv1d" not in name:
            named[name] = value
    if isinstance(layer.self_attn, KDA):
        mixer = layer.self_attn
        convs = (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d)
        dtype = mixer.q_proj.weight.dtype
        named["self_attn.conv1d.weight"] = torch.cat([c.weight for c in convs]).to(dtype)
    if layer.moe:
        experts = layer.block_sparse_moe.experts
        named["mlp.experts.gate_up_proj"] = torch.cat((experts.w1, experts.w3), dim=1)
        named["mlp.experts.down_proj"] = experts.w2
    return named
