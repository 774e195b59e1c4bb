"""eval.json and compare.json name the files that were measured, and the command line."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console
from dspark.distill.answers import folder_digest
from dspark.distill.fingerprint import tokenizer_fingerprint
from dspark.runtime.loading import load_tokenizer
from dspark_eval import measured_files
from dspark_eval.measured_files import drafter_files, target_files
from tests.tiny_pair import TinyPair, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    assert console.run(cli.app, [str(word) for word in words]) == 0
    return json.loads(capsys.readouterr().out)


def _page(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    _run(capsys, "report", folder, "--out", folder / "report", "--json")
    return (folder / "report" / "report.md").read_text("utf-8")


def test_an_evaluation_names_its_files(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in pair.draft.iterdir()}
    words = ["eval", "--draft", pair.draft, "--target", pair.target, "--suite", pair.prompts,
             "--max-new-tokens", "4", "--out", tmp_path, "--json"]  # fmt: skip
    document = _run(capsys, *words)
    assert document == json.loads((tmp_path / "eval.json").read_text("utf-8"))
    assert document["command"] == shlex.join(["dspark", *map(str, words)])
    own, target = document["identity"]["drafter"], document["identity"]["target"]
    assert set(own["files"]) == {"config.json", "model.safetensors"}
    for name, digest in own["files"].items():
        assert digest == _hash((pair.draft / name).read_bytes())
    assert {path: path.stat().st_mtime_ns for path in pair.draft.iterdir()} == before
    assert target == {
        "sha256": folder_digest(pair.target),
        "config_sha256": _hash((pair.target / "config.json").read_bytes()),
        "tokenizer_sha256": tokenizer_fingerprint(load_tokenizer(pair.target)[0]),
        "weight_bytes": sum(p.stat().st_size for p in pair.target.glob("*.safetensors")),
    }
    page = _page(tmp_path, capsys)
    assert page.count(f"{pair.draft}` (sha256 {own['sha256'][:12]}) for") == 1
    assert page.count(f"(sha256 {own['sha256'][:12]})") == 2  # and among the sources


def test_a_comparison_names_the_files_of_each(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = _run(
        capsys, "eval", "--compare", pair.draft, "lookup", f"model:{pair.target}", "--target",
        pair.target, "--suite", pair.prompts, "--max-new-tokens", "4", "--out", tmp_path, "--json",
    )  # fmt: skip
    assert document["command"].startswith("dspark eval --compare ")
    assert document["identity"]["target"]["sha256"] == folder_digest(pair.target)
    found = {entry["kind"]: entry["identity"] for entry in document["contenders"]}
    assert found["dspark"] == drafter_files(pair.draft)
    assert found["ar"] == drafter_files(pair.target)
    assert (found["lookup"], found["plain"]) == (None, None)
    page = _page(tmp_path, capsys)
    assert f"{pair.draft}` (sha256 {found['dspark']['sha256'][:12]})" in page


def test_every_file_that_decides_proposals_counts(pair: TinyPair, tmp_path: Path) -> None:
    """The hash over all is that of `sha256sum`'s own lines, and a folder's name is none of them."""
    folder = shutil.copytree(pair.draft, tmp_path / "copy")
    seen = [drafter_files(folder)]
    assert seen[0] == drafter_files(pair.draft)
    (folder / "README.md").write_text("words", encoding="utf-8")
    assert drafter_files(folder) == seen[0]
    for name in ("calibration.json", "config.json", "model.safetensors"):
        path = folder / name
        path.write_bytes((path.read_bytes() if path.is_file() else b"{}") + b" ")
        seen.append(drafter_files(folder))
    assert len({entry["sha256"] for entry in seen}) == 4
    lines = "".join(
        f"{_hash((folder / name).read_bytes())}  {name}\n"
        for name in ("calibration.json", "config.json", "model.safetensors")
    )
    assert seen[-1]["sha256"] == _hash(lines.encode())


def test_a_large_target_is_not_read_again(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, folder = load_tokenizer(pair.target)
    full = target_files(folder, tokenizer)
    monkeypatch.setattr(measured_files, "MOST_HASHED", full["weight_bytes"] - 1)
    monkeypatch.setattr(measured_files, "folder_digest", lambda folder: pytest.fail("read"))
    assert target_files(folder, tokenizer) == {**full, "sha256": None}
