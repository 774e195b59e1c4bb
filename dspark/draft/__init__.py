"""The drafter: configuration, backbone, heads, context, training blocks and checkpoint."""

from __future__ import annotations

from dspark.draft.anchors import Anchors, Blocks, block_inputs, blocks, sample_anchors
from dspark.draft.config import DraftConfig, default_tap_ids
from dspark.draft.context import DraftContext
from dspark.draft.model import DSparkDrafter
from dspark.draft.record import TargetRecord

__all__ = [
    "Anchors",
    "Blocks",
    "DSparkDrafter",
    "DraftConfig",
    "DraftContext",
    "TargetRecord",
    "block_inputs",
    "blocks",
    "default_tap_ids",
    "sample_anchors",
]
