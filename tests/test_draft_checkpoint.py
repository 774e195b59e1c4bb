"""Drafter folders: bit-exact round trips, readable by others, whole whatever fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark.draft import DSparkDrafter
from dspark.draft.checkpoint import (
    TargetCopies,
    load_drafter,
    read_config,
    save_drafter,
)
from dspark.draft.config_file import config_from_dict, config_to_dict
from dspark.draft.shapes import KDAShape, MLAShape, Yarn
from tests import oracles
from tests.draft_checkpoint_setup import CONFIG, FakeTarget, edit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good drafter folder."""
    save_drafter(tmp_path / "draft", DSparkDrafter(CONFIG))
    return tmp_path / "draft"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = DSparkDrafter(CONFIG)
    save_drafter(tmp_path / "a", drafter, dtype=dtype, texts={"README.md": "card"})
    loaded = load_drafter(tmp_path / "a", FakeTarget(), dtype=dtype)
    assert loaded.config == CONFIG
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype)), name
    assert (tmp_path / "a" / "README.md").read_text() == "card"
    # Training resumes on an fp32 master copy whatever was stored, with every weight trainable.
    master = load_drafter(tmp_path / "a")
    assert {p.dtype for p in master.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in master.parameters())
    save_drafter(tmp_path / "b", loaded, dtype=dtype)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


EVERYTHING = {
    "yarn": {"yarn": Yarn(8.0, 64, mscale=1.0, mscale_all_dim=0.5)},
    "window": {
        "sliding_window": 5,
        "layer_types": ("full_attention", "sliding_attention"),
        "block_causal": "sliding",
    },
    "draft vocabulary": {"draft_vocab_size": 7},
    "mla": {
        "backbone": "mla",
        "num_key_value_heads": 4,
        "mla": MLAShape(5, 6, 4, 2, 3),
        "yarn": Yarn(2.0, 8, attention_factor=1.25),
    },
    "kda": {
        "backbone": "kda",
        "num_key_value_heads": 4,
        "kda": KDAShape(order="gla", gate_rank=3, gate_lower_bound=-2.5, block_softmax=True),
    },
    "head": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
}


@pytest.mark.parametrize("case", EVERYTHING)
def test_every_field_of_a_configuration_survives_its_file(case: str) -> None:
    config = replace(CONFIG, **EVERYTHING[case])
    raw = config_to_dict(config, dtype=torch.float32, with_copies=False)
    assert config_from_dict(json.loads(json.dumps(raw))) == config


def test_a_drafter_without_confidence_head_round_trips(tmp_path: Path) -> None:
    config = replace(CONFIG, enable_confidence_head=False, target=None)
    save_drafter(tmp_path / "a", DSparkDrafter(config))
    loaded = load_drafter(tmp_path / "a")
    assert loaded.config == config
    assert loaded.confidence_head is None


def test_names_and_shapes_are_deepspecs(folder: Path) -> None:
    layer_shapes = {
        "input_layernorm.weight": (16,),
        "post_attention_layernorm.weight": (16,),
        "self_attn.q_proj.weight": (32, 16),
        "self_attn.k_proj.weight": (16, 16),
        "self_attn.v_proj.weight": (16, 16),
        "self_attn.o_proj.weight": (16, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (24, 16),
        "mlp.up_proj.weight": (24, 16),
        "mlp.down_proj.weight": (16, 24),
    }
    expected = {
        "fc.weight": (16, 32),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        "markov_head.markov_w1.weight": (50, 6),
        "markov_head.markov_w2.weight": (50, 6),
        "confidence_head.proj.weight": (1, 22),
        "confidence_head.proj.bias": (1,),
        **{f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer_shapes.items()},
    }
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected


def test_config_satisfies_sglangs_lookup(folder: Path) -> None:
    """SGLang reads the union of the nests and the top level, and refuses what is not there."""
    raw = json.loads((folder / "config.json").read_text())
    merged = {**raw, **raw.get("dspark_config", {}), **raw["dflash_config"]}
    assert raw["architectures"] == ["DSparkDraftModel"]
    assert merged["markov_rank"] > 0
    assert merged["markov_head_type"] in ("vanilla", "gated", "rnn")
    assert 0 <= merged["mask_token_id"] < FakeTarget.vocab_size
    assert merged["block_size"] == 4
    assert merged["sample_from_anchor"] is True
    ids = merged["target_layer_ids"]
    assert ids == sorted(set(ids))
    assert all(0 <= layer <= merged["num_target_layers"] - 2 for layer in ids)
    assert merged["enable_confidence_head"] is merged["confidence_head_with_markov"] is True
    assert merged["projector_type"] == "dspark"
    assert merged["attention_mode"] == "gqa"
    assert raw["tie_word_embeddings"] is False
    assert raw["layer_types"] == ["full_attention"] * 2
    assert raw["rope_parameters"] == {"rope_theta": 5000.0, "rope_type": "default"}
    assert raw["layer_id_origin"] == "completed_layer_0_based"


def test_transformers_reads_the_backbone_configuration(folder: Path) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(folder)
    assert theirs.model_type == "qwen3"
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert getattr(theirs, key) == json.loads((folder / "config.json").read_text())[key]
    assert theirs.rope_parameters["rope_theta"] == 5000.0
    assert theirs.rms_norm_eps == 1e-6
    assert not theirs.tie_word_embeddings


@pytest.mark.oracle
def test_speculators_model_takes_the_stored_tensors(folder: Path) -> None:
    core = oracles.require("speculators.models.dspark.core")
    from transformers import Qwen3Config

    raw = json.loads((folder / "config.json").read_text())
    model = core.DSparkDraftModel(
        core.DSparkSpeculatorConfig(
            transformer_layer_config=Qwen3Config(**raw, attn_implementation="eager"),
            draft_vocab_size=raw["vocab_size"],
            aux_hidden_state_layer_ids=[layer + 1 for layer in raw["target_layer_ids"]],
            mask_token_id=raw["mask_token_id"],
            markov_rank=raw["markov_rank"],
            block_size=raw["block_size"],
        )
    )
    missing, unexpected = model.load_state_dict(
        load_file(folder / "model.safetensors"), strict=False
    )
    assert not unexpected
    assert set(missing) == {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }


def test_copies_of_the_target_are_stored_on_request_and_skipped_on_load(tmp_path: Path) -> None:
    drafter, shared = DSparkDrafter(CONFIG), torch.randn(50, 16)
    # A tied target: one tensor under two names, which safetensors would refuse as it is.
    save_drafter(tmp_path / "a", drafter, target_copies=TargetCopies(shared, shared))
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], shared)
    assert torch.equal(stored["lm_head.weight"], shared)
    architectures = json.loads((tmp_path / "a" / "config.json").read_text())["architectures"]
    assert architectures == ["Qwen3DSparkModel"]
    loaded = load_drafter(tmp_path / "a")
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    with pytest.raises(ValueError, match="lm_head"):
        save_drafter(tmp_path / "b", drafter, target_copies=TargetCopies(shared, shared[:, :8]))
    assert not (tmp_path / "b").exists()


def test_a_failed_save_leaves_the_old_folder(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="file name"):
        save_drafter(folder, DSparkDrafter(CONFIG), texts={"../escape.md": "x"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


def test_keys_may_stand_in_a_nest_and_rope_may_be_in_the_older_form(folder: Path) -> None:
    def older(raw: dict[str, Any]) -> None:
        for key in ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"):
            del raw[key]
        del raw["rope_parameters"]
        raw["rope_theta"], raw["rope_scaling"] = 5000, None

    edit(folder, older)
    assert read_config(folder) == CONFIG
