"""`dspark report`: what is found, what is refused, and that the page says what the files say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console
from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json
from dspark_eval.acceptance import run_eval
from dspark_eval.bench import run_bench
from dspark_eval.calibrate import run_calibrate
from dspark_eval.reporting import build, find, run_report
from dspark_eval.reporting.acceptance import verdict
from dspark_eval.reporting.blocks import Notes, Table
from dspark_eval.reporting.sources import find_all
from dspark_eval.reporting.throughput import throughput
from dspark_eval.settings import BenchOptions, CalibrateOptions, EvalOptions
from dspark_eval.study.table import TABLE_FILE, build_table
from tests.report_documents import (
    BENCH,
    COMPARISON,
    COSTS,
    ENVIRONMENT,
    EVAL,
    FRAMES,
    ORDERING,
    REAL_TEXT,
    RELIABILITY,
)
from tests.study_folder import write_study
from tests.test_study_table import COUNTS
from tests.tiny_pair import write_pair

PNG = b"\x89PNG"
HISTORY = [
    {"step": 10, "train_s": 1.0, "loss": 3.0, "accepted_length": 1.2},
    {
        "step": 20, "train_s": 2.5, "loss": 2.0, "accepted_length": 1.7,
        "held_out": {"loss": 2.25, "accepted_length": 1.63},
    },
]  # fmt: skip
CURVE = {
    "schema_version": 1,
    "draft": "runs/mine", "steps": 300, "prompts": 4, "temperature": 0.0,
    "speed_from": "bytes at 100 GB/s (a guess)",
    "points": [
        {
            "share": share, "parameters": 10_000 * share, "bytes_per_draft_step": 40_000 * share,
            "layers": 2, "heads": 4, "mlp": 64, "rank": 8,
            **{stage: {"accepted_length": length, "tokens_per_s": 100 * length}
               for stage, length in (("pruned", 1.5), ("recovered", 2.5))},
        }
        for share in (100, 50)
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the files of eval, bench, calibrate and distill, the first three real."""
    folder = tmp_path_factory.mktemp("measured")
    pair = write_pair(folder)
    rows = [{"prompt": f"What is {n} + 4?", "answer": "7"} for n in range(4)]
    pair.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shared: dict[str, Any] = {
        "draft": pair.draft, "target": pair.target, "max_new_tokens": 8, "quiet": True
    }  # fmt: skip
    prompts = (str(pair.prompts),)
    run = folder / "run"
    run_eval(EvalOptions(suites=prompts, out=run / "eval", **shared))
    run_bench(
        BenchOptions(
            prompts=pair.prompts, temperature=(0.0, 1.0), warmup=1, json=run / "b.json", **shared
        )
    )
    run_calibrate(CalibrateOptions(suites=prompts, temperature=(1.0,), out=run, **shared))
    atomic_write_json(run / "training.json", HISTORY)
    return run


def page(report: dict[str, Any]) -> str:
    """What was written, as Markdown."""
    return Path(report["markdown"]).read_text(encoding="utf-8")


def _links(text: str) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)


def test_a_run_is_put_on_one_page(measured: Path, tmp_path: Path) -> None:
    text = page(run_report([measured], tmp_path / "out"))
    heads = re.findall(r"^## (\w+)", text, flags=re.MULTILINE)
    assert heads == ["Headline", "Speed", "Acceptance", "Calibration", "Training", "Where"]
    evaluation = read_json(measured / "eval" / "eval.json")
    (suite,) = evaluation["suites"].values()
    low, high = suite["accepted_length_ci95"]
    rounds = suite["n_rounds"]
    length = f"{suite['accepted_length']:.2f} [{low:.2f}, {high:.2f}]"
    assert f"| prompts | 4 | {rounds} | {length} |" in text
    for run in read_json(measured / "b.json")["runs"]:
        assert f"| {run['temperature']:g} | {run['plain_tokens_per_s']:.1f} |" in text
    assert "20 steps in 2 s." in text
    assert "| held-out | 2.250 | 1.63 |" in text
    assert "draft length 4, at most 8 new tokens" in text
    links = _links(text)
    assert len(links) == len(set(links))
    shown = {link.split("-", 1)[1].removesuffix(".png") for link in links}
    assert shown >= {
        "speed", "acceptance", "rounds", "drafts-accepted", "timeline", "reliability-t1",
        "ece-t1", "reliability-by-position-t1", "training",
    }  # fmt: skip
    for link in links:
        assert (tmp_path / "out" / link).read_bytes().startswith(PNG)
    for block in text.split("\n\n"):  # every table has as many cells in each row as in its head
        if block.startswith("|"):
            assert len({row.replace("\\|", "").count("|") for row in block.splitlines()}) == 1


