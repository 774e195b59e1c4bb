"""What is hidden of two things that run side by side; the command, tried on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_eval import offload_overlap
from dspark_eval.offload_overlap import hidden_share
from tests.headings import assert_headed


@pytest.mark.parametrize(
    ("both", "share"), [(0.010, 1.0), (0.014, 0.0), (0.012, 0.5), (0.015, -0.25)]
)
def test_the_shorter_is_hidden_by_what_both_together_save(both: float, share: float) -> None:
    assert hidden_share(0.010, 0.004, both) == pytest.approx(share)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    asked = ["--shape", "tiny", "--device", "cpu", "--requests", "3", "--frames", "2"]
    whole = [*asked, "--seed", "2", "--json", str(out)]
    assert offload_overlap.main(whole) == 0
    found = json.loads(out.read_text())
    assert_headed(found, "offload_overlap", whole, 2)
    one = 3 * (2 * 16 * 16 + 3 * 3 * 2 * 16) * 4
    assert found["bytes"] == 3 * one, "three layers: two heads of 16 x 16, a window of 3 x 96"
    assert found["seconds"]["both"] > found["seconds"]["copies"] > 0
    assert "of 3 idle requests" in capsys.readouterr().out
    assert offload_overlap.main([*asked[:-1], "0"]) == 2
    assert "expected 1 or more" in capsys.readouterr().err
