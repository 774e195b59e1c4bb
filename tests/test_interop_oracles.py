"""What we write for others, opened by their own code in their own way: speculators' loader and its
forward pass, transformers' configuration, safetensors in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.draft import DraftConfig, DSparkDrafter, block_inputs
from dspark.draft.checkpoint import TargetCopies, load_drafter, save_drafter
from dspark.draft.record import TargetRecord
from dspark.draft.shapes import Yarn
from dspark.interop.exporting import export_drafter
from dspark.interop.importing import import_drafter
from tests import oracles
from tests.test_draft_model import SMALL, make_drafter
from tests.tolerance import assert_close

VOCAB, WIDTH = SMALL.vocab_size, SMALL.hidden_size
MIXED = {"sliding_window": 9, "layer_types": ("full_attention", "sliding_attention")}
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "yarn": {"yarn": Yarn(4.0, 8)},
    "reduced vocabulary": {"draft_vocab_size": 30},
    "windows": MIXED,
    "causal windows": {**MIXED, "block_causal": "sliding"},
}


def verifier(folder: Path) -> TargetCopies:
    """A model folder from which speculators takes embedding, head and final norm."""
    generator = torch.Generator().manual_seed(3)
    embed, head = torch.randn(2, VOCAB, WIDTH, generator=generator)
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head * WIDTH**-0.5,
        "model.norm.weight": torch.ones(WIDTH),
    }
    save_file(tensors, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = {"model_type": "qwen3", "hidden_size": WIDTH, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(raw))
    return TargetCopies(embed, tensors["lm_head.weight"])


def exported(tmp_path: Path, case: str) -> tuple[DSparkDrafter, TargetCopies, Path]:
    tables = verifier(tmp_path / "verifier")
    record = TargetRecord(str(tmp_path / "verifier"))
    config = replace(SMALL, target=record, max_position_embeddings=64, **CASES[case])
    torch.manual_seed(0)
    drafter = make_drafter(config)
    if config.draft_vocab_size is not None:
        drafter.set_draft_ids(torch.randperm(VOCAB)[: config.draft_vocab_size].sort()[0])
    save_drafter(tmp_path / "ours", drafter)
    export_drafter(tmp_path / "ours", tmp_path / "out", layout="speculators", target_copies=tables)
    return drafter, tables, tmp_path / "out"


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_speculators_loads_the_export_and_computes_the_same(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = oracles.require("speculators.models.dspark.core")
    dflash = oracles.require("speculators.models.dflash.core")
    drafter, tables, folder = exported(tmp_path, case)
    config = core.DSparkSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    oracle = core.DSparkDraftModel.from_pretrained(folder, config=config).float().eval()
    length, anchors = 40, torch.tensor([[0, 1, 17, 31]])
    features = torch.randn(1, length, len(SMALL.target_layer_ids) * WIDTH)
    ids = torch.randint(VOCAB, (1, length))
    everywhere = torch.ones_like(anchors, dtype=torch.bool)
    monkeypatch.setattr(dflash, "select_anchors", lambda *_, **__: (anchors[0], everywhere[0]))
    caught: list[torch.Tensor] = []
    monkeypatch.setattr(
        core, "compute_metrics", lambda *args, **_: caught.extend(args[:3]) or (0, 0)
    )
    with torch.no_grad():
        oracle(
            features,
            ids,
            torch.ones(1, length),
            torch.randn(1, length, WIDTH),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=4,
        )
        logits, confidence = _ours(drafter, tables, features, ids, anchors)
    theirs, _, their_confidence = caught
    assert_close(logits, theirs.view(logits.shape), limit=1e-4, what="logits")
    assert_close(confidence, their_confidence.view(confidence.shape), limit=1e-4, what="confidence")


def _ours(
    drafter: DSparkDrafter,
    tables: TargetCopies,
    features: torch.Tensor,
    ids: torch.Tensor,
    anchors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits over draft ids and confidences of all blocks, from the drafter and the tables."""
    slots = drafter.config.block_size
    inputs = block_inputs(ids[:, anchors[0]], slots, drafter.config.mask_token_id)
    everywhere = torch.ones_like(anchors, dtype=torch.bool)
    hidden = drafter.train_hidden(
        features, torch.ones_like(ids, dtype=torch.bool), tables.embed[inputs], anchors, everywhere
    )
    prev = torch.stack([ids[0, p : p + slots] for p in anchors[0].tolist()])[None]
    head = tables.lm_head if drafter.draft_ids is None else tables.lm_head[drafter.draft_ids]
    bias = drafter.markov_head.bias(drafter.markov_head.codes(prev, hidden))
    assert drafter.confidence_head is not None
    return hidden @ head.T + bias, drafter.confidence_head(hidden, drafter.markov_head.embed(prev))


@pytest.mark.oracle
def test_a_save_of_speculators_itself_comes_back_bit_exact(tmp_path: Path) -> None:
    """Their own writer's keys, defaults and omissions, not ours."""
    core = oracles.require("speculators.models.dspark.core")
    drafter, tables, folder = exported(tmp_path, "gated")
    config = core.DSparkSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = core.DSparkDraftModel.from_pretrained(folder, config=config)
    model.save_pretrained(tmp_path / "theirs")
    done = import_drafter(tmp_path / "theirs", tmp_path / "back", target_copies=tables)
    assert done.config == drafter.config
    back = load_drafter(tmp_path / "back").state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("layout", ["deepspec", "sglang", "vllm", "modelopt"])
def test_transformers_reads_the_rotary_positions_of_every_flat_export(
    tmp_path: Path, layout: str
) -> None:
    from transformers import AutoConfig

    config: DraftConfig = replace(SMALL, yarn=Yarn(4.0, 8, beta_fast=16.0))
    save_drafter(tmp_path / "ours", make_drafter(config))
    tables = verifier(tmp_path / "verifier")
    export_drafter(tmp_path / "ours", tmp_path / "out", layout=layout, target_copies=tables)
    theirs = AutoConfig.from_pretrained(tmp_path / "out")
    assert theirs.rope_parameters["rope_type"] == "yarn"
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.rope_parameters["factor"] == 4.0
    assert theirs.rope_parameters["original_max_position_embeddings"] == 8
    assert theirs.rope_parameters["beta_fast"] == 16.0
    assert theirs.head_dim == config.head_dim
    assert theirs.layer_types == ["full_attention"] * config.num_layers


def test_a_fresh_process_finds_every_name_and_no_copy_of_the_targets_tables(tmp_path: Path) -> None:
    """A drafter whose weights are views of one tensor: written apart, and no larger."""
    drafter = make_drafter()
    flat = torch.cat([parameter.detach().flatten() for parameter in drafter.parameters()])
    start = 0
    for parameter in drafter.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    save_drafter(tmp_path / "ours", drafter)
    export_drafter(tmp_path / "ours", tmp_path / "out", layout="vllm")
    path = tmp_path / "out" / "model.safetensors"
    assert path.stat().st_size < flat.numel() * 4 + 8192
    code = (
        "import sys; from safetensors.torch import load_file; t = load_file(sys.argv[1]); "
        "print(*sorted(t)); print(sum(x.numel() for x in t.values()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    names, count = result.stdout.splitlines()
    assert names.split() == sorted(drafter.state_dict())
    assert int(count) == flat.numel()
