"""Configuration of Kimi K3's text decoder and of plain Kimi-Linear, as published.

The published file nests the text model under ``text_config`` (model_type ``kimi_k3``), lists layers
1-based, and hides the KDA sizes in ``linear_attn_config``. Everything here is 0-based and explicit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from dspark.errors import UserError
from dspark.k3.mxfp4 import quantization_block


@dataclass(frozen=True)
class K3Config:
    """Sizes and switches of the decoder. All layer ids are 0-based.

    Raises:
        UserError: a size that does not fit another one, with both values.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    full_attention_layers: tuple[int, ...]
    """Layers with MLA; every other layer is KDA."""

    num_attention_heads: int
    intermediate_size: int
    """Width of the dense MLP of the first ``first_k_dense_replace`` layers."""
    kda_num_heads: int
    kda_head_dim: int
    kda_conv_size: int = 4
    kda_gate_lower_bound: float | None = -5.0
    """None: the unbounded softplus gate of Kimi-Linear."""
    kda_full_rank_output_gate: bool = True

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    """Width of the key part that all heads share. It is never rotated (NoPE)."""
    v_head_dim: int = 128
    mla_output_gate: bool = True

    first_k_dense_replace: int = 1
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    routed_expert_hidden_size: int | None = None
    """Width of the latent space of the routed experts; None: they read the full hidden state."""
    latent_moe_norm: bool = True
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0

    hidden_act: str = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    attn_res_block_size: int | None = 12
    """Layers per Attention Residuals block; None: the ordinary residual stream."""
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1_048_576
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    expert_quantization: str | None = None
    """None or ``mxfp4``: how the routed experts are stored in the checkpoint."""

    def __post_init__(self) -> None:
        bad = [i for i in self.full_attention_layers if not 0 <= i < self.num_hidden_layers]
        if bad:
            raise UserError(
                f"full-attention layers {bad} lie outside 0..{self.num_hidden_layers - 1}"
            )
        if self.hidden_act not in ("situ", "silu"):
            raise UserError(
                f"hidden_act {self.hidden_act!r} is not supported; expected situ or silu"
            )
        if self.num_experts and not 0 < self.num_experts_per_token <= self.num_experts:
            raise UserError(
                f"num_experts_per_token is {self.num_experts_per_token}; "
                f"expected 1..{self.num_experts}"
            )

    @property
    def model_type(self) -> str:
        return "kimi_linear" if self.attn_res_block_size is None else "kimi_k3"

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert."""
        return self.routed_expert_hidden_size or self.hidden_size

    def is_full_attention(self, layer: int) -> bool:
        return layer in self.full_attention_layers

    def is_moe(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.first_k_dense_replace

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> K3Config:
        """Read a published ``config.json``: nested ``kimi_k3``, or plain ``kimi_linear``.

        Raises:
            UserError: another model type, a missing key, or a feature this decoder does not have.
        """
        kind = config.get("model_type")
        if kind not in ("kimi_k3", "kimi_linear"):
            raise UserError(f"config.json: model_type is {kind!r}; expected kimi_k3 or kimi_linear")
        text = {**config, **_section(config, "text_config")} if "text_config" in config else config
        _refuse_unsupported(text)
        try:
            values = _read_text_config(text)
        except KeyError as missing:
            raise UserError(f"config.json: the key {missing} is missing") from None
        required = [f.name for f in fields(cls) if f.default is MISSING]
        absent = [name for name in required if name not in values]
        if absent:
            raise UserError(f"config.json: missing sizes: {', '.join(absent)}")
        _check_types(values)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The published layout; ``from_dict(c.to_dict()) == c``."""
        text = _write_text_config(self)
        top = {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "tie_word_embeddings": self.tie_word_embeddings,
            "dtype": "bfloat16",
        }
        if self.model_type == "kimi_linear":
            return {**text, **top, "architectures": ["KimiLinearForCausalLM"]}
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            **top,
            "text_config": {**text, "architectures": ["KimiLinearForCausalLM"]},
        }


