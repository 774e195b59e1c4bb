"""`dspark report` and files that are not as they should be; and what a kill leaves of one."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark import cli, console, files
from dspark.errors import UserError
from dspark.files import atomic_write_json, json_text, read_json
from dspark_eval.acceptance import run_eval
from dspark_eval.reporting import build, page, run_report
from dspark_eval.reporting.blocks import Prose, Section, Table
from dspark_eval.reporting.headline import headline
from dspark_eval.reporting.sources import find_all
from dspark_eval.reporting.words import LABEL, labels, names
from dspark_eval.settings import EvalOptions
from tests.report_documents import (
    BENCH,
    COMPARISON,
    COSTS,
    EVAL,
    FRAMES,
    ORDERING,
    REAL_TEXT,
    RELIABILITY,
)
from tests.test_report import CURVE, HISTORY
from tests.tiny_pair import write_pair

DOCUMENTS = {
    "bench": BENCH, "comparison": COMPARISON, "costs": COSTS, "curve": CURVE, "eval": EVAL,
    "frames": FRAMES, "history": HISTORY, "ordering": ORDERING, "real": REAL_TEXT,
    "reliability": RELIABILITY,
}  # fmt: skip
GONE = "gone"


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of every object, and the first two entries of every list."""
    keys: Iterator[Any] = iter(())
    if isinstance(value, dict):
        keys = iter(value)
    elif isinstance(value, list):
        keys = iter(range(min(len(value), 2)))
    for key in keys:
        yield (*above, key)
        yield from _places(value[key], (*above, key))


def _changed(document: Any, place: tuple[Any, ...], to: Any) -> Any:
    found = changed = copy.deepcopy(document)
    for key in place[:-1]:
        found = found[key]
    if to == GONE:
        del found[place[-1]]
    else:
        found[place[-1]] = to
    return changed


@pytest.mark.parametrize("name", DOCUMENTS)
def test_whatever_is_missing_or_of_another_sort_is_one_line(tmp_path: Path, name: str) -> None:
    """As an older dspark may have written it, or another program: a page, or a refusal that names
    the file; never a traceback."""
    path, said, places = tmp_path / "x.json", list[str](), list(_places(DOCUMENTS[name]))
    for place in places:
        for to in (GONE, "text"):
            path.write_text(json_text(_changed(DOCUMENTS[name], place, to)), encoding="utf-8")
            try:
                build(find_all([path]))
            except UserError as error:
                said.append(str(error))
    assert all(line.startswith(str(path)) for line in said)
    assert not any(re.search(r"Error\b|Stop|object has|generator", line) for line in said)
    assert len(places) / 2 < len(said) < 2 * len(places)


@pytest.mark.parametrize("sources", [3, [3], [{}], [{"kind": "eval"}], [{"kind": [], "path": ""}]])
def test_a_report_that_is_none_is_one_line(tmp_path: Path, sources: Any) -> None:
    path = tmp_path / "report.json"
    atomic_write_json(path, {"kind": "dspark report", "schema_version": 1, "sources": sources})
    with pytest.raises(UserError, match=r"report\.json: not as this version of dspark writes it"):
        find_all([path])


def _with(change: dict[str, Any], **of_suite: Any) -> dict[str, Any]:
    (name,) = EVAL["suites"]
    return {**EVAL, "suites": {"words": {**EVAL["suites"][name], **of_suite}}, **change}


