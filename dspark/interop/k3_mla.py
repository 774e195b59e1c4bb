"""The MLA-native K3 drafter: class `K3DSparkModel`, which vLLM and TokenSpeed serve.

`num_target_layers` is the number of taps there and `target_num_hidden_layers` the target's depth.
Layer ids count completed layers from 0. Rotary pairs are interleaved; YaRN's temperature enters the
softmax scale (DeepSeek's rule), so both of its terms have to survive. NeMo's trainer writes another
class, `KimiK3DSparkModel`, the target's own attention without positions and with its output gate:
it is read, and no engine serves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark.draft.config import LAYER_ID_ORIGIN, DraftConfig
from dspark.draft.config_file import config_to_dict
from dspark.draft.shapes import MLAShape
from dspark.interop.keys import Keys
from dspark.interop.known import recognise
from dspark.interop.meaning import Decider
from dspark.interop.qwen3 import engine_rope, finish, layer_ids, refuse_unsupported, sizes, windows
from dspark.interop.refusals import require_full_vocabulary, require_no_window, require_vanilla
from dspark.interop.spec import Format, Given, Reading, Rope, Source, architectures, no_copies

ARCHITECTURE, NEMO = "K3DSparkModel", "KimiK3DSparkModel"
SHAPE = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SITU = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
THEIRS = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}


def claims(raw: Mapping[str, Any]) -> bool:
    """Either class."""
    return bool({ARCHITECTURE, NEMO} & set(architectures(raw)))


def read(source: Source, given: Given) -> Reading:
    """An MLA drafter of either class."""
    keys = Keys(source.raw)
    refuse_unsupported(keys)
    nemo = NEMO in architectures(source.raw)
    fields = _backbone(keys, nemo)
    decider = Decider(keys, given)
    ids = layer_ids(keys, "target_layer_ids", LAYER_ID_ORIGIN)
    fields["target_layer_ids"] = decider.layer_ids(ids, LAYER_ID_ORIGIN)
    shape = fields["mla"]
    decider.known = recognise(
        {**fields, "q_lora_rank": shape.q_lora_rank, "kv_lora_rank": shape.kv_lora_rank}
    )
    fields.update(windows(keys))
    slides = "sliding_attention" in fields.get("layer_types", ())
    fields["block_causal"] = decider.block_causal(slides, None)
    layers = decider.num_target_layers(_depth(keys, nemo, len(ids)))
    # without rotation the base means nothing
    rope = None if shape.rope else Rope(DraftConfig.rope_theta)
    return finish(keys, decider, fields, source.shapes, layers, rope)


def _backbone(keys: Keys, nemo: bool) -> dict[str, Any]:
    """Sizes of the latents and which of K3's own features the attention has."""
    sizes_of = {
        key: keys.need(key, "an integer", hint="multi-head latent attention needs it")
        for key in SHAPE
    }
    rope = not _flag(keys, "mla_use_nope", default=nemo)
    fields = sizes(keys)
    for key, value in SITU.items():
        if keys.take(key, "a number") not in (None, value):
            raise ValueError(f"{key}: only K3's {value} is built here")
    heads = fields["num_attention_heads"]
    if keys.take("num_key_value_heads", "an integer") not in (None, heads):
        raise ValueError(f"num_key_value_heads: MLA has as many as query heads, {heads}")
    width = sizes_of["qk_nope_head_dim"] + sizes_of["qk_rope_head_dim"]
    if keys.take("rope_is_neox_style", "true or false"):
        raise ValueError("rope_is_neox_style: true; the MLA drafter's pairs are interleaved")
    return {
        **fields,
        "backbone": "mla",
        "num_key_value_heads": heads,
        "head_dim": keys.take("head_dim", "an integer") or width + width % 2,
        "mla": MLAShape(
            **sizes_of, rope=rope, output_gate=_flag(keys, "mla_use_output_gate", default=nemo)
        ),
    }


def _flag(keys: Keys, key: str, *, default: bool) -> bool:
    value = keys.take(key, "true or false")
    return default if value is None else bool(value)


def _depth(keys: Keys, nemo: bool, taps: int) -> int | None:
    """Layers of the target; the short key counts taps in one class and layers in the other."""
    short = keys.take("num_target_layers", "an integer")
    if nemo:
        return short
    if short not in (None, taps):
        raise ValueError(
            f"num_target_layers: {short}, but {taps} layers are tapped; in this class the key "
            "counts taps, target_num_hidden_layers the layers"
        )
    return keys.take("target_num_hidden_layers", "an integer")


def write(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration of `K3DSparkModel`."""
    if config.backbone == "kda":
        raise ValueError("backbone 'kda' is served by no engine; run it with dspark")
    if config.mla is None:
        raise ValueError(f"backbone {config.backbone!r}: K3DSparkModel has latent attention (mla)")
    if not config.mla.rope or config.mla.output_gate or config.hidden_act != "silu":
        raise ValueError(
            "attention without positions, an output gate and SiTU are K3's own: K3DSparkModel "
            "rotates, has no gate and runs silu"
        )
    reader = "K3DSparkModel"
    require_full_vocabulary(config, reader)
    require_vanilla(config, reader)
    require_no_window(config, reader)
    raw = config_to_dict(config, dtype=dtype, with_copies=False)
    for key in ("dflash_config", "mla", "backbone", "head_dim", "layer_types", "sliding_window"):
        raw.pop(key)
    shape = {key: getattr(config.mla, key) for key in SHAPE}
    width = config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim
    if config.head_dim != width + width % 2:
        raw["dspark_head_dim"] = config.head_dim  # not read by any engine, kept for us
    return {
        **raw,
        **engine_rope(config),
        "architectures": [ARCHITECTURE],
        "model_type": "k3_dspark",
        **shape,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "target_num_hidden_layers": config.num_target_layers,
        "num_target_layers": len(config.target_layer_ids),
        "pard_token": config.mask_token_id,
    }


def their_name(name: str) -> str:
    """fc, hidden_norm and norm have other names there."""
    for ours, theirs in THEIRS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


FORMAT = Format(
    name="k3-mla",
    aliases=("k3_mla",),
    title="MLA-native K3 (K3DSparkModel)",
    claims=claims,
    read=read,
    write=write,
    their_name=their_name,
    copies=no_copies,
    engines="vLLM builds with K3DSparkForCausalLM, TokenSpeed; SGLang 0.5.23 has no such class",
)
