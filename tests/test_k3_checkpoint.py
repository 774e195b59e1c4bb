"""K3 checkpoints: published names, shapes and dtypes, both ways; what is skipped and refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.errors import UserError
from dspark.k3.checkpoint import load_k3, load_k3_with_report, save_k3
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.k3.mxfp4 import dequantise, quantise
from tests import k3_nemo
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.oracles import require

Table = dict[str, tuple[str, list[int]]]
INDEX = "model.safetensors.index.json"


def kda_table(c: K3Config) -> Table:
    wide, D, K = c.kda_num_heads * c.kda_head_dim, c.hidden_size, c.kda_head_dim
    table: Table = {f"self_attn.{x}_proj.weight": ("BF16", [wide, D]) for x in "qkvg"}
    table |= {f"self_attn.{x}_conv1d.weight": ("F32", [wide, 1, 4]) for x in "qkv"}
    return table | {
        "self_attn.A_log": ("F32", [128]),
        "self_attn.dt_bias": ("F32", [wide]),
        "self_attn.f_a_proj.weight": ("BF16", [K, D]),
        "self_attn.f_b_proj.weight": ("BF16", [wide, K]),
        "self_attn.b_proj.weight": ("BF16", [c.kda_num_heads, D]),
        "self_attn.o_norm.weight": ("F32", [K]),
        "self_attn.o_proj.weight": ("BF16", [D, wide]),
    }


def mla_table(c: K3Config) -> Table:
    H, D, Q, R = c.num_attention_heads, c.hidden_size, c.q_lora_rank, c.kv_lora_rank
    assert Q is not None
    return {
        "self_attn.q_a_proj.weight": ("BF16", [Q, D]),
        "self_attn.q_a_layernorm.weight": ("BF16", [Q]),
        "self_attn.q_b_proj.weight": ("BF16", [H * (c.qk_nope_head_dim + c.qk_rope_head_dim), Q]),
        "self_attn.kv_a_proj_with_mqa.weight": ("BF16", [R + c.qk_rope_head_dim, D]),
        "self_attn.kv_a_layernorm.weight": ("BF16", [R]),
        "self_attn.kv_b_proj.weight": ("BF16", [H * (c.qk_nope_head_dim + c.v_head_dim), R]),
        "self_attn.g_proj.weight": ("BF16", [H * c.v_head_dim, D]),
        "self_attn.o_proj.weight": ("BF16", [D, H * c.v_head_dim]),
    }


def moe_table(c: K3Config) -> Table:
    D, L, I = c.hidden_size, c.routed_expert_hidden_size, c.moe_intermediate_size  # noqa: E741
    assert L is not None
    shared = I * c.num_shared_experts
    table: Table = {
        "gate.weight": ("BF16", [c.num_experts, D]),
        "gate.e_score_correction_bias": ("F32", [c.num_experts]),
        "routed_expert_down_proj.weight": ("BF16", [L, D]),
        "routed_expert_up_proj.weight": ("BF16", [D, L]),
        "routed_expert_norm.weight": ("BF16", [L]),
        "shared_experts.gate_proj.weight": ("BF16", [shared, D]),
        "shared_experts.up_proj.weight": ("BF16", [shared, D]),
        "shared_experts.down_proj.weight": ("BF16", [D, shared]),
    }
    for expert in range(c.num_experts):
        for matrix, rows, columns in (("w1", I, L), ("w3", I, L), ("w2", L, I)):
            stem = f"experts.{expert}.{matrix}.weight"
            table[f"{stem}_packed"] = ("U8", [rows, columns // 2])
            table[f"{stem}_scale"] = ("U8", [rows, columns // 32])
    return {f"block_sparse_moe.{name}": entry for name, entry in table.items()}


def published_table(c: K3Config) -> Table:
    """Every tensor of a K3 release of these sizes, written from the published list by hand."""
    V, D = c.vocab_size, c.hidden_size
    table: Table = {
        "model.embed_tokens.weight": ("BF16", [V, D]),
        "lm_head.weight": ("BF16", [V, D]),
        "model.norm.weight": ("BF16", [D]),
        "model.output_attn_res_norm.weight": ("BF16", [D]),
        "model.output_attn_res_proj.weight": ("BF16", [1, D]),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    norms += ("self_attention_res_norm", "mlp_res_norm")
    for i in range(c.num_hidden_layers):
        layer: Table = {f"{name}.weight": ("BF16", [D]) for name in norms}
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            layer[f"{name}.weight"] = ("BF16", [1, D])
        layer |= mla_table(c) if c.is_full_attention(i) else kda_table(c)
        if c.is_moe(i):
            layer |= moe_table(c)
        else:
            for name in ("gate_proj", "up_proj"):
                layer[f"mlp.{name}.weight"] = ("BF16", [c.intermediate_size, D])
            layer["mlp.down_proj.weight"] = ("BF16", [D, c.intermediate_size])
        table |= {f"model.layers.{i}.{name}": entry for name, entry in layer.items()}
    return {f"language_model.{name}": entry for name, entry in table.items()}


def on_disk(folder: Path) -> dict[str, tuple[str, list[int], str]]:
    """Name -> (dtype, shape, file) from the headers of every shard."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                entry = shard.get_slice(name)
                found[name] = (entry.get_dtype(), entry.get_shape(), file.name)
    return found


