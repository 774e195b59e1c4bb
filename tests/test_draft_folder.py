"""Drafter folders that are wrong, broken or hostile: refused in one line, never opened blindly."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.draft import DSparkDrafter
from dspark.draft.checkpoint import (
    WEIGHTS_FILE,
    load_drafter,
    save_drafter,
)
from dspark.errors import UserError
from tests.draft_checkpoint_setup import CONFIG, FakeTarget, edit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good drafter folder."""
    save_drafter(tmp_path / "draft", DSparkDrafter(CONFIG))
    return tmp_path / "draft"


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
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json; a drafter folder was expected"):
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
        ({"rms_norm_eps": 0.1}, "rms_norm_eps"),
        ({"rope_theta": 1e13}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"target_tap_kind": "mixture"}, "target_tap_kind"),
        ({"target_layer_ids": (1, 1)}, "target_layer_ids"),
    ],
)
def test_impossible_configurations_cannot_be_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}: "):
        replace(CONFIG, **change)