UNVERSIONED = {key: value for key, value in EVAL.items() if key != "schema_version"}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (_with({}, accepted_length=math.nan), "suites.words.accepted_length is NaN"),
        (_with({}, acceptance_rate=-math.inf), "suites.words.acceptance_rate is -Infinity"),
        (_with({}, conditional_acceptance=[0.5, math.inf]), "conditional_acceptance[1] is Infin"),
        (_with({"suites": {}}), "`suites` is empty, so nothing was measured"),
        ({**COMPARISON, "suites": {}}, "`suites` is empty, so nothing was measured"),
        ({"schema_version": 99, "suites": {}}, "schema_version 99, this dspark reads up to 2"),
        (UNVERSIONED, "has no `schema_version`"),
        (_with({"schema_version": "1"}), "schema_version is '1', expected a whole number"),
        (_with({"schema_version": True}), "schema_version is True, expected a whole number"),
        (_with({}, samples=[{"prompt": 0}]), "`why` is missing"),
        (_with({}, lossless="fine"), "a value in it is of another sort than expected"),
        (_with({"suites": "fine"}), "a text stands in it where an object or a list was expected"),
    ],
)
def test_a_damaged_evaluation_says_file_fault_and_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: Any, expected: str
) -> None:
    """Named itself, found in its folder, and as a source of an earlier report."""
    path, report = tmp_path / "eval.json", tmp_path / "old" / "report.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    sources = [{"kind": "eval", "path": "eval.json", "value": document}]
    held = {"kind": "dspark report", "schema_version": 1, "sources": sources}
    report.parent.mkdir()
    report.write_text(json.dumps(held), encoding="utf-8")
    for asked in (path, tmp_path, report):
        code = console.run(cli.app, ["report", str(asked), "--out", str(tmp_path / "out")])
        said = capsys.readouterr()
        assert (code, said.out, said.err.count("\n")) == (2, "", 1)
        if asked is not report:
            assert said.err.startswith(f"error: {path}: ")
            assert expected in said.err
        assert "leave" in said.err
    assert not (tmp_path / "out").exists()


def test_what_the_newest_schema_is_not_is_left_alone_in_a_folder(tmp_path: Path) -> None:
    """Files of other programs, and of no report: only measurements' own names are looked at."""
    atomic_write_json(tmp_path / "costs.json", COSTS)
    (tmp_path / "other.json").write_text('{"schema_version": 99, "x": NaN}', encoding="utf-8")
    assert [item.kind.name for item in find_all([tmp_path])] == ["cost model"]


# ------------------------------------------------------------------ an error beside its floor


def test_the_headline_has_no_calibration_error_without_its_floor(tmp_path: Path) -> None:
    """Eval's own where it measured one, else that of the fit; both with what chance shows."""
    drafter = RELIABILITY["drafter"]
    of_eval: dict[str, Any] = {**EVAL, "drafter": drafter, "temperature": 0.0}
    atomic_write_json(tmp_path / "reliability.json", RELIABILITY)
    for own, expected in (
        (None, "5.0 % (4.0 %)"),
        ({"average_ece": 0.084, "average_ece_floor": 0.064}, "8.4 % (6.4 %)"),
        ({"average_ece": None, "average_ece_floor": None}, "5.0 % (4.0 %)"),
    ):
        (name,) = of_eval["suites"]
        suite = {**of_eval["suites"][name], "confidence": own}
        atomic_write_json(tmp_path / "eval.json", {**of_eval, "suites": {name: suite}})
        found = [item for item in find_all([tmp_path]) if item.kind.name in ("eval", "calibration")]
        section = headline(found)
        assert section is not None
        (table,) = (block for block in section.blocks if isinstance(block, Table))
        assert table.heads[-1] == "calibration error (perfect)"
        assert [row[-1] for row in table.rows] == [expected]


# ------------------------------------------------------------------ names that nearly agree


def test_names_keep_the_folders_that_tell_them_apart() -> None:
    assert names(["runs/a/final", "runs/b/final", "lookup"]) == {
        "runs/a/final": "a/final", "runs/b/final": "b/final", "lookup": "lookup",
    }  # fmt: skip
    assert names(["x/run", "run"]) == {"x/run": "x/run", "run": "run"}
    assert names(["/deep/nano"]) == {"/deep/nano": "nano"}


def test_labels_are_short_and_never_the_same() -> None:
    long = [f"a-drafter-with-a-long-name-{end}-of-november" for end in ("one", "two")]
    tails = [f"a-drafter-with-a-rather-long-name-{end}" for end in ("one", "two")]
    shown = labels([*long, *tails, "short"])
    assert len(set(shown.values())) == 5
    assert all(len(text) <= LABEL + len(" (1)") for text in shown.values())
    assert shown["short"] == "short"
    assert shown[tails[0]].endswith("-one")
    assert shown[long[0]].startswith("a-drafter-with-a…")