# published key -> field, where only the name differs
_RENAMED = {
    "mla_use_output_gate": "mla_output_gate",
    "latent_moe_use_norm": "latent_moe_norm",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
}
_KDA_KEYS = {
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "kda_conv_size",
    "use_full_rank_gate": "kda_full_rank_output_gate",
    "gate_lower_bound": "kda_gate_lower_bound",
}
_DERIVED = {"full_attention_layers", "expert_quantization", *_KDA_KEYS.values(), *_RENAMED.values()}
# what a file of either family means when it leaves a key out
_PLAIN_DEFAULTS: dict[str, Any] = {
    "mla_output_gate": False,
    "latent_moe_norm": False,
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "kda_gate_lower_bound": None,
    "kda_full_rank_output_gate": False,
}


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config[key]
    if not isinstance(section, Mapping):
        raise UserError(f"config.json: {key} is {section!r}; expected an object")
    return section


def _check_types(values: Mapping[str, Any]) -> None:
    """Every scalar has the type of its field; a bool is no number."""
    for field in fields(K3Config):
        wanted, _, optional = str(field.type).partition(" | ")
        value = values.get(field.name, field.default)
        if wanted not in _TYPES or (optional and value is None):
            continue
        if type(value) not in _TYPES[wanted]:
            raise UserError(f"config.json: {field.name} is {value!r}; expected {field.type}")


def _read_text_config(text: Mapping[str, Any]) -> dict[str, Any]:
    linear = _section(text, "linear_attn_config")
    layers = text["num_hidden_layers"]
    if type(layers) is not int:
        raise UserError(f"config.json: num_hidden_layers is {layers!r}; expected int")
    for key in ("full_attn_layers", "kda_layers"):
        if not isinstance(linear[key], list) or any(type(i) is not int for i in linear[key]):
            raise UserError(f"config.json: {key} is {linear[key]!r}; expected a list of layers")
    names = {f.name for f in fields(K3Config)} - _DERIVED
    values = {**_PLAIN_DEFAULTS, **{k: text[k] for k in names if k in text}}
    values |= {ours: text[theirs] for theirs, ours in _RENAMED.items() if theirs in text}
    values |= {ours: linear[theirs] for theirs, ours in _KDA_KEYS.items() if theirs in linear}
    values["full_attention_layers"] = tuple(i - 1 for i in linear["full_attn_layers"])
    listed = sorted([*linear["full_attn_layers"], *linear["kda_layers"]])
    if listed != list(range(1, layers + 1)):
        raise UserError(
            "config.json: full_attn_layers and kda_layers (1-based) must name each of "
            f"1..{layers} once, got {listed}"
        )
    values["expert_quantization"] = _expert_quantization(text.get("quantization_config"))
    return values


def _write_text_config(config: K3Config) -> dict[str, Any]:
    names = {f.name for f in fields(K3Config)} - _DERIVED
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        **{k: getattr(config, k) for k in sorted(names)},
    }
    text |= {theirs: getattr(config, ours) for theirs, ours in _RENAMED.items()}
    text["linear_attn_config"] = {
        theirs: getattr(config, ours) for theirs, ours in _KDA_KEYS.items()
    }
    text["linear_attn_config"] |= {
        "full_attn_layers": [i + 1 for i in config.full_attention_layers],
        "kda_layers": [
            i + 1 for i in range(config.num_hidden_layers) if not config.is_full_attention(i)
        ],
    }
    text |= {
        "num_key_value_heads": config.num_attention_heads,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }
    if config.expert_quantization == "mxfp4":
        text["quantization_config"] = quantization_block()
    return text


def _expert_quantization(block: Mapping[str, Any] | None) -> str | None:
    if block is None:
        return None
    if block.get("format") != "mxfp4-pack-quantized":
        raise UserError(
            f"config.json: quantization format {block.get('format')!r} is not supported; "
            "expected mxfp4-pack-quantized or no quantization_config"
        )
    return "mxfp4"


def _refuse_unsupported(text: Mapping[str, Any]) -> None:
    expected: dict[str, tuple[Any, ...]] = {
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "num_expert_group": (1, None),
        "topk_group": (1, None),
        "moe_layer_freq": (1,),
        "num_nextn_predict_layers": (0, None),
    }
    for key, allowed in expected.items():
        if key in text and text[key] not in allowed:
            raise UserError(
                f"config.json: {key} is {text[key]!r}; this decoder supports {allowed[0]!r} only"
            )
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UserError(
            f"config.json: num_key_value_heads is {kv_heads}; MLA needs {heads} (one per head)"
        )
