"""NVIDIA NeMo's Kimi K3 text model on a CPU: the independent implementation of the whole decoder.

NeMo takes its KDA pieces from fla, whose kernels need a GPU. Here they are plain torch: the causal
depthwise convolution and the gated norm written out, the recurrence from fla's own naive file.
Weights always arrive through NeMo's checkpoint adapter, so its reading of the published tensor
names is part of what is compared.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.files import read_json
from tests.oracles import fla_naive, require


class ShortConvolution(nn.Module):
    """fla.modules.ShortConvolution without bias: depthwise, causal, then SiLU."""

    def __init__(
        self, hidden_size: int, kernel_size: int, activation: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert activation == "silu"
        self.weight = nn.Parameter(torch.zeros(hidden_size, 1, kernel_size, dtype=dtype))

    def forward(self, x: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        channels, _, width = self.weight.shape
        padded = F.pad(x.transpose(1, 2).to(self.weight.dtype), (width - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=channels)).transpose(1, 2), None


class FusedRMSNormGated(nn.Module):
    """fla.modules.FusedRMSNormGated: norm, weight, times sigmoid of the gate."""

    def __init__(self, hidden_size: int, eps: float, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        assert activation == "sigmoid"
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * self.weight * torch.sigmoid(gate.float())


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_unused: Any
) -> tuple[Tensor, None]:
    """fla.ops.kda.chunk_kda with the L2 norm inside, through fla's naive recurrence."""
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return fla_naive().naive_recurrent_kda(q, k, v, g, beta)[0], None


@cache
def modules() -> tuple[ModuleType, ModuleType]:
    """NeMo's (model, config) modules, the fla pieces replaced."""
    package = "nemo_automodel.components.models.kimi_k3"
    model, config = require(f"{package}.model"), require(f"{package}.config")
    for ours in (ShortConvolution, FusedRMSNormGated, chunk_kda):
        setattr(model, ours.__name__, ours)
    for flag in ("_SHORT_CONV_OK", "_FUSED_RMSNORM_GATED_OK", "_CHUNK_KDA_OK"):
        setattr(model, flag, True)
    for flag in ("_RECURRENT_KDA_OK", "_KDA_GATE_OK"):  # checked, never called
        setattr(model, flag, True)
    return model, config


def from_checkpoint(folder: Path) -> nn.Module:
    """NeMo's float32 model with the weights of a published-layout ``folder``."""
    model_module, config_module = modules()
    common = require("nemo_automodel.components.models.common")
    published = read_json(folder / "config.json")
    text = {**published["text_config"], "kda_use_fused_gate": False}
    text.pop("quantization_config", None)
    text |= {"pad_token_id": 0, "dtype": torch.float32}
    backend = common.BackendConfig(
        attn="eager", linear="torch", rms_norm="torch", experts="torch", dispatcher="torch"
    )
    model = model_module.KimiK3ForCausalLM(config_module.KimiK3TextConfig(**text), backend=backend)
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    model.load_state_dict(model.state_dict_adapter.from_hf(stored), strict=True)
    return model.float().eval()


@torch.no_grad()
def hidden_and_logits(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Post-norm last hidden state [B, T, D] and logits [B, T, V] of full rows of tokens."""
    hidden = model.model(tokens)
    return hidden, model.lm_head(hidden)
