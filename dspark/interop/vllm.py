"""The folder that vLLM's `Qwen3DSparkForCausalLM` loads without its speculators converter.

`dflash_config.target_layer_ids` count completed layers from 0; `eagle_aux_hidden_state_layer_ids`
beside them are those plus one, the boundary before the next layer, which is what vLLM captures.
The mask id is also `pard_token`, where older builds look. A window without `dflash_config.causal`
means causal blocks there, so the key is always written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.config_file import DEEPSPEC_ARCHITECTURE, config_to_dict
from dspark.interop.qwen3 import engine_rope, read_drafter
from dspark.interop.refusals import require_attention, require_vanilla
from dspark.interop.spec import Format, architectures, reduced_head, same_name

ARCHITECTURES = (DEEPSPEC_ARCHITECTURE, "Qwen3DSparkForCausalLM")


def claims(raw: Mapping[str, Any]) -> bool:
    """Its class together with the block of keys that engines read."""
    names = architectures(raw)
    return ARCHITECTURES[1] in names or (ARCHITECTURES[0] in names and "dflash_config" in raw)


def write(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration as vLLM's own converter would leave it, with our keys beside it."""
    require_attention(config, "vLLM's Qwen3DSparkForCausalLM")
    require_vanilla(config, "vLLM")
    raw = config_to_dict(config, dtype=dtype, with_copies=False)
    if config.block_causal == "sliding":
        del raw["dflash_config"]["causal"]  # by layer then, as layer_types says
    return {
        **raw,
        **engine_rope(config),
        "architectures": [DEEPSPEC_ARCHITECTURE],
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "pard_token": config.mask_token_id,
        "dspark_bonus_anchor": not config.sample_from_anchor,
        "sliding_window_non_causal": config.block_causal == "none",
    }


FORMAT = Format(
    name="vllm",
    aliases=(),
    title="vLLM (Qwen3DSparkModel with dflash_config)",
    claims=claims,
    read=read_drafter,
    write=write,
    their_name=same_name,
    copies=reduced_head,
    engines="vLLM builds with Qwen3DSparkForCausalLM (read at commit 0302ff4), method dspark",
)