def same_weights(a: K3ForCausalLM, b: K3ForCausalLM) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def rounded_experts(model: K3ForCausalLM) -> K3ForCausalLM:
    """The model with experts that MXFP4 holds exactly and bfloat16 weights elsewhere."""
    float32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.copy_(dequantise(*quantise(parameter), torch.float32))
        elif not name.endswith(float32):
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny K3 in several shards, plain float32."""
    save_k3(tmp_path, tiny_model(), experts="plain", dtype=torch.float32, shard_bytes=300_000)
    return tmp_path


# --- layout ------------------------------------------------------------------------------------


def test_every_published_tensor_and_no_other(tmp_path: Path):
    save_k3(tmp_path, tiny_model(), shard_bytes=200_000)
    stored = {name: (dtype, shape) for name, (dtype, shape, _) in on_disk(tmp_path).items()}
    assert stored == published_table(TINY)


def test_index_and_config_say_what_is_there(tmp_path: Path):
    save_k3(tmp_path, tiny_model(), shard_bytes=200_000)
    stored = on_disk(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == {name: file for name, (_, _, file) in sorted(stored.items())}
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [(tmp_path / file).stat().st_size for file in files]
    assert max(sizes) < 200_000 + 60_000  # the limit counts tensors; headers come on top
    payload = sum(t.nbytes for file in files for t in load_file(tmp_path / file).values())
    assert index["metadata"]["total_size"] == payload
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "kimi_k3"
    quantization = config["text_config"]["quantization_config"]
    assert quantization["format"] == "mxfp4-pack-quantized"
    assert config["text_config"]["linear_attn_config"]["full_attn_layers"] == [3, 6, 7]


def test_one_file_has_an_index_too(tmp_path: Path):
    save_k3(tmp_path, tiny_model())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", INDEX]


def test_a_log_is_padded_with_zeros_after_the_real_heads(tmp_path: Path):
    model = tiny_model()
    save_k3(tmp_path, model)
    stored = load_file(tmp_path / "model.safetensors")
    a_log = stored["language_model.model.layers.0.self_attn.A_log"]
    assert torch.equal(a_log[:3], model.model.layers[0].self_attn.A_log)
    assert not a_log[3:].any()


def test_kimi_linear_has_its_own_names(tmp_path: Path):
    model = tiny_model(PLAIN)
    save_k3(tmp_path, model, experts="plain", dtype=torch.float32)
    stored = on_disk(tmp_path)
    assert stored["model.layers.0.self_attn.A_log"][:2] == ("F32", [1, 1, 3, 1])
    assert "model.layers.0.self_attn.g_a_proj.weight" in stored
    assert "model.layers.2.self_attn.q_proj.weight" in stored
    assert "model.layers.1.block_sparse_moe.experts.5.w2.weight" in stored
    assert not any(name.startswith("language_model.") for name in stored)
    same_weights(model, load_k3(tmp_path))


# --- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [1, 200_000, 5_000_000_000])
def test_mxfp4_checkpoint_comes_back_bit_for_bit(tmp_path: Path, shard_bytes: int):
    model = rounded_experts(tiny_model())
    save_k3(tmp_path, model, shard_bytes=shard_bytes)
    loaded = load_k3(tmp_path)
    same_weights(model, loaded)
    tokens = tiny_tokens(2, 9)
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])


def test_experts_that_need_rounding_are_rounded_once(tmp_path: Path):
    model = tiny_model()
    save_k3(tmp_path / "once", model)
    once = load_k3(tmp_path / "once")
    original, loaded = model.model.layers[3].block_sparse_moe, once.model.layers[3].block_sparse_moe
    for ours, theirs in zip(
        original.experts.parameters(), loaded.experts.parameters(), strict=True
    ):
        assert torch.equal(dequantise(*quantise(ours), torch.float32), theirs)
    save_k3(tmp_path / "twice", once)
    same_weights(once, load_k3(tmp_path / "twice"))


def test_bfloat16_load_keeps_the_float32_tensors(tmp_path: Path):
    model = tiny_model()
    save_k3(tmp_path, model)
    loaded = load_k3(tmp_path, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        kept = name.endswith(
            ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
        )
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
        if kept:
            assert torch.equal(parameter, model.state_dict()[name]), name


def test_packed_and_plain_projections_save_alike(tmp_path: Path):
    model = tiny_model()
    save_k3(tmp_path / "before", model)
    model.pack_()  # parameters become views of shared storage
    save_k3(tmp_path / "after", model)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_single_file_without_index(tmp_path: Path):
    model = rounded_experts(tiny_model())
    save_k3(tmp_path, model)
    (tmp_path / INDEX).unlink()
    same_weights(model, load_k3(tmp_path))


def test_text_only_names_without_prefix_are_read_too(tmp_path: Path):
    model = rounded_experts(tiny_model())
    save_k3(tmp_path, model)
    stored = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("language_model."): tensor for name, tensor in stored.items()}
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / INDEX).unlink()
    same_weights(model, load_k3(tmp_path))


@pytest.mark.parametrize("stored", [False, True])
def test_tied_head_is_the_embedding(tmp_path: Path, stored: bool):
    model = tiny_model(replace(TINY, tie_word_embeddings=True))
    save_k3(tmp_path, model, experts="plain", dtype=torch.float32)
    assert "language_model.lm_head.weight" not in on_disk(tmp_path)
    if stored:
        add(tmp_path, {"language_model.lm_head.weight": model.lm_head.weight.clone()})
    loaded = load_k3(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    same_weights(model, loaded)


@pytest.mark.oracle
def test_nemo_reads_the_mxfp4_checkpoint_as_we_do(tmp_path: Path):
    """The same weights through NeMo's adapter, hence the same logits, rounding included."""
    save_k3(tmp_path, tiny_model(), shard_bytes=200_000)
    ours, nemo = load_k3(tmp_path), k3_nemo.from_checkpoint(tmp_path)
    tokens = tiny_tokens(2, 33)
    hidden, logits = k3_nemo.hidden_and_logits(nemo, tokens)
    mine, _ = ours(tokens)
    assert (mine - hidden).abs().max() < 1e-4
    assert (ours.lm_head(mine) - logits).abs().max() < 1e-4


