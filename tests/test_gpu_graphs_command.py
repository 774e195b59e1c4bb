"""`--graphs` on a GPU: frames are recorded, the commands say so, and the texts are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair

pytestmark = pytest.mark.gpu
NEW = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("batch", [1, 2])
def test_bench_records(pair: TinyPair, tmp_path: Path, batch: int) -> None:
    file = tmp_path / "bench.json"
    words = ["bench", "--graphs", "--target", pair.target, "--draft", pair.draft]
    words += ["--prompts", pair.prompts, "--max-new-tokens", NEW, "--warmup", 1]
    words += ["--device", "cuda", "--batch", batch, "--temperature", 0, 1, "--json", file]
    assert console.run(cli.app, [str(word) for word in words]) == 0
    greedy, sampled = json.loads(file.read_text())["runs"]
    for run in (greedy, sampled):
        graphs = run["extra"]["graphs"]
        assert (graphs["frames"], graphs["seats"]) == ("recorded", batch)
        assert graphs["sizes"] == [BLOCK_SIZE]
        assert not any("unrecorded" in text for text in run["extra"]["warnings"])
    assert greedy["greedy_mismatches"] == 0
    assert greedy["extra"]["graphs"]["eager"]["mismatches"] == []
    assert sampled["extra"]["lossless"]["impossible"] == 0


@pytest.mark.parametrize("policy", ["throughput", "auto"])
def test_policies_are_given_the_times_of_frames(tmp_path: Path, policy: str) -> None:
    pair = write_pair(tmp_path)
    words = ["bench", "--graphs", "--target", pair.target, "--draft", pair.draft]
    words += ["--prompts", pair.prompts, "--max-new-tokens", NEW, "--warmup", 1]
    words += ["--device", "cuda", "--policy", policy, "--profile", "--json", tmp_path / "b.json"]
    assert console.run(cli.app, [str(word) for word in words]) == 0
    costs = json.loads((pair.draft / "frame_costs.json").read_text())
    assert costs["environment"]["frames"] == "recorded"
    assert json.loads((tmp_path / "b.json").read_text())["greedy_mismatches"] == 0


@pytest.mark.parametrize("plain", [True, False])
def test_generate_records(pair: TinyPair, plain: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def document(*more: str) -> dict[str, Any]:
        words = ["generate", "What is 3 + 4?", "--json", "--target", str(pair.target)]
        words += ["--plain"] if plain else ["--draft", str(pair.draft)]
        words += ["--max-new-tokens", str(NEW), "--device", "cuda", *more]
        assert console.run(cli.app, words) == 0
        shown = capsys.readouterr()
        assert "unrecorded" not in shown.err
        return dict(json.loads(shown.out))

    framed, waiting = document("--graphs"), document()
    assert framed["graphs"]["frames"] == "recorded"
    assert framed["tokens"] == waiting["tokens"]
    assert framed["text"] == waiting["text"]
