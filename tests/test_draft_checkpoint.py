"""Drafter folders: bit-exact round trips, readable by others, and one clear line for every way in
which a folder can be wrong."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.draft import DSparkDrafter, TargetRecord
from dspark.draft.checkpoint import (
    WEIGHTS_FILE,
    TargetCopies,
    load_drafter,
    read_config,
    save_drafter,
)
from dspark.draft.config_file import config_from_dict, config_to_dict
from dspark.draft.shapes import KDAShape, MLAShape, Yarn
from dspark.errors import UserError
from tests import oracles
from tests.interop_drafters import PLAIN

CONFIG = replace(PLAIN, target=TargetRecord("nano", tokenizer_hash="ab12", template_hash=None))


@dataclass
class FakeTarget:
    """As much of a target as a checkpoint is checked against."""

    name: str = "nano"
    hidden_size: int = 16
    vocab_size: int = 50
    num_layers: int = 6
    tap_kinds: tuple[str, ...] = ("attn_res_mixture", "raw_prefix")

    @property
    def table_size(self) -> int:
        return self.vocab_size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good drafter folder."""
    save_drafter(tmp_path / "draft", DSparkDrafter(CONFIG))
    return tmp_path / "draft"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def put(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Sets a key wherever the file has it."""

    def change(raw: dict[str, Any]) -> None:
        raw[key] = value
        if key in raw["dflash_config"]:
            raw["dflash_config"][key] = value

    return change


def drop(key: str) -> Callable[[dict[str, Any]], object]:
    def change(raw: dict[str, Any]) -> None:
        raw.pop(key)
        raw["dflash_config"].pop(key, None)

    return change


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


BAD_CONFIGS = {
    "tap kind missing": (drop("target_tap_kind"), "target_tap_kind: missing"),
    "tap kind unknown": (put("target_tap_kind", "hidden"), "target_tap_kind: 'hidden' is unknown"),
    "slot layout missing": (drop("sample_from_anchor"), "sample_from_anchor: .*slot layout"),
    "slot layout other": (put("sample_from_anchor", False), "sample_from_anchor: .*slot layout"),
    "layer origin missing": (drop("layer_id_origin"), "layer_id_origin: missing"),
    "layer origin other": (put("layer_id_origin", "hidden_states_index"), "layer_id_origin"),
    "block size missing": (drop("block_size"), "block_size: missing"),
    "block size text": (put("block_size", "8"), "block_size: '8' given, an integer"),
    "mask outside": (put("mask_token_id", 50), "mask_token_id: 50 is not in a vocabulary of 50"),
    "last layer": (put("target_layer_ids", [1, 5]), "target_layer_ids: 5 .*last layer"),
    "embeddings tapped": (put("target_layer_ids", [-1, 2]), "target_layer_ids: -1"),
    "taps descending": (put("target_layer_ids", [3, 1]), "target_layer_ids: .*ascending"),
    "taps absent": (put("target_layer_ids", []), "target_layer_ids"),
    "scaling of another kind": (
        put("rope_parameters", {"rope_theta": 1e4, "rope_type": "llama3", "factor": 16.0}),
        "rope_parameters: rope_type 'llama3'",
    ),
    "yarn from an unknown length": (
        put("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn", "factor": 16.0}),
        "rope_parameters: original_max_position_embeddings is None",
    ),
    "scaling with an unknown key": (
        put("rope_parameters", {"rope_theta": 1e4, "rope_type": "default", "factor": 16.0}),
        "rope_parameters: factor is not known, and would be lost",
    ),
    "two scalings": (
        put(
            "rope_scaling",
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
        "rope_parameters: does not agree with .* rope_scaling",
    ),
    "backbone of another class": (put("backbone", "mla"), "architectures: .* 'mla'.*DSparkMLA"),
    "sizes of another backbone": (
        put("kda", {"order": 0, "conv_size": 4}),
        "kda: .*an object with order, conv_size",
    ),
    "window without sliding layers": (put("sliding_window", 64), "sliding_window: 64"),
    "window without a size": (
        put("layer_types", ["sliding_attention"] * 2),
        "use_sliding_window: False",
    ),
    "rope base missing": (put("rope_parameters", {"rope_type": "default"}), "rope_theta"),
    "other markov head": (put("markov_head_type", "lstm"), "markov_head_type: 'lstm' .*vanilla"),
    "no markov head": (put("markov_rank", 0), "markov_rank: 0"),
    "layer types a number": (put("layer_types", 5), "layer_types: 5"),
    "rope scaling a list": (
        lambda raw: raw.update(rope_parameters=None, rope_scaling=[1]),
        "rope_scaling: .*an object",
    ),
    "nest a text": (put("dflash_config", "mask_token_id"), "dflash_config: .*an object"),
    "architectures nested": (put("architectures", [{}]), "architectures"),
    "attention bias": (put("attention_bias", True), "attention_bias"),
    "not a drafter": (put("architectures", ["Qwen3ForCausalLM"]), "architectures"),
    "contradiction": (
        lambda raw: raw["dflash_config"].update(mask_token_id=3),
        "mask_token_id: 49 in top level but 3 in dflash_config",
    ),
}


def test_weights_stored_as_integers_are_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int8)
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(UserError, match=r"norm\.weight is stored as torch\.int8"):
        load_drafter(folder)


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_weights_are_as_readable_as_the_rest(folder: Path) -> None:
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()}
    assert len(modes) == 1


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_wrong_configurations_are_refused_naming_file_and_key(folder: Path, case: str) -> None:
    change, message = BAD_CONFIGS[case]
    edit(folder, change)
    with pytest.raises(UserError, match=message) as refusal:
        load_drafter(folder)
    assert str(refusal.value).startswith(f"{folder / 'config.json'}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (FakeTarget(hidden_size=32), "hidden_size is 16, the target nano has 32"),
        (FakeTarget(vocab_size=64), "vocab_size is 50, the target nano has 64"),
        (FakeTarget(num_layers=7), "num_target_layers is 6, the target nano has 7"),
        (FakeTarget(tap_kinds=("residual",)), "'attn_res_mixture' is not offered .* residual"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    folder: Path, target: FakeTarget, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_drafter(folder, target)


def test_keys_may_stand_in_a_nest_and_rope_may_be_in_the_older_form(folder: Path) -> None:
    def older(raw: dict[str, Any]) -> None:
        for key in ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"):
            del raw[key]
        del raw["rope_parameters"]
        raw["rope_theta"], raw["rope_scaling"] = 5000, None

    edit(folder, older)
    assert read_config(folder) == CONFIG


def test_missing_unexpected_and_misshaped_tensors_are_listed(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    kept = {name: tensor for name, tensor in tensors.items() if "q_norm" not in name}
    save_file({**kept, "extra.weight": torch.zeros(1)}, path)
    names = "layers.0.self_attn.q_norm.weight, layers.1.self_attn.q_norm.weight"
    with pytest.raises(UserError, match=f"missing tensors: {names}; unexpected.*extra.weight"):
        load_drafter(folder)
    save_file({**tensors, "norm.weight": torch.ones(15)}, path)
    with pytest.raises(UserError, match=r"norm.weight has shape \(15,\), expected \(16,\)"):
        load_drafter(folder)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_drafter(folder)


class Bomb:
    """Writes a marker file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "opened")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "draft.ckpt", "weights.pkl"])
