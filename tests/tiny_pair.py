"""A tiny random K3 and a tiny random drafter on disk, as `dspark bench` and `eval` open them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dspark.draft.checkpoint import save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.record import TargetRecord
from dspark.k3.checkpoint import save_k3
from tests import chat_tokenizers
from tests.k3_tiny import TINY, tiny_model

BLOCK_SIZE = 4


@dataclass(frozen=True)
class TinyPair:
    """Folders of target and drafter, and a prompt file with three rows, one with an answer."""

    target: Path
    draft: Path
    prompts: Path


def write_pair(
    folder: Path, *, dtype: torch.dtype = torch.float32, trained_on: TargetRecord | None = None
) -> TinyPair:
    """Write all three. The drafter knows nothing, so nearly every proposal is rejected."""
    target, draft, prompts = folder / "target", folder / "draft", folder / "prompts.jsonl"
    tokenizer = chat_tokenizers.k3()
    config = replace(
        TINY,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.convert_tokens_to_ids("[BOS]"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|end_of_msg|>"),
    )
    save_k3(target, tiny_model(config))
    tokenizer.save_pretrained(target)
    torch.manual_seed(0)
    drafter = DSparkDrafter(
        DraftConfig(
            hidden_size=config.hidden_size,
            num_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=48,
            vocab_size=config.vocab_size,
            num_target_layers=config.num_hidden_layers,
            target_layer_ids=(1, 3),
            target_tap_kind="attn_res_mixture",
            mask_token_id=0,
            block_size=BLOCK_SIZE,
            markov_rank=8,
            target=trained_on,
        )
    )
    save_drafter(draft, drafter, dtype=dtype)
    rows = [
        {"prompt": "What is 3 + 4?", "answer": "7"},
        {"turns": ["What is the total number of apples?"]},
        {"messages": [{"role": "user", "content": "Let me think step by step."}]},
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return TinyPair(target, draft, prompts)
