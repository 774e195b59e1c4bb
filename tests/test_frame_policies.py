"""Recorded frames under policies: the measurement runs, and says what differs."""

from __future__ import annotations

import json
from pathlib import Path

from dspark.runtime.loading import load_target
from dspark.runtime.records import Generation
from dspark_eval import frame_policies
from dspark_eval.frame_runs import Run, divergences
from tests.test_decode_speed import nano_drafter  # noqa: F401  a fixture


def test_every_way_gives_the_texts_of_plain_frames(
    tmp_path: Path,
    nano_drafter: Path,  # noqa: F811
) -> None:
    out = tmp_path / "found.json"
    arguments = ["--draft", str(nano_drafter), "--device", "cpu", "--dtype", "float32"]
    arguments += ["--n-prompts", "2", "--new", "4", "--max-length", "200", "--json", str(out)]
    arguments += ["--suite", "nano-problems", "--batch", "2", "--sizes", "1", "2"]
    assert frame_policies.main(arguments) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert set(run["frame_seconds"]) == {"0", "1", "2", "4"}
    ways = run["sets"]["nano-problems"]
    plain, fixed, *others = ways
    assert (plain, fixed[:5], others) == ("plain", "fixed", ["throughput", "auto"])
    assert not any(way["divergences"] for way in ways.values())
    assert all(way["tokens"] == 6 for way in ways.values())
    assert set(ways["throughput"]["sizes"]) <= {"1", "2", "4"}
    assert set(ways["plain"]["sizes"]) == {"0"}
    assert 2.0 <= ways["plain"]["experts"] <= 4.0, "two tokens, two experts each"


def test_a_text_that_differs_is_named_with_its_gap() -> None:
    target = load_target("nano").target

    def run(*tokens: int) -> Run:
        return Run(texts=[Generation(list(tokens), "length", 0.0, 0.0, [])])

    (found,) = divergences(target, [[5, 6]], run(7, 8, 9), run(7, 9, 9))
    assert (found["prompt"], found["position"]) == (0, 1)
    assert found["top2_gap"] > 0
    assert not found["near_tie"], "in float32 no rounding explains it"
    assert not divergences(target, [[5, 6]], run(7, 8), run(7, 8))