def test_a_study_is_rebuilt_from_its_runs_and_its_runs_are_not_shown(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", COUNTS, long=True)
    build_table(folder)
    (folder / TABLE_FILE).write_text("{}")  # what an older version wrote does not count
    text = page(run_report([folder, folder], tmp_path / "out"))
    assert re.findall(r"^#+ .*$", text, flags=re.MULTILINE) == [
        "# Report", "## Which hand?", "## Where the numbers come from"
    ]  # fmt: skip
    assert "| right | 0.001 M | 10 | 4 | 3.000 (3.00 to 3.00) | 1.50 | 1.500 [" in text
    assert [link.split("-", 1)[1] for link in _links(text)] == [
        "accepted.png", "positions.png", "long.png", "costs.png"
    ]  # fmt: skip
    assert all((tmp_path / "out" / link).is_file() for link in _links(text))


def test_a_curve_says_that_its_speed_is_predicted(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "curve.json", CURVE)
    atomic_write_json(tmp_path / "params-050" / "training.json", HISTORY)
    text = page(run_report([tmp_path], tmp_path / "out"))
    assert "predicted from bytes at 100 GB/s (a guess), not measured" in text
    assert "| 500,000 |" in text
    assert _links(text) == ["01-curve.png"]
    assert "Training" not in text


def test_a_file_is_known_by_what_it_holds(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "any.json", HISTORY)
    atomic_write_json(tmp_path / "config.json", {"hidden_size": 3})
    assert [item.path.name for item in find(tmp_path)] == ["any.json"]
    assert find(tmp_path / "any.json")[0].value == {
        "history": HISTORY,
        "settings": None,
        "environment": None,
    }


# ------------------------------------------------------------------ what is refused

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str | Path) -> tuple[int, str, str]:
        code = console.run(cli.app, ["report", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_folder_with_nothing_known_is_one_line(command: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    atomic_write_json(tmp_path / "other" / "x.json", [1, 2])
    for name, expected in (
        ("empty", "empty: nothing to report in it; expected a study"),
        ("other", "other: nothing to report in it"),
        ("none", "none: no such folder or file"),
    ):
        code, out, err = command(tmp_path / name, "--out", tmp_path / "out")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert expected in err
    assert not (tmp_path / "out").exists()
    assert command()[0] == 2


def test_a_damaged_file_is_named_with_its_line(command: Run, tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "training.json", HISTORY)
    damaged = tmp_path / "eval" / "eval.json"
    damaged.parent.mkdir()
    damaged.write_text('{"suites": {},\n "draft_length": }')
    for path in (damaged, tmp_path):
        code, out, err = command(path, "--out", tmp_path / "out")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{damaged}:2: expected JSON" in err
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_version_is_named(tmp_path: Path) -> None:
    atomic_write_json(
        tmp_path / "eval.json",
        {"schema_version": 1, "suites": {"x": {}}, "draft_length": 3, "drafter": "d"},
    )
    with pytest.raises(
        UserError, match=r"eval\.json: not as this .*: `temperature` is missing, .*; measure again"
    ):
        run_report([tmp_path], tmp_path / "out")


@pytest.mark.parametrize(
    "document", [BENCH, EVAL, RELIABILITY, COSTS, COMPARISON], ids=lambda d: d.get("kind", "")
)
def test_a_newer_schema_is_refused_in_one_line(
    command: Run, tmp_path: Path, document: dict[str, Any]
) -> None:
    atomic_write_json(tmp_path / "x.json", {**document, "schema_version": 2})
    code, out, err = command(tmp_path, "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "x.json: schema_version 2, this dspark reads up to 1; update dspark" in err
    assert not (tmp_path / "out").exists()


def test_a_report_of_a_newer_dspark_is_refused(command: Run, tmp_path: Path) -> None:
    report = {"kind": "dspark report", "schema_version": 1, "sources": []}
    for change, expected in (
        ({"schema_version": 9}, "schema_version 9"),
        ({"sources": [{"kind": "dream", "path": "d", "value": {}}]}, "holds a 'dream'"),
        (
            {"sources": [{"kind": "bench", "path": "b", "value": {"schema_version": 3}}]},
            "version 3",
        ),
    ):
        atomic_write_json(tmp_path / "report.json", {**report, **change})
        code, _, err = command(tmp_path, "--out", tmp_path / "out")
        assert (code, err.count("\n")) == (2, 1)
        assert expected in err


def test_what_keeps_rows_from_being_compared_is_said(tmp_path: Path) -> None:
    busy = {**ENVIRONMENT, "load_average_1m": 9.5, "cpu_cores": 2, "device_name": "Other CPU"}
    extra = {**BENCH["extra"], "prompts_sha256": "else"}
    atomic_write_json(tmp_path / "a.json", BENCH)
    atomic_write_json(tmp_path / "b.json", {**BENCH, "environment": busy, "extra": extra})
    found = find_all([tmp_path])
    (first, *_, last) = build(found)
    assert first.title == "Headline"
    (said,) = (block.lines for block in first.blocks if isinstance(block, Notes))
    assert "speeds come from different machines" in said[0]
    assert "Other CPU" in said[0]
    assert said[1].startswith("measured on a busy machine")
    assert said[1].endswith("b.json` (load 9.5 on 2 cores)")
    assert "a.json" not in said[1]
    assert "2 different draws of prompts" in said[2]
    (origin,) = (block for block in last.blocks if isinstance(block, Table))
    row = dict(zip(origin.heads, origin.rows[0], strict=True))
    assert (row["revision"], row["seed"], row["schema"], row["date"]) == (
        "abc123", "5", "1", "2026-01-02 03:04"
    )  # fmt: skip


def test_tables_of_other_ways_and_of_real_text_are_shown(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "ways" / "table.json", ORDERING)
    atomic_write_json(tmp_path / "ways" / "lookup" / "training.json", HISTORY)
    atomic_write_json(tmp_path / "text" / "real_text.json", REAL_TEXT)
    text = page(run_report([tmp_path / "ways", tmp_path / "text"], tmp_path / "out"))
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == [
        "Ways to draft: nano", "Real text", "Where the numbers come from"
    ]  # fmt: skip
    assert "3.10 (3.00, 3.20)" in text
    assert "| dspark | 1.75 | 2.25 | 0.002 (at the edge) |" in re.sub(" +", " ", text)
    assert "1.200 [1.100, 1.300]" in text
    assert _links(text) == ["01-ordering-1.png"]
    assert "| gsm8k | 0 | 2 | 50.0 % | 2.50 [2.20, 2.80] |" in text
    assert "**Accepted length by prompt set**" in text


def test_a_failed_check_is_said_loudly() -> None:
    assert verdict({"passed": True, "tokens": 7}) == "passed\n7 tokens"
    assert verdict({"passed": False, "tokens": 7}) == "FAILED\n7 tokens"
    assert verdict({"passed": None, "tokens": 7}) == verdict(None) == "-"


def test_throughput_needs_two_sizes_and_keeps_machines_apart() -> None:
    assert throughput([("bench", BENCH)]) is None
    section = throughput([("bench", BENCH), ("frames", FRAMES), ("eval", EVAL)])
    assert section is not None
    (rates,) = (block for block in section.blocks if isinstance(block, Table))
    assert [(row[0], row[-1]) for row in rates.rows] == [
        ("1", "modelled"), ("1", "measured"), ("2", "modelled"), ("2", "measured"),
        ("4", "modelled"),
        ("8", "measured"),
    ]  # fmt: skip
    other = {**FRAMES, "environment": {**ENVIRONMENT, "device_name": "GPU"}}
    assert throughput([("bench", BENCH), ("frames", other)]) is None


def test_a_place_that_cannot_be_written_is_said(command: Run, tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "t.json", HISTORY)
    code, _, err = command(tmp_path / "t.json", "--out", tmp_path / "t.json" / "out")
    assert code == 2
    assert "--out" in err


def test_the_command_prints_where_the_page_is(command: Run, tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "t.json", HISTORY)
    out = tmp_path / "out"
    assert command(tmp_path / "t.json", "--out", out) == (0, f"{out / 'report.html'}\n", "")
    code, text, _ = command("--help")
    assert code == 0
    assert "Example: dspark report" in text


def test_json_names_the_page_its_sources_and_its_pictures(command: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "t.json", tmp_path / "out"
    atomic_write_json(source, HISTORY)
    code, text, err = command(source, "--out", out, "--json")
    assert (code, err) == (0, "")
    found = json.loads(text)
    section, _ = found["sections"]
    assert (found["schema_version"], found["report"]) == (1, str(out / "report.html"))
    assert section["source"] == str(source)
    text = page(found)
    assert f"## {section['title']}" in text.splitlines()
    assert section["pictures"]
    for picture in map(Path, section["pictures"]):
        assert picture.is_file()
        assert f"]({picture.name})" in text
