"""The pruning curve: from two real prunings to JSON, a table and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.draft.speedup import accepted_length
from dspark.files import read_json
from dspark_eval.prune_curve import CurveOptions, main, run_curve, table
from tests.test_prune_run import trained  # noqa: F401 - a fixture

pytest.importorskip("torch_pruning")


def test_a_curve_of_two_sizes(trained: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "curve"
    options = CurveOptions(trained, out, (60, 100), steps=1, prompts=1, bandwidth=1e9)
    document = run_curve(options)
    assert read_json(out / "curve.json") == document
    whole, small = document["points"]
    assert (whole["share"], small["share"]) == (100, 60)
    assert small["parameters"] <= 0.6 * whole["parameters"]
    assert small["bytes_per_draft_step"] < whole["bytes_per_draft_step"]
    for point in document["points"]:
        for stage in ("pruned", "recovered"):
            found = point[stage]
            assert found["accepted_length"] >= 1
            if found["tokens_per_s"] is not None:
                tau = accepted_length(found["conditional_acceptance"], found["draft_length"])
                assert 0 < found["speed_up"] <= tau
    assert "1 GB/s" in document["speed_from"]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(table(document).splitlines()) == 4
    assert run_curve(options) == document  # nothing is done twice


@pytest.mark.parametrize("arguments", [
    ["--sizes", "50"], ["--sizes", "0", "50"], ["--sizes", "120", "50"], ["--steps", "0"],
    ["--prompts", "0"], ["--bandwidth", "0"],
])  # fmt: skip
def test_wrong_options_end_in_a_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--draft", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*base, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {arguments[0]}")
    assert error.count("\n") == 1
