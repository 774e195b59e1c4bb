"""`config.json` of a drafter folder, between JSON keys and `DraftConfig`.

Reading accepts a key at top level or inside `dflash_config` / `dspark_config`, as SGLang does, and
never fills in what decides between two layouts: those keys must stand in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark import __version__
from dspark.draft.config import DraftConfig, TargetRecord

ARCHITECTURE = "DSparkDraftModel"
"""Class name that SGLang and SpecForge load."""

DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"
"""DeepSpec's class: the same tensors plus copies of the target's embedding and LM head."""

NESTS = ("dflash_config", "dspark_config")

NESTED_KEYS = (
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)

# JSON key -> field of DraftConfig, for everything that is stored as it is.
FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_target_layers": "num_target_layers",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "enable_confidence_head": "enable_confidence_head",
    "confidence_head_with_markov": "confidence_head_with_markov",
    "sample_from_anchor": "sample_from_anchor",
    "target_tap_kind": "target_tap_kind",
    "layer_id_origin": "layer_id_origin",
}

# What the backbone does not do; any other value is refused, an absent key means this value.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
}

HINTS = {
    "sample_from_anchor": "the slot layout is not in the file; true if slot 0 already predicts",
    "target_tap_kind": "what a tap holds is not in the file; ask whoever trained it",
    "layer_id_origin": "where layer ids start is not in the file; ask whoever trained it",
}


def config_to_dict(config: DraftConfig, *, dtype: torch.dtype, with_copies: bool) -> dict[str, Any]:
    """The published keys of a configuration.

    Args:
        config: What to write.
        dtype: Of the stored tensors.
        with_copies: Whether the folder also holds the target's embedding and LM head.
    """
    flat = {key: getattr(config, field) for key, field in FIELDS.items()}
    flat["target_layer_ids"] = list(config.target_layer_ids)
    nest = {key: flat[key] for key in NESTED_KEYS}
    record = config.target
    return {
        "architectures": [DEEPSPEC_ARCHITECTURE if with_copies else ARCHITECTURE],
        "model_type": "qwen3",
        **flat,
        **FIXED,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * config.num_layers,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "dtype": str(dtype).removeprefix("torch."),
        "dflash_config": {"projector_type": "dspark", "attention_mode": "gqa", **nest},
        "dspark_version": __version__,
        "target": None
        if record is None
        else {
            "name": record.name,
            "tokenizer_hash": record.tokenizer_hash,
            "template_hash": record.template_hash,
        },
    }


def config_from_dict(raw: Mapping[str, Any]) -> DraftConfig:
    """Reads the published keys back.

    Raises:
        ValueError: "key: what is wrong", for a missing, contradictory or unsupported key.
    """
    found = _architecture(raw)
    values = {field: _typed(key, _lookup(raw, key)) for key, field in FIELDS.items()}
    for key, wanted in FIXED.items():
        if raw.get(key, wanted) != wanted:
            raise ValueError(f"{key}: {raw[key]!r} is not supported, only {wanted!r} ({found})")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"layer_types: {kinds!r} is not supported, only 'full_attention'")
    return DraftConfig(**values, rope_theta=_rope_theta(raw), target=_record(raw.get("target")))


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    known = (ARCHITECTURE, DEEPSPEC_ARCHITECTURE)
    if not isinstance(names, list) or not any(name in known for name in names):
        raise ValueError(f"architectures: {names!r} is no drafter, expected one of {list(known)}")
    return str(names[0])


def _lookup(raw: Mapping[str, Any], key: str) -> Any:
    """Value of a key at top level or in a nest; all places that have it must agree."""
    places = {"top level": raw, **{nest: raw.get(nest) or {} for nest in NESTS}}
    for place, values in places.items():
        if not isinstance(values, Mapping):
            raise ValueError(f"{place}: {values!r} given, an object was expected")
    found = {place: values[key] for place, values in places.items() if key in values}
    if not found:
        raise ValueError(f"{key}: missing; {HINTS.get(key, 'a drafter needs it')}")
    first = next(iter(found.values()))
    if any(value != first for value in found.values()):
        raise ValueError(f"{key}: {' but '.join(f'{v!r} in {p}' for p, v in found.items())}")
    return first


def _typed(key: str, value: Any) -> Any:
    """The value, if it has the JSON type its key calls for."""
    if key == "target_layer_ids":
        good = isinstance(value, list) and all(_is_int(item) for item in value)
        wanted = "a list of integers"
    elif key in ("markov_head_type", "target_tap_kind", "layer_id_origin"):
        good, wanted = isinstance(value, str), "a string"
    elif key in ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor"):
        good, wanted = isinstance(value, bool), "true or false"
    elif key == "rms_norm_eps":
        good, wanted = isinstance(value, float), "a number"
    else:
        good, wanted = _is_int(value), "an integer"
    if not good:
        raise ValueError(f"{key}: {value!r} given, {wanted} was expected")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies, from today's nested keys or the older flat ones."""
    rope = raw.get("rope_parameters")
    if rope is None:
        scaling = raw.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise ValueError(f"rope_scaling: {scaling!r} given, an object was expected")
        rope = {**scaling, "rope_theta": raw.get("rope_theta")}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind != "default":
        raise ValueError(f"rope_parameters: rope_type {kind!r} is not supported, only 'default'")
    theta = rope.get("rope_theta")
    if not isinstance(theta, int | float) or isinstance(theta, bool):
        raise ValueError(f"rope_parameters: rope_theta is {theta!r}, a number was expected")
    return float(theta)


def _record(raw: Any) -> TargetRecord | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise ValueError("target: an object with the target's name was expected")
    return TargetRecord(raw["name"], raw.get("tokenizer_hash"), raw.get("template_hash"))
