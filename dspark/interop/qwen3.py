"""The shared part of the layouts with a Qwen3-style backbone: all but one of them.

They differ in where keys stand, in the origin of layer ids and in names of the heads' tensors;
keys of the backbone are those of Hugging Face's Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.draft.config import LAYER_ID_ORIGIN, DraftConfig
from dspark.draft.record import TargetRecord, record_from_dict
from dspark.draft.rope_file import rope_to_dict
from dspark.draft.shapes import ATTENTION_KINDS
from dspark.interop.keys import Keys
from dspark.interop.known import recognise
from dspark.interop.meaning import Decider
from dspark.interop.spec import Given, Reading, Rope, Source

# What is not built here, whatever layout asks for it: key -> the only value that is.
UNSUPPORTED: dict[str, tuple[str, Any, str]] = {
    "attention_bias": ("true or false", False, "biases in attention"),
    "mlp_bias": ("true or false", False, "biases in the MLP"),
    "attention_sink_bias": ("true or false", False, "attention sinks"),
    "log_snr_conditioning": ("true or false", False, "noise conditioning"),
    "enable_qwen35_gated_q_proj": ("true or false", False, "a gate on queries"),
    "partial_rotary_factor": ("a number", 1.0, "rotating a part of the channels"),
    "logit_scale": ("a number", 1.0, "scaled logits"),
    "final_logit_softcapping": ("a number", None, "soft-capped logits"),
    "draft_adapter_rank": ("an integer", 0, "an adapter before the LM head"),
}
HEADS = "markov_head."
ATTENTION_MODES = ("gqa", "mha")


def read_drafter(
    source: Source,
    given: Given,
    *,
    ids: str = "target_layer_ids",
    origin: str = LAYER_ID_ORIGIN,
    causal_default: str | None = None,
) -> Reading:
    """A drafter with a Qwen3-style backbone.

    Args:
        source: Configuration and shapes.
        given: Statements of the user.
        ids: Key of the layer ids.
        origin: What they count from.
        causal_default: See `Decider.block_causal`.

    Raises:
        ValueError: "key: what is wrong and what to give".
    """
    keys = Keys(source.raw)
    refuse_unsupported(keys)
    if keys.take("rope_is_neox_style", "true or false") is False:
        raise ValueError("rope_is_neox_style: false, interleaved rotary pairs, is not built here")
    fields = backbone(keys, source.shapes)
    decider = Decider(keys, given)
    fields["target_layer_ids"] = decider.layer_ids(layer_ids(keys, ids, origin), origin)
    decider.known = recognise(fields)
    fields.update(windows(keys))
    slides = "sliding_attention" in fields.get("layer_types", ())
    fields["block_causal"] = decider.block_causal(slides, causal_default)
    layers = keys.take("num_target_layers", "an integer")
    return finish(keys, decider, fields, source.shapes, decider.num_target_layers(layers))


def finish(
    keys: Keys,
    decider: Decider,
    fields: dict[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    num_target_layers: int,
    rope: Rope | None = None,
) -> Reading:
    """Heads and meaning, which all layouts have, and the configuration itself."""
    width = fields["hidden_size"]
    if keys.take("target_hidden_size", "an integer") not in (None, width):
        raise ValueError(f"target_hidden_size: a drafter is as wide as its target, {width}")
    fields.update(heads(keys, shapes, width))
    rope = rope or decider.rope()
    decider.check_slots()
    config = DraftConfig(
        **fields,
        num_target_layers=num_target_layers,
        rope_theta=rope.theta,
        yarn=rope.yarn,
        block_size=decider.block_size(),
        mask_token_id=decider.mask_token_id(),
        target_tap_kind=decider.tap_kind(),
        draft_vocab_size=keys.take("draft_vocab_size", "an integer"),
        target=_record(keys),
    )
    known = decider.known.name if decider.known else None
    return Reading(config, tuple(decider.reasons), known, keys.rest())


def refuse_unsupported(keys: Keys) -> None:
    """Raises ValueError for a feature that would be lost."""
    keys.take("tie_word_embeddings", "true or false")
    for key, (kind, allowed, what) in UNSUPPORTED.items():
        value = keys.take(key, kind)
        if value not in (None, allowed):
            raise ValueError(f"{key}: {value!r}: {what} is not built here")


def backbone(keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Sizes of a Qwen3-style backbone; `head_dim` may also be read off the norm of the queries."""
    hint = "the backbone needs it"
    norm = shapes.get("layers.0.self_attn.q_norm.weight", (None,))
    own = keys.take("backbone", "a string")
    if own not in (None, "attention"):
        raise ValueError(f"backbone: {own!r}: this layout only has 'attention'")
    head_dim = keys.take("head_dim", "an integer")
    return {
        **sizes(keys),
        "num_key_value_heads": keys.need("num_key_value_heads", "an integer", hint=hint),
        "head_dim": head_dim if head_dim is not None else norm[0] or 0,
    }