@pytest.mark.oracle
def test_nemo_writes_the_names_we_read(tmp_path: Path):
    """The other way round: NeMo's adapter exports, we load."""
    require("nemo_automodel")
    model = tiny_model()
    save_k3(tmp_path / "ours", model, experts="plain", dtype=torch.float32)
    nemo = k3_nemo.from_checkpoint(tmp_path / "ours")
    exported = nemo.state_dict_adapter.to_hf(nemo.state_dict())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_file({n: t.contiguous() for n, t in exported.items()}, theirs / "model.safetensors")
    (theirs / "config.json").write_text((tmp_path / "ours/config.json").read_text())
    same_weights(model, load_k3(theirs))


# --- what is read, and how much ------------------------------------------------------------------


def add(folder: Path, tensors: dict[str, Tensor], file: str = "extra.safetensors") -> None:
    """Put more tensors into a checkpoint, through its index."""
    save_file(tensors, folder / file)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps(index))


def test_vision_is_skipped_and_said_and_its_shard_not_opened(folder: Path):
    vision = {
        "vision_tower.blocks.0.wqkv.weight": torch.zeros(8, 8),
        "mm_projector.proj.0.weight": torch.zeros(4),
    }
    add(folder, vision, "vision.safetensors")
    (folder / "vision.safetensors").write_bytes(b"cannot be opened")
    model, report = load_k3_with_report(folder)
    same_weights(model, tiny_model())
    assert report.skipped == tuple(sorted(vision))
    text = {file.name for file in folder.glob("model-*.safetensors")}
    assert set(report.shards_opened) == text
    assert len(report.shards_opened) == len(text)  # each once
    assert report.bytes_read == sum(
        t.nbytes for file in text for t in load_file(folder / file).values()
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_peak_memory_is_the_model_and_one_shard(tmp_path: Path):
    """Measured in a fresh process: 210 MB of float32 weights in shards of 15 MB."""
    wide = replace(
        TINY,
        num_hidden_layers=4,
        full_attention_layers=(3,),
        num_experts=64,
        moe_intermediate_size=256,
        routed_expert_hidden_size=352,
    )
    model = tiny_model(wide)
    size = sum(p.nbytes for p in model.parameters())
    small, large = tmp_path / "small", tmp_path / "large"
    save_k3(small, tiny_model())
    save_k3(large, model, experts="plain", dtype=torch.float32, shard_bytes=15_000_000)
    code = (
        "import re, sys\n"
        "from dspark.k3.checkpoint import load_k3\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "load_k3(sys.argv[1])  # what a first load imports is not the model's memory\n"
        "before = peak(); model = load_k3(sys.argv[2]); print(1024 * (peak() - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, small, large],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert size > 200e6
    assert 0.9 * size < int(run.stdout) < size + 2.5 * 15e6


# --- what is refused -----------------------------------------------------------------------------


def edit_index(folder: Path, name: str, file: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    if file is None:
        del index["weight_map"][name]
    else:
        index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load_k3(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


Q = "language_model.model.layers.0.self_attn.q_proj.weight"


def test_missing_and_unexpected_names_are_listed(folder: Path):
    edit_index(folder, Q, None)
    add(folder, {f"language_model.model.layers.{i}.mystery": torch.zeros(1) for i in range(12)})
    message = refusal(folder)
    assert "1 missing: model.layers.0.self_attn.q_proj.weight;" in message
    assert "12 unexpected: model.layers.0.mystery, " in message
    assert message.endswith("and 2 more")


def test_half_a_packed_expert_is_missing(tmp_path: Path):
    save_k3(tmp_path, tiny_model())
    stem = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    edit_index(tmp_path, f"language_model.{stem}_scale", None)
    message = refusal(tmp_path)
    assert f"1 missing: {stem};" in message
    assert f"1 unexpected: {stem}_packed" in message


def test_missing_head_names_candidates_and_never_starts_random(folder: Path):
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"]["language_model.lm_head.weight"]
    edit_index(folder, "language_model.lm_head.weight", None)
    edit_index(folder, "language_model.model.lm_head.weight", shard)
    message = refusal(folder)
    assert "candidates for lm_head.weight: model.lm_head.weight" in message
    assert "tie_word_embeddings" in message


def test_tied_config_with_another_head(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(folder)


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/passwd", "..\\outside.safetensors", "sub/a.safetensors"],
)
def test_index_cannot_leave_the_folder(folder: Path, file: str):
    (folder.parent / "outside.safetensors").write_bytes(b"")
    edit_index(folder, Q, file)
    assert "not a plain file name" in refusal(folder)


def test_missing_shard_is_one_line(folder: Path):
    edit_index(folder, Q, "model-00099-of-00099.safetensors")
    assert "the shard model-00099-of-00099.safetensors is missing" in refusal(folder)


def test_index_that_points_to_the_wrong_shard(folder: Path):
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(index.values()) if file != index[Q])
    edit_index(folder, Q, other)
    assert f"{Q} is not in this file" in refusal(folder)


class Marker:
    """A pickle that leaves a trace when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
@pytest.mark.parametrize("through_index", [False, True])
def test_pickles_are_refused_unopened(folder: Path, name: str, through_index: bool):
    trace = folder / "opened"
    (folder / name).write_bytes(pickle.dumps(Marker(trace)))
    if through_index:
        edit_index(folder, Q, name)
        assert f"{name} is refused; only safetensors" in refusal(folder)
    else:
        for file in [*folder.glob("*.safetensors"), folder / INDEX]:
            file.unlink()
        assert f"{name} may be a pickle" in refusal(folder)
    assert not trace.exists()


def test_wrong_shape_names_both(folder: Path):
    edit_index(folder, Q, None)
    add(folder, {Q: torch.zeros(48, 65)})
    assert f"{Q}: shape [48, 65] does not fit config.json, expected [48, 64]" in refusal(folder)


def test_wrong_dtype_is_not_cast(folder: Path):
    edit_index(folder, Q, None)
    add(folder, {Q: torch.zeros(48, 64, dtype=torch.int32)})
    assert f"{Q}: stored as int32, expected float32 or bfloat16" in refusal(folder)


def test_scale_that_is_not_a_number(tmp_path: Path):
    save_k3(tmp_path, tiny_model())
    stored = load_file(tmp_path / "model.safetensors")
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"
    stored[name][0, 0] = 255
    save_file(stored, tmp_path / "model.safetensors")
    assert "experts.0.w1.weight_scale: a scale is NaN" in refusal(tmp_path)


def test_stored_twice_with_and_without_prefix(folder: Path):
    add(folder, {Q.removeprefix("language_model."): torch.zeros(48, 64)})
    assert "both with and without language_model." in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_broken_shard_is_one_line(folder: Path, content: bytes | None):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100] if content is None else content)
    assert f"{shard.name}: not a readable safetensors file" in refusal(folder)


def test_folders_without_a_checkpoint(tmp_path: Path, folder: Path):
    assert "no such file" in refusal(tmp_path / "absent")
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    assert "expected model.safetensors or" in refusal(folder)


def test_saving_over_a_checkpoint_is_refused(folder: Path):
    with pytest.raises(UserError, match="already holds weights"):
        save_k3(folder, tiny_model())


def test_experts_that_cannot_be_packed(tmp_path: Path):
    odd = replace(TINY, moe_intermediate_size=24)
    with pytest.raises(UserError, match='multiples of 32, got 24; write it with experts="plain"'):
        save_k3(tmp_path, tiny_model(odd))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "x", "hidden_size is 'x'; expected int"),
        ("hidden_size", True, "hidden_size is True; expected int"),
        ("num_hidden_layers", None, "num_hidden_layers is None; expected int"),
        ("rms_norm_eps", "small", "rms_norm_eps is 'small'; expected float"),
        ("linear_attn_config", [], r"linear_attn_config is \[\]; expected an object"),
    ],
)
def test_a_value_of_another_type_is_named(key: str, value: object, message: str) -> None:
    config = TINY.to_dict()
    config["text_config"][key] = value
    with pytest.raises(UserError, match=message):
        K3Config.from_dict(config)


def test_sizes_that_are_left_out_are_named_with_the_file(tmp_path: Path) -> None:
    config = TINY.to_dict()
    del config["text_config"]["vocab_size"], config["text_config"]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json: missing sizes: vocab_size, hidden_size"):
        load_k3(tmp_path)
    with pytest.raises(UserError, match="text_config is 5; expected an object"):
        K3Config.from_dict({**config, "text_config": 5})
