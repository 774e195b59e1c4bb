"""ModelOpt's folder: class `DFlashDraftModel`, projector `dspark`, the heads' tensors flat.

`shift_label` true is the slot layout in which the anchor predicts. Its sinks are not built here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.config_file import config_to_dict
from dspark.interop.qwen3 import engine_rope, read_drafter
from dspark.interop.refusals import require_attention, require_full_vocabulary
from dspark.interop.spec import Format, architectures, no_copies

ARCHITECTURE = "DFlashDraftModel"


def claims(raw: Mapping[str, Any]) -> bool:
    """Its class; whether it is a DSpark drafter shows in `projector_type`."""
    return ARCHITECTURE in architectures(raw) and "speculators_model_type" not in raw


def write(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration with ModelOpt's spellings in `dflash_config`."""
    require_attention(config, "ModelOpt")
    require_full_vocabulary(config, "ModelOpt")
    if config.block_causal == "sliding":
        every = all(config.window(layer) for layer in range(config.num_layers))
        if not every:
            raise ValueError("block_causal 'sliding': ModelOpt has one choice for all layers")
    raw = config_to_dict(config, dtype=dtype, with_copies=False)
    nest = raw.pop("dflash_config")
    nest["use_confidence_head"] = nest.pop("enable_confidence_head")
    return {
        **raw,
        **engine_rope(config),
        "architectures": [ARCHITECTURE],
        "dflash_config": {
            **nest,
            "shift_label": config.sample_from_anchor,
            "use_swa": config.sliding_window is not None,
            "swa_window_size": config.sliding_window,
            "attention_sink_bias": False,
        },
    }


def their_name(name: str) -> str:
    """The heads without their module: markov_w1.weight, confidence_proj.weight."""
    if name.startswith("confidence_head.proj."):
        return "confidence_proj." + name.removeprefix("confidence_head.proj.")
    return name.removeprefix("markov_head.")


FORMAT = Format(
    name="modelopt",
    aliases=(),
    title="NVIDIA ModelOpt (DFlashDraftModel, projector dspark)",
    claims=claims,
    read=read_drafter,
    write=write,
    their_name=their_name,
    copies=no_copies,
    engines="ModelOpt 0.47",
)
