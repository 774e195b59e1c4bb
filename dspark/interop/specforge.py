"""SpecForge's folder, which SGLang loads: class `DSparkDraftModel`, meaning in `dflash_config`.

Layer ids count completed layers from 0. Our own `config.json` of an attention drafter is this
layout with more keys beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.config_file import ARCHITECTURE, config_to_dict
from dspark.interop.qwen3 import engine_rope, read_drafter
from dspark.interop.refusals import (
    require_attention,
    require_free_blocks,
    require_full_vocabulary,
)
from dspark.interop.spec import Format, architectures, no_copies, same_name


def claims(raw: Mapping[str, Any]) -> bool:
    """Its class, in a file that is not speculators', which uses the same name."""
    return ARCHITECTURE in architectures(raw) and "speculators_model_type" not in raw


def write(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration with both the flat and the nested keys."""
    require_attention(config, "SGLang's DSparkDraftModel")
    require_full_vocabulary(config, "SGLang")
    require_free_blocks(config, "SGLang")
    return {
        **config_to_dict(config, dtype=dtype, with_copies=False),
        **engine_rope(config),
    }


FORMAT = Format(
    name="sglang",
    aliases=("specforge",),
    title="SpecForge / SGLang (DSparkDraftModel)",
    claims=claims,
    read=read_drafter,
    write=write,
    their_name=same_name,
    copies=no_copies,
    engines="SGLang 0.5.23, SpecForge 0.3",
)
