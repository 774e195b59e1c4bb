"""Drafters of every shape and folders of other engines, for the tests of the exchange layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspark.draft.checkpoint import TargetCopies
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.draft.record import TargetRecord
from dspark.draft.shapes import KDAShape, MLAShape, Yarn
from dspark.interop.formats import FORMATS
from dspark.interop.spec import Given, TargetFacts

PLAIN = DraftConfig(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=24,
    vocab_size=50,
    num_target_layers=6,
    target_layer_ids=(1, 3),
    target_tap_kind="attn_res_mixture",
    mask_token_id=49,
    block_size=4,
    markov_rank=6,
    rms_norm_eps=1e-6,
    rope_theta=5000.0,
    target=TargetRecord("nano", tokenizer_hash="ab12", template_hash="cd34"),
)
MLA = replace(
    PLAIN,
    backbone="mla",
    num_key_value_heads=4,
    head_dim=6,
    mla=MLAShape(5, 7, 4, 2, 3),
    yarn=Yarn(32.0, 16, mscale=1.0, mscale_all_dim=1.0),
)
SLIDING = {"sliding_window": 5, "layer_types": ("sliding_attention",) * 2}
MIXED = {"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")}
VARIANTS: dict[str, DraftConfig] = {
    "plain": PLAIN,
    "gated": replace(PLAIN, markov_head_type="gated", confidence_head_with_markov=False),
    "rnn": replace(PLAIN, markov_head_type="rnn", enable_confidence_head=False),
    "yarn": replace(PLAIN, yarn=Yarn(16.0, 64, attention_factor=1.5)),
    "mscale": replace(PLAIN, yarn=Yarn(16.0, 64, mscale=1.0, mscale_all_dim=0.5)),
    "window": replace(PLAIN, **SLIDING),
    "mixed": replace(PLAIN, **MIXED),
    "causal windows": replace(PLAIN, **MIXED, block_causal="sliding"),
    "causal": replace(PLAIN, **SLIDING, block_causal="sliding"),
    "all causal": replace(PLAIN, block_causal="all"),
    "reduced": replace(PLAIN, draft_vocab_size=20),
    "no record": replace(PLAIN, target=None, target_tap_kind="residual"),
    "mla": MLA,
    "kda": replace(PLAIN, backbone="kda", num_key_value_heads=4, kda=KDAShape(gate_rank=4)),
    "nope": replace(MLA, yarn=None, mla=MLAShape(5, 7, 4, 2, 3, rope=False, output_gate=True)),
    "situ": replace(PLAIN, hidden_act="situ"),
}
NAMES = [found.name for found in FORMATS]


def drafter(config: DraftConfig, seed: int = 0) -> DSparkDrafter:
    """Random weights, norms and biases too, so that no two tensors can be mixed up."""
    torch.manual_seed(seed)
    made = DSparkDrafter(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if config.draft_vocab_size is not None:
        made.set_draft_ids(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort()[0])
    return made


def tables(seed: int = 7) -> TargetCopies:
    generator = torch.Generator().manual_seed(seed)
    embed, head = torch.randn(2, 50, 16, generator=generator)
    return TargetCopies(embed, head)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def raw_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_tensors(left: Path, right: Path) -> None:
    ours, theirs = stored(left), stored(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def published(**changes: Any) -> dict[str, Any]:
    """A flat configuration as an engine's user has it, with none of our own keys."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": 50,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "num_target_layers": 6,
        "block_size": 4,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 3]},
        **changes,
    }


def write_published(
    folder: Path,
    raw: dict[str, Any],
    rename: Callable[[str], str] = str,
    config: DraftConfig = PLAIN,
    **extra: torch.Tensor,
) -> Path:
    """A folder of somebody else's with the weights of `drafter(config)`."""
    folder.mkdir()
    tensors = {rename(name): t.contiguous() for name, t in drafter(config).state_dict().items()}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


STATED = Given(tap_kind="attn_res_mixture", slot_layout="anchor")


def nest(**changes: Any) -> dict[str, Any]:
    return {"mask_token_id": 49, "target_layer_ids": [1, 3], **changes}


def facts(**changes: Any) -> TargetFacts:
    base = TargetFacts("nano", 16, (50, 48), 6, ("attn_res_mixture", "raw_prefix"))
    return replace(base, **changes)
