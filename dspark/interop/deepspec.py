"""DeepSpec's folder: flat keys, the target's embedding and LM head stored along.

Layer ids count completed layers from 0. There is no key for the slot layout: its code only has the
one in which the anchor predicts. Its drafters attend fully, so windows are not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.config_file import DEEPSPEC_ARCHITECTURE, config_to_dict
from dspark.interop.names import COPIES
from dspark.interop.qwen3 import read_drafter
from dspark.interop.refusals import require_attention, require_full_vocabulary, require_no_window
from dspark.interop.spec import Format, architectures, same_name


def claims(raw: Mapping[str, Any]) -> bool:
    """DeepSpec's class without the block of keys that engines add."""
    return DEEPSPEC_ARCHITECTURE in architectures(raw) and "dflash_config" not in raw


def write(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The flat configuration."""
    require_attention(config, "DeepSpec")
    require_full_vocabulary(config, "DeepSpec's evaluator")
    require_no_window(config, "DeepSpec")
    raw = config_to_dict(config, dtype=dtype, with_copies=True)
    del raw["dflash_config"]
    return {**raw, "num_anchors": 512}


def copies(config: DraftConfig) -> tuple[str, ...]:
    """Its evaluator loads both from the drafter's file."""
    del config
    return COPIES


FORMAT = Format(
    name="deepspec",
    aliases=(),
    title="DeepSpec (Qwen3DSparkModel, flat keys)",
    claims=claims,
    read=read_drafter,
    write=write,
    their_name=same_name,
    copies=copies,
    engines="DeepSpec's evaluator; SGLang 0.5.23 loads it as it is",
)
