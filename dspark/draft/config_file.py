"""`config.json` of a drafter folder, between JSON keys and `DraftConfig`.

Reading accepts a key at top level or inside `dflash_config` / `dspark_config`, as SGLang does, and
never fills in what decides between two layouts: those keys must stand in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from dspark import __version__
from dspark.draft.config import DraftConfig
from dspark.draft.kinds import registered
from dspark.draft.record import record_from_dict, record_to_dict
from dspark.draft.rope_file import rope_from_dict, rope_to_dict
from dspark.draft.shapes import KDAShape, MLAShape

ARCHITECTURE = "DSparkDraftModel"
"""Class name that SGLang and SpecForge load."""

OWN_ARCHITECTURES = {"mla": "DSparkMLADraftModel", "kda": "DSparkKDADraftModel"}
"""Backbones that have no published class under these tensor names: no engine loads these by
accident. `dspark export --format k3-mla` writes the first as engines know it."""

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
    "sample_from_anchor",
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

# As FIELDS, but a file may leave these out: drafters of older versions have none of them.
OPTIONAL = {
    "backbone": "backbone",
    "hidden_act": "hidden_act",
    "draft_vocab_size": "draft_vocab_size",
    "sliding_window": "sliding_window",
    "layer_types": "layer_types",
    "block_causal": "block_causal",
}

SHAPES = {"mla": MLAShape, "kda": KDAShape}

# What no backbone does; any other value is refused, an absent key means this value.
FIXED = {"attention_bias": False, "tie_word_embeddings": False}

STRINGS = (
    "markov_head_type",
    "target_tap_kind",
    "layer_id_origin",
    "backbone",
    "hidden_act",
    "block_causal",
)
FLAGS = ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")

HINTS = {
    "sample_from_anchor": "the slot layout is not in the file: a drafter of another tool, which "
    "`dspark import --slot-layout` reads",
    "target_tap_kind": "what a tap holds is not in the file: a drafter of another tool, which "
    "`dspark import --tap-kind` reads",
    "layer_id_origin": "where layer ids start is not in the file: a drafter of another tool, which "
    "`dspark import` reads",
}


def config_to_dict(config: DraftConfig, *, dtype: torch.dtype, with_copies: bool) -> dict[str, Any]:
    """The published keys of a configuration.

    Args:
        config: What to write.
        dtype: Of the stored tensors.
        with_copies: Whether the folder also holds the target's embedding and LM head.
    """
    flat = {key: getattr(config, field) for key, field in {**FIELDS, **OPTIONAL}.items()}
    flat["target_layer_ids"] = list(config.target_layer_ids)
    flat["layer_types"] = list(config.layer_types or ["full_attention"] * config.num_layers)
    attention = config.backbone == "attention"
    standard = DEEPSPEC_ARCHITECTURE if with_copies else ARCHITECTURE
    nest = {key: flat[key] for key in NESTED_KEYS}
    return {
        "architectures": [_own_architecture(config.backbone, standard)],
        "model_type": "qwen3" if attention else f"dspark_{config.backbone}",
        **flat,
        **FIXED,
        **{name: asdict(shape) for name in SHAPES if (shape := getattr(config, name))},
        "use_sliding_window": config.sliding_window is not None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_parameters": rope_to_dict(config.rope_theta, config.yarn),
        "dtype": str(dtype).removeprefix("torch."),
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa" if attention else config.backbone,
            # vLLM takes a window without this key to mean causal blocks
            "causal": config.block_causal != "none",
            **nest,
        },
        "dspark_version": __version__,
        "target": record_to_dict(config.target),
    }


def config_from_dict(raw: Mapping[str, Any]) -> DraftConfig:
    """Reads the published keys back.

    Raises:
        ValueError: "key: what is wrong", for a missing, contradictory or unsupported key.
    """
    found = _architecture(raw)
    values = {field: _typed(key, _lookup(raw, key)) for key, field in FIELDS.items()}
    for key, field in OPTIONAL.items():
        if raw.get(key) is not None:
            values[field] = _typed(key, raw[key])
    for key, wanted in FIXED.items():
        if raw.get(key, wanted) != wanted:
            raise ValueError(f"{key}: {raw[key]!r} is not supported, only {wanted!r} ({found})")
    _check_window(raw, values)
    for name, shape in SHAPES.items():
        if raw.get(name) is not None:
            values[name] = _shape(name, raw[name], shape)
    theta, yarn = rope_from_dict(raw)
    record = record_from_dict(raw.get("target"))
    return DraftConfig(**values, rope_theta=theta, yarn=yarn, target=record)


def _check_window(raw: Mapping[str, Any], values: dict[str, Any]) -> None:
    """A window of no layer is refused, and so are kinds of layers that say nothing."""
    kinds = values.get("layer_types", ())
    if raw.get("use_sliding_window") not in (None, "sliding_attention" in kinds):
        raise ValueError(
            f"use_sliding_window: {raw['use_sliding_window']!r} does not agree with layer_types"
        )
    if all(kind == "full_attention" for kind in kinds):
        values.pop("layer_types", None)


def _shape(name: str, raw: Any, shape: type[MLAShape] | type[KDAShape]) -> MLAShape | KDAShape:
    """The sizes of a backbone; every one has to be there, and nothing else."""
    known = {field.name: field for field in fields(shape)}
    if not isinstance(raw, Mapping) or raw.keys() != known.keys():
        raise ValueError(f"{name}: {raw!r} given, an object with {', '.join(known)} was expected")
    for key, value in raw.items():
        kind = known[key].type
        numbers = isinstance(value, int | float) and not isinstance(value, bool)
        good = {
            "int": _is_int(value),
            "float": numbers,
            "bool": isinstance(value, bool),
            "int | str": _is_int(value) or isinstance(value, str),
        }
        if not good[str(kind)]:
            raise ValueError(f"{name}.{key}: {value!r} given, {kind} was expected")
    return shape(**raw)


def _own_architecture(backbone: str, standard: str) -> str:
    """Serving engines must not take for theirs what only dspark runs."""
    if registered(backbone) is not None:
        return f"DSpark_{backbone}_DraftModel"
    return OWN_ARCHITECTURES.get(backbone, standard)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    backbone = raw.get("backbone") or "attention"
    known = [_own_architecture(str(backbone), ARCHITECTURE)]
    if backbone == "attention":
        known.append(DEEPSPEC_ARCHITECTURE)
    if not isinstance(names, list) or not any(name in known for name in names):
        raise ValueError(
            f"architectures: {names!r} is no drafter with backbone {backbone!r}, expected one of "
            f"{known}; a drafter of another tool is read by `dspark import`"
        )
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
    elif key == "layer_types":
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
        wanted = "a list of strings"
    elif key in STRINGS:
        good, wanted = isinstance(value, str), "a string"
    elif key in FLAGS:
        good, wanted = isinstance(value, bool), "true or false"
    elif key == "rms_norm_eps":
        good, wanted = isinstance(value, float), "a fraction such as 1e-05"
    else:
        good, wanted = _is_int(value), "an integer"
    if not good:
        raise ValueError(f"{key}: {value!r} given, {wanted} was expected")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
