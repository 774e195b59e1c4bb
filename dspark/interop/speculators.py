"""The folder of vLLM's speculators: the backbone's keys nested, layer ids counted with embeddings.

`aux_hidden_state_layer_ids` index Hugging Face's hidden states, where 0 is the embedding: completed
layer + 1. Sliding layers have causal blocks unless `sliding_window_non_causal`. A reduced
vocabulary stores its rows of the LM head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.config_file import config_to_dict
from dspark.interop.meaning import HIDDEN_STATES
from dspark.interop.qwen3 import read_drafter
from dspark.interop.refusals import require_attention
from dspark.interop.spec import Format, Given, Reading, Source, reduced_head, same_name

VERSION = "0.9.0"
NEST = "transformer_layer_config"
IDS = "aux_hidden_state_layer_ids"

BACKBONE_KEYS = (
    "attention_bias",
    "attention_dropout",
    "dtype",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
    "vocab_size",
)


def claims(raw: Mapping[str, Any]) -> bool:
    """Any file that says it is speculators'."""
    return "speculators_model_type" in raw


def read(source: Source, given: Given) -> Reading:
    """A `dspark` speculator; other algorithms are other kinds of drafters."""
    kind = source.raw.get("speculators_model_type")
    if kind != "dspark":
        raise ValueError(f"speculators_model_type: {kind!r} is another kind of drafter than dspark")
    if not isinstance(source.raw.get(NEST), Mapping):
        raise ValueError(f"{NEST}: missing; an object with the backbone's sizes was expected")
    return read_drafter(source, given, ids=IDS, origin=HIDDEN_STATES, causal_default="sliding")


def write(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The nested configuration."""
    require_attention(config, "speculators")
    sliding = "all" if config.block_causal == "all" else "sliding"
    if sliding == "all" and not all(config.window(i) for i in range(config.num_layers)):
        raise ValueError("block_causal 'all': in speculators only layers with a window are causal")
    flat = config_to_dict(config, dtype=dtype, with_copies=False)
    flat.pop("dflash_config")
    nest = {key: flat.pop(key) for key in BACKBONE_KEYS if key in flat}
    name = config.target.name if config.target else None
    proposals = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    flat.pop("target_layer_ids")
    return {
        **flat,
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": VERSION,
        IDS: [layer + 1 for layer in config.target_layer_ids],
        "layer_id_origin": HIDDEN_STATES,
        "draft_vocab_size": config.draft_vocab,
        "sliding_window_non_causal": config.block_causal == "none",
        "target_hidden_size": None,
        NEST: nest,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposals],
            "verifier": {"name_or_path": name, "architectures": []},
        },
    }


FORMAT = Format(
    name="speculators",
    aliases=(),
    title="vLLM speculators (DSparkDraftModel, nested keys)",
    claims=claims,
    read=read,
    write=write,
    their_name=same_name,
    copies=reduced_head,
    engines="speculators 0.9.0; vLLM through its converter (vanilla head only)",
)