def test_pickles_are_never_opened(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    load_drafter(folder)  # safetensors are there: the pickle is not looked at
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"{name}: pickled weights .* never opened"):
        load_drafter(folder)
    assert not marker.exists()


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such folder"):
        load_drafter(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: no such file"):
        load_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json:1"):
        load_drafter(folder)


def shard(folder: Path, names: tuple[str, str]) -> None:
    """Splits the weights into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    owner = {key: names[i % 2] for i, key in enumerate(tensors)}
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v for k, v in tensors.items() if owner[k] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))


def test_shards_are_read_but_only_from_the_folder(folder: Path) -> None:
    whole = load_drafter(folder)
    shard(folder, ("a.safetensors", "b.safetensors"))
    loaded = load_drafter(folder)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors: no such file"):
        load_drafter(folder)


def test_an_index_has_to_agree_with_its_shards(folder: Path) -> None:
    shard(folder, ("a.safetensors", "b.safetensors"))
    path = folder / "model.safetensors.index.json"
    owner = json.loads(path.read_text())["weight_map"]
    wrong = "a" if owner["norm.weight"] == "b.safetensors" else "b"
    other = {**owner, "ghost.weight": "b.safetensors"}
    path.write_text(json.dumps({"weight_map": {**owner, "norm.weight": f"{wrong}.safetensors"}}))
    with pytest.raises(UserError, match=r"norm\.weight is in .\.safetensors, which does not"):
        load_drafter(folder)
    path.write_text(json.dumps({"weight_map": other}))
    with pytest.raises(UserError, match=r"ghost\.weight is in b\.safetensors, which does not hold"):
        load_drafter(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/inside.safetensors"])
def test_an_index_cannot_lead_elsewhere(folder: Path, name: str) -> None:
    shard(folder, ("a.safetensors", name))
    with pytest.raises(UserError, match="is not a file name in this folder"):
        load_drafter(folder)


def test_links_may_leave_the_folder_only_into_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(UserError, match="outside the drafter folder"):
        load_drafter(folder)
    repo = tmp_path / "models--someone--draft"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    outside.rename(repo / "blobs" / "0123")
    snapshot = repo / "snapshots" / "abcd"
    folder.rename(snapshot)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0123"))
    assert load_drafter(snapshot).config == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_layers": 0}, "num_layers"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"target_tap_kind": "mixture"}, "target_tap_kind"),
        ({"target_layer_ids": (1, 1)}, "target_layer_ids"),
    ],
)
def test_impossible_configurations_cannot_be_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}: "):
        replace(CONFIG, **change)
