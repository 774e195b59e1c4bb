"""`python -m dspark_kernels.bench` beside a peer that tunes its kernels: what is tried, and for how
long."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dspark import ops
from dspark_kernels.bench import __main__ as command
from dspark_kernels.bench.harness import Case, Timing
from dspark_kernels.bench.peers import at_most, share, spread


def test_settings_are_spread_over_all() -> None:
    assert spread(4)(list(range(12))) == [0, 3, 6, 9]
    assert spread(0)(list(range(12))) == list(range(12))
    assert spread(4)([7, 8]) == [7, 8]


@pytest.mark.parametrize(("kept", "shares", "cases"), [(4, 8, 4), (4, 12, 5), (3, 2, 3), (0, 5, 2)])
def test_processes_share_every_setting_of_every_case(kept: int, shares: int, cases: int) -> None:
    settings = kept or 9
    done = set()
    for which in range(shares):
        setting, first, step = share(kept, which, shares)
        each = min(kept, shares) if kept else shares
        for case in range(cases)[first::step]:
            done |= {(case, x) for x in range(settings)[setting::each]}
    assert done == {(case, x) for case in range(cases) for x in range(settings)}


def test_a_call_is_ended_in_time() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError), at_most(0.05):
        time.sleep(5)
    assert time.monotonic() - begun < 2
    with at_most(5):
        pass
    time.sleep(0.01)  # and no alarm is left behind


def test_ours_is_printed_whatever_the_peer_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow() -> object:
        time.sleep(5)
        return None

    def timed(make: object, nbytes: int) -> Timing:
        assert callable(make)
        make()
        return Timing(2.0, 1.0, 3.0)

    op = ModuleType("op")
    names = ("8 bfloat16", "16 bfloat16", "8 float32")
    cases = [Case(x, 100, 0, lambda: lambda: 0, lambda: lambda: 0, "fla") for x in names]
    cases[1] = Case(names[1], 100, 0, lambda: lambda: 0, slow, "fla")  # type: ignore[arg-type]
    op.cases = lambda: iter(cases)  # type: ignore[attr-defined]
    op.every_kernel = op.cases  # type: ignore[attr-defined]
    monkeypatch.setattr(command, "import_module", lambda name: op)
    monkeypatch.setattr(command, "compile_ahead", lambda *a: None)
    monkeypatch.setattr(command, "try_only", lambda pick: None)
    monkeypatch.setattr(command, "time_case", timed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    asked = argparse.Namespace(only="bfloat16", peer_seconds=0.2, peer_settings=4, peer_processes=1)
    rows: list[dict[str, Any]] = []
    command._run("op", 1e12, asked, rows)
    assert [row["case"] for row in rows] == list(names[:2])
    assert rows[0]["peer"] == {"median_us": 2.0, "fastest_us": 1.0, "slowest_us": 3.0}
    assert rows[1]["peer"] == "fla: not within 0.2 seconds"
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["8", "16", "8", "16"]


def _alone(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """The command as it runs where there is a card."""
    monkeypatch.setattr(sys, "argv", ["bench", *asked])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "copy_rate", lambda: 1e12)
    monkeypatch.setattr(command, "_machine", lambda: "a card, torch 2")


def test_the_json_says_what_was_asked_where_and_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "times.json"
    asked = ["settle", "--json", str(file)]
    _alone(monkeypatch, asked)
    monkeypatch.setattr(command, "_run", lambda op, rate, options, rows: rows.append({"op": op}))
    assert command.main() == 0
    written = json.loads(file.read_text())
    assert (written["schema_version"], written["machine"]) == (1, "a card, torch 2")
    assert written["command"] == f"python -m dspark_kernels.bench {' '.join(asked)}"
    assert datetime.now(timezone.utc) - datetime.fromisoformat(written["date"]) < timedelta(hours=1)
    assert (written["cases"], written["failed"]) == ([{"op": "settle"}], {})


def test_an_op_that_fails_leaves_the_others_and_what_it_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.json"
    seen: list[object] = []

    def run(op: str, rate: float, options: object, rows: list[dict[str, Any]]) -> None:
        seen.append(json.loads(file.read_text())["cases"] if file.exists() else None)
        rows.append({"op": op})
        if op == "adamw":
            raise RuntimeError("out of memory\nand how much")

    _alone(monkeypatch, ["settle", "adamw", "uniform", "--json", str(file)])
    monkeypatch.setattr(command, "_run", run)
    assert command.main() == 1
    assert seen == [None, [{"op": "settle"}], [{"op": "settle"}, {"op": "adamw"}]]
    written = json.loads(file.read_text())
    assert [row["op"] for row in written["cases"]] == ["settle", "adamw", "uniform"]
    assert written["failed"] == {"adamw": "RuntimeError: out of memory\nand how much"}
    assert capsys.readouterr().err.splitlines()[-1] == "adamw failed: RuntimeError: out of memory"
    assert [f.name for f in tmp_path.iterdir()] == ["times.json"]


def test_every_kernel_is_timed() -> None:
    """Its module stands among the imports of a benchmark."""
    told = "\n".join(f.read_text() for f in Path(command.__file__).parent.glob("*.py"))
    kernels = {op.kernel.split(":")[0] for op in ops._OPS.values() if op.kernel}
    assert kernels == {name for name in kernels if re.search(rf"\b{name}\b", told)}
