"""`dspark doctor` tells what is there, and exits 1 when something stands in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspark import assets, cli, console, doctor, ops


def test_report_is_json_and_names_this_machine() -> None:
    report = json.loads(json.dumps(doctor.examine().to_dict()))
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0].startswith("cpu")
    assert report["threads"]["torch"] == torch.get_num_threads()
    assert set(report["backends"]) == set(ops.backends())
    assert report["schema_version"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why there is no GPU backend")
def test_without_a_gpu_torch_runs_and_triton_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("DSPARK_OPS", raising=False)
    for backend in doctor.examine().backends.values():
        assert backend["runs"] == "torch"
        assert "GPU" in backend["triton"]


@pytest.mark.parametrize(("asked", "expected"), [("tritn", "expected one of"), ("triton", "")])
def test_backend_that_cannot_run_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, asked: str, expected: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DSPARK_OPS", asked)
    report = doctor.examine()
    assert not report.ok
    assert any("DSPARK_OPS" in problem and expected in problem for problem in report.problems)


def test_damaged_assets_are_a_problem_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights").write_text("right")
    assets.write_manifest(tmp_path)
    monkeypatch.setattr(assets, "assets_root", lambda: tmp_path)
    assert console.run(cli.app, ["doctor"]) == 0
    assert "1 intact" in capsys.readouterr().out
    (tmp_path / "weights").write_text("wrong")
    assert console.run(cli.app, ["doctor"]) == 1
    assert "shipped files changed: weights" in capsys.readouterr().out
    assert console.run(cli.app, ["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize(
    ("content", "ours", "warned"),
    [("from dspark.cli import main", True, False), ("from dspark_mlx import main", False, True)],
)
def test_another_package_of_the_same_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, ours: bool, warned: bool
) -> None:
    script = tmp_path / "dspark"
    script.write_text(f"#!/usr/bin/env python3\n{content}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    report = doctor.examine()
    assert report.script == {"path": str(script), "ours": ours}
    assert any("python -m dspark" in warning for warning in report.warnings) is warned


def test_spinning_threads_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    text = " ".join(doctor.examine().warnings)
    assert "OMP_WAIT_POLICY=passive" in text
    assert "999 threads" in text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "OMP" not in " ".join(doctor.examine().warnings)


def test_ops_that_run_alike_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor.examine()
    doctor.render(report)
    shown = capsys.readouterr().out.splitlines()
    alike = {tuple(backend.values()) for backend in report.backends.values()}
    lines = [line for line in shown if line.startswith("kernels ")]
    assert len(lines) == len(alike)
    assert all(any(op in line for line in lines) for op in report.backends)
