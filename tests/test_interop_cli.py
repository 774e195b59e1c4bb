"""`dspark import` and `dspark export` from the command line: exit codes, one line of error, and
what the reports say."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import cli, console
from tests import published_drafters as published
from tests.published_drafters import Sizes
from tests.tiny_pair import TinyPair, write_pair

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; gives exit code, stdout and stderr."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        code = console.run(cli.app, [str(arg) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """RadixArk's layout in small, for no target at hand."""
    raw = published.radixark(Sizes())
    return published.write(
        tmp_path / "theirs", raw, published.random_weights(published.gqa_shapes(Sizes()))
    )


def failed(result: tuple[int, str, str], *words: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that holds the words."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_import_says_what_it_found_what_it_was_told_and_what_it_left_out(
    run: Run, theirs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ours"
    words = ("--tap-kind", "attn_res_mixture", "--slot-layout", "anchor")
    code, text, _ = run("import", theirs, "--out", out, *words)
    assert code == 0
    assert "SpecForge / SGLang" in text
    assert "attn_res_mixture, as stated by --tap-kind" in text
    assert "0 2 4 of 7 layers" in text
    assert "theta=10000,factor=16,original=64" in text
    code, text, _ = run("import", theirs, "--out", tmp_path / "again", *words, "--json")
    report = json.loads(text)
    assert report["format"] == "sglang"
    assert report["target_tap_kind"] == "attn_res_mixture"
    assert report["target_layer_ids"] == [0, 2, 4]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("sample_from_anchor", "--slot-layout anchor|mask")),
        (("--slot-layout", "anchor"), ("--tap-kind residual|attn_res_mixture|raw_prefix",)),
        (("--slot-layout", "first"), ("--slot-layout first: expected one of anchor, mask",)),
        (("--tap-kind", "raw"), ("--tap-kind raw: expected one of residual, attn_res_mix",)),
        (("--slot-layout", "mask", "--tap-kind", "raw_prefix"), ("the anchor does not predict",)),
        (("--rope", "big"), ("--rope big: expected THETA",)),
        (("--rope", "10000,0.5,64"), ("--rope 10000,0.5,64", "yarn.factor")),
        (("--rope", "10000"), ("--rope theta=10000", "the file says theta=10000,factor=16")),
        (("--format", "gguf"), ("--format gguf: expected one of deepspec|speculators",)),
        (("--format", "k3-mla"), ("are of --format sglang",)),
        (("--mask-token-id", "3"), ("--mask-token-id 3: mask_token_id: the file says 60",)),
        (("--target", "nano"), ("hidden_size is 64, the target nano has",)),
        (("--target", "missing"), ("missing",)),
    ],
)
def test_import_asks_for_what_it_cannot_know(
    run: Run, theirs: Path, tmp_path: Path, words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    if words[:1] in (("--rope",), ("--mask-token-id",), ("--target",)):
        words = (*words, "--tap-kind", "raw_prefix", "--slot-layout", "anchor")
    failed(run("import", theirs, "--out", tmp_path / "ours", *words), *expected)
    assert not (tmp_path / "ours").exists()


def test_import_opens_safetensors_alone(run: Run, theirs: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.write_text, (marker, "opened")

    (theirs / "model.safetensors").unlink()
    (theirs / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    words = ("--out", tmp_path / "ours", "--tap-kind", "raw_prefix", "--slot-layout", "anchor")
    failed(run("import", theirs, *words), "pytorch_model.bin: pickled weights")
    index = {"weight_map": {"fc.weight": "../elsewhere.safetensors"}}
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    failed(run("import", theirs, *words), "is not a file name in this folder")
    (theirs / "config.json").unlink()
    (theirs / "config.json").symlink_to("/etc/hostname")
    failed(run("import", theirs, *words), "outside the drafter folder")
    assert not marker.exists()


@pytest.mark.parametrize("layout", ["deepspec", "speculators", "sglang", "vllm", "modelopt"])
def test_export_and_import_with_the_target_at_hand(
    run: Run, pair: TinyPair, tmp_path: Path, layout: str
) -> None:
    there = ("--format", layout, "--target", pair.target)
    code, text, _ = run("export", "--draft", pair.draft, *there, "--out", tmp_path / "out")
    assert code == 0
    assert "read by" in text
    tables = {"embed_tokens.weight", "lm_head.weight"}
    held = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert tables <= held if layout == "deepspec" else not tables & held
    back = ("--target", pair.target, "--out", tmp_path / "back")
    code, text, _ = run("import", tmp_path / "out", *back)
    assert code == 0
    ours = load_file(pair.draft / "model.safetensors")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert ours.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in ours.items())
    if layout == "deepspec":
        assert "compared with the target's" in text


def test_speculators_is_told_where_the_target_lies(
    run: Run, pair: TinyPair, tmp_path: Path
) -> None:
    """It opens `verifier.name_or_path` while loading: the folder at hand, not a name of ours."""
    words = ("export", "--draft", pair.draft, "--format", "speculators")
    code, text, _ = run(*words, "--target", pair.target, "--out", tmp_path / "with", "--json")
    assert code == 0
    assert json.loads(text)["verifier"] == str(pair.target.resolve())
    code, text, _ = run(*words, "--out", tmp_path / "without")
    assert code == 0
    assert "give --target" in text
    names = [
        json.loads((tmp_path / out / "config.json").read_text())["speculators_config"]["verifier"]
        for out in ("with", "without")
    ]
    assert [entry["name_or_path"] for entry in names] == [str(pair.target.resolve()), None]


def test_export_refuses_in_one_line(run: Run, pair: TinyPair, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    failed(run("export", "--draft", pair.draft, "--format", "k3-mla", *out), "latent attention")
    failed(run("export", "--draft", pair.draft, "--format", "deepspec", *out), "give --target")
    failed(
        run("export", "--draft", pair.draft, "--format", "onnx", *out), "--format onnx: expected"
    )
    failed(run("export", "--draft", tmp_path / "no", "--format", "vllm", *out), "no such folder")
    (tmp_path / "out").mkdir()
    failed(run("export", "--draft", pair.draft, "--format", "vllm", *out), "exists already")


def test_an_exported_drafter_of_another_target_is_seen(
    run: Run, pair: TinyPair, tmp_path: Path
) -> None:
    words = ("--format", "deepspec", "--target", pair.target, "--out", tmp_path / "out")
    assert run("export", "--draft", pair.draft, *words)[0] == 0
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["embed_tokens.weight"][3] += 1
    save_file(tensors, path)
    back = ("--target", pair.target, "--out", tmp_path / "back")
    failed(run("import", tmp_path / "out", *back), "embed_tokens.weight differs from the target's")
    code, text, _ = run("import", tmp_path / "out", "--out", tmp_path / "back")
    assert code == 0
    assert "not compared: no --target" in text
