"""Recorded frames under policies: the measurement runs, and says what differs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dspark.runtime.loading import load_target
from dspark.runtime.records import Generation
from dspark_eval import frame_policies
from dspark_eval.environment import busy_warnings
from dspark_eval.frame_document import few_warnings
from dspark_eval.frame_runs import Run, divergences
from dspark_eval.reporting import run_report
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


def test_its_figures_follow_from_the_counts_in_the_file(
    tmp_path: Path,
    nano_drafter: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "found.json"
    arguments = ["--draft", str(nano_drafter), "--device", "cpu", "--dtype", "float32"]
    arguments += ["--n-prompts", "3", "--new", "4", "--max-length", "200", "--json", str(out)]
    arguments += ["--suite", "nano-problems", "--sizes", "--ways", "fixed", "--temperature", "1"]
    assert frame_policies.main(arguments) == 0
    found = json.loads(out.read_text())
    assert (found["schema_version"], found["seed"]) == (1, 0)
    assert found["n_prompts"] == {"nano-problems": 3}
    assert {"date", "git_revision", "load_average_1m", "torch"} <= set(found["environment"])
    (run,) = found["runs"]
    ways = run["sets"]["nano-problems"]
    assert list(ways) == ["plain", "fixed 4"]
    plain, fixed = ways.values()
    for way in ways.values():
        assert len(way["by_prompt"]["tokens"]) == len(way["by_batch"]["seconds"]) == 3
        assert way["by_prompt"]["tokens"] == way["by_batch"]["tokens"]
        told = sum(way["by_batch"]["tokens"]) / sum(way["by_batch"]["seconds"])
        assert told == pytest.approx(way["tokens_per_s"])
    expected = resampled([fixed["by_batch"], plain["by_batch"]])
    assert fixed["speedup_ci95"] == pytest.approx(expected)
    assert fixed["speedup"] == pytest.approx(fixed["tokens_per_s"] / plain["tokens_per_s"])
    counts = fixed["by_prompt"]
    assert counts["emitted"] == counts["tokens"], "what rounds give is all but the first token"
    assert fixed["accepted_length"] == sum(counts["emitted"]) / sum(counts["rounds"])
    told, warned = capsys.readouterr()
    assert "n=3: fixed 4" in told
    assert "(n=3)" in told, "prompts whose experts were counted"
    assert "few prompts (3): below 30" in warned
    page = reported(out)
    low, high = fixed["speedup_ci95"]
    assert f"{fixed['speedup']:.2f}x [{low:.2f}, {high:.2f}]" in page
    assert "few prompts (3): below 30" in page
    assert "nano-problems, fixed 4, batch 1, T = 1" in page, "the headline's row"


def reported(measured: Path) -> str:
    """What `dspark report` makes of a file, as Markdown."""
    run_report([measured], measured.parent / "page")
    return (measured.parent / "page" / "report.md").read_text()


def resampled(ways: list[dict[str, list[float]]]) -> list[float]:
    """The interval of a ratio of rates, drawn prompt by prompt from the counts of a file."""
    ours, theirs = ways
    n = len(ours["seconds"])
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=2000)
    rates = [(counts @ way["tokens"]) / (counts @ way["seconds"]) for way in (ours, theirs)]
    return [float(x) for x in np.percentile(rates[0] / rates[1], (2.5, 97.5))]


def test_few_are_told() -> None:
    assert not few_warnings("words", 30, 1)
    assert "few prompts (29)" in few_warnings("words", 29, 1)[0]
    assert "few batches (8 of 4 seats)" in few_warnings("words", 32, 4)[0]
    assert not few_warnings("words", 120, 4)


def test_a_busy_machine_is_told() -> None:
    assert not busy_warnings({"load_average_1m": 2.0, "cpu_cores": 2})
    assert not busy_warnings({"load_average_1m": None, "cpu_cores": 2})
    (text,) = busy_warnings({"load_average_1m": 7.5, "cpu_cores": 2})
    assert "load 7.5 on 2 cores" in text


def test_a_text_that_differs_is_named_with_its_gap() -> None:
    target = load_target("nano").target

    def run(*tokens: int) -> Run:
        return Run(texts=[Generation(list(tokens), "length", 0.0, 0.0, [])])

    (found,) = divergences(target, [[5, 6]], run(7, 8, 9), run(7, 9, 9))
    assert (found["prompt"], found["position"]) == (0, 1)
    assert found["top2_gap"] > 0
    assert not found["near_tie"], "in float32 no rounding explains it"
    assert not divergences(target, [[5, 6]], run(7, 8), run(7, 8))