def test_a_comparison_draws_every_way_though_their_folders_are_called_alike(
    tmp_path: Path,
) -> None:
    document: dict[str, Any] = copy.deepcopy(COMPARISON)
    (suite,) = document["suites"].values()
    for entries in (document["contenders"], suite["contenders"]):
        for entry, who in zip(entries, ("a/final", "b/final", "plain"), strict=True):
            entry["name"] = who
    atomic_write_json(tmp_path / "compare.json", document)
    first, section, _ = build(find_all([tmp_path]))
    positions = next(p for p in section.pictures if p.name.startswith("compare-positions"))
    assert positions.alt == "a/final: 0.90 0.50; b/final: 0.90 0.50"
    (table,) = (block for block in first.blocks if isinstance(block, Table))
    assert [row[0].splitlines()[0] for row in table.rows] == ["a/final", "b/final"]


def test_sections_of_one_title_are_told_apart_where_one_goes_to_them() -> None:
    made: dict[str, str | None] = {"dspark": "1", "git_revision": None}
    blocks = (Prose("words"),)
    sections = [Section("Speed: a", blocks, source) for source in ("x/b.json", "y/b.json")]
    text = page.write([*sections, Section("Training: a", blocks, "t.json")], "", made)
    links = re.findall(r'<li><a href="#s\d">(.*?)</a>', text)
    assert links == ["Speed: a (x/b.json)", "Speed: a (y/b.json)", "Training: a"]


# ------------------------------------------------------------------ kills


def _killed(work: Any, number: int) -> int:
    """Run `work` in a child that dies while its `number`-th file is half written; 0: never."""
    seen, sync = [0], files._sync

    def watched(path: Path, flags: int) -> None:
        seen[0] += Path(path).is_file()
        if seen[0] == number and Path(path).is_file():
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path, flags)

    def child() -> None:
        files._sync = watched
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def _held(folder: Path) -> dict[str, bytes]:
    """What a reader finds; names that begin with a dot are nobody's."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


@pytest.mark.slow
def test_a_kill_leaves_every_file_of_a_report_old_or_new(tmp_path: Path) -> None:
    source, out, new = tmp_path / "costs.json", tmp_path / "out", tmp_path / "new"
    later = {**COSTS, "target": "another target", "context_tokens": 77}
    atomic_write_json(source, COSTS)
    run_report([source], out)
    old = _held(out)
    atomic_write_json(source, later)
    run_report([source], new)
    whole = _held(new)
    assert set(old) == set(whole) >= {"report.html", "report.json", "report.md"}
    for number in range(1, len(whole) + 1):
        assert _killed(lambda: run_report([source], out), number) == -signal.SIGKILL
        held = _held(out)
        assert set(held) == set(whole)
        assert all(held[name] in (old[name], whole[name]) for name in held)
        assert sum(held[name] != whole[name] for name in held) > 0, "the last file was not written"
        read_json(out / "report.json")
    assert _killed(lambda: run_report([source], out), 0) == 0
    assert _held(out) == whole


def test_a_kill_leaves_the_old_evaluation(tmp_path: Path) -> None:
    """eval.json is the first file that it writes, acceptance.png the second."""
    pair, out = write_pair(tmp_path), tmp_path / "out"

    def evaluate(tokens: int) -> None:
        run_eval(
            EvalOptions(
                draft=pair.draft, target=pair.target, suites=(str(pair.prompts),), n_prompts=1,
                max_new_tokens=tokens, threads=1, out=out, quiet=True,
            )
        )  # fmt: skip

    evaluate(4)
    old = _held(out)
    assert set(old) == {"eval.json", "acceptance.png"}
    assert _killed(lambda: evaluate(6), 1) == -signal.SIGKILL
    assert _held(out) == old
    assert _killed(lambda: evaluate(6), 2) == -signal.SIGKILL
    held = _held(out)
    assert held["acceptance.png"] == old["acceptance.png"]
    (suite,) = read_json(out / "eval.json")["suites"].values()
    assert suite["max_new_tokens"] == 6