def sizes(keys: Keys) -> dict[str, Any]:
    """Sizes that every backbone has."""
    hint = "the backbone needs it"
    return {
        "hidden_size": keys.need("hidden_size", "an integer", hint=hint),
        "num_layers": keys.need("num_hidden_layers", "an integer", hint=hint),
        "num_attention_heads": keys.need("num_attention_heads", "an integer", hint=hint),
        "intermediate_size": keys.need("intermediate_size", "an integer", hint=hint),
        "vocab_size": keys.need("vocab_size", "an integer", hint=hint),
        "rms_norm_eps": float(keys.need("rms_norm_eps", "a number", hint=hint)),
        "max_position_embeddings": keys.need("max_position_embeddings", "an integer", hint=hint),
        "hidden_act": _default(keys.take("hidden_act", "a string"), "silu"),
    }


def windows(keys: Keys) -> dict[str, Any]:
    """Sliding layers. Nothing for a drafter without any, whatever size its file carries along."""
    kinds = keys.take("layer_types", "a list")
    flags = (
        keys.take("use_sliding_window", "true or false"),
        keys.take("use_swa", "true or false"),
    )
    if kinds is None:
        if True in flags:
            raise ValueError("layer_types: missing, and some layers have a window: which ones?")
        return {}
    if any(kind not in ATTENTION_KINDS for kind in kinds):
        raise ValueError(f"layer_types: {kinds!r}, expected {' or '.join(ATTENTION_KINDS)} each")
    if "sliding_attention" not in kinds:
        if True in flags:
            raise ValueError("layer_types: no sliding_attention, but use_sliding_window is true")
        return {}
    if False in flags:
        raise ValueError("layer_types: has sliding_attention, but use_sliding_window is false")
    window = keys.need(
        "sliding_window", "an integer", "swa_window_size", hint="layer_types has sliding_attention"
    )
    return {"layer_types": tuple(kinds), "sliding_window": window}


def heads(keys: Keys, shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> dict[str, Any]:
    """Sequential and confidence head. What the keys leave open the tensors tell."""
    projector = keys.take("projector_type", "a string")
    rank = keys.take("markov_rank", "an integer")
    w1 = shapes.get(f"{HEADS}markov_w1.weight")
    rank = _default(rank, (w1 or (0, 0))[-1])
    if projector not in (None, "dspark") or not rank:
        raise ValueError(
            f"markov_rank: {rank}, projector_type {projector!r}: a plain DFlash drafter has no "
            "sequential head, and is another kind of drafter; train one with a head"
        )
    confidence = shapes.get("confidence_head.proj.weight")
    enabled = keys.take("enable_confidence_head", "true or false", "use_confidence_head")
    if enabled and confidence is None:
        raise ValueError(
            "enable_confidence_head: true, but there is no confidence_head.proj.weight"
        )
    if enabled is False and confidence is not None:
        raise ValueError("enable_confidence_head: false, but confidence_head.proj.weight is there")
    with_markov = keys.take("confidence_head_with_markov", "true or false")
    if with_markov is None:
        with_markov = confidence is None or confidence[-1] != hidden_size
    mode = keys.take("attention_mode", "a string")
    if mode not in (None, *ATTENTION_MODES):
        raise ValueError(f"attention_mode: {mode!r}, expected {' or '.join(ATTENTION_MODES)}")
    return {
        "markov_rank": rank,
        "markov_head_type": _default(keys.take("markov_head_type", "a string"), _head_type(shapes)),
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": with_markov,
    }


def layer_ids(keys: Keys, key: str, origin: str) -> list[Any]:
    """The tapped layers as the file has them; ids of the other origin beside them must agree."""
    own = keys.need(key, "a list", hint="which layers of the target are tapped?")
    shift = 1 if origin == LAYER_ID_ORIGIN else 0
    beside = keys.take("eagle_aux_hidden_state_layer_ids", "a list")
    if beside is not None and beside != [item + shift for item in own]:
        raise ValueError(
            f"{key}: {own} does not agree with eagle_aux_hidden_state_layer_ids {beside}"
        )
    return own


def engine_rope(config: DraftConfig) -> dict[str, Any]:
    """Rotary positions for engines of any age: nested, and flat where older loaders look."""
    nested = rope_to_dict(config.rope_theta, config.yarn)
    if config.yarn is None:
        return {"rope_parameters": nested, "rope_theta": config.rope_theta}
    scaling = {key: value for key, value in nested.items() if key != "rope_theta"}
    return {
        "rope_parameters": nested,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }


def _default(value: Any, default: Any) -> Any:
    """A value that stands there counts, even an empty one."""
    return default if value is None else value


def _head_type(shapes: Mapping[str, tuple[int, ...]]) -> str:
    for part, kind in (("gate_proj", "gated"), ("joint_proj", "rnn")):
        if f"{HEADS}{part}.weight" in shapes:
            return kind
    return "vanilla"


def _record(keys: Keys) -> TargetRecord | None:
    """Our own note of the target, or the verifier that speculators names."""
    own = record_from_dict(keys.take("target", "an object"))
    spec = keys.raw.get("speculators_config")
    verifier = spec.get("verifier") if isinstance(spec, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if own is None and isinstance(name, str):
        return TargetRecord(name)
    return own
