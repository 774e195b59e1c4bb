"""The table of a study: paired intervals, spread over seeds, half-done folders, Markdown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark.errors import UserError
from dspark.files import read_json
from dspark_eval.study.markdown import markdown, short_count
from dspark_eval.study.table import build_table, paired_ratio
from tests.study_folder import write_study


def _results(emitted: np.ndarray, rounds: np.ndarray) -> list[dict[str, list[int]]]:
    """One result for each seed from [seeds, prompts]."""
    return [
        {"emitted": e.tolist(), "rounds": r.tolist()} for e, r in zip(emitted, rounds, strict=True)
    ]


def _noisy(
    generator: np.random.Generator, gain: float, prompts: int = 80
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds [2, n], and tokens of two arms: the prompt moves both, `gain` the first alone."""
    rounds = np.full((2, prompts), 20)
    topic = generator.uniform(1.5, 4.0, size=prompts)
    theirs = np.round(rounds * topic)
    noise = generator.normal(0, 0.03, size=(2, prompts))
    ours = np.round(rounds * topic * (gain + noise))
    return rounds, ours, theirs


# ------------------------------------------------------------------ the paired interval


def test_the_ratio_is_of_sums_over_seeds_and_prompts() -> None:
    ours = [{"emitted": [30, 10], "rounds": [10, 10]}, {"emitted": [20, 20], "rounds": [10, 5]}]
    theirs = [{"emitted": [15, 15], "rounds": [10, 10]}]
    found = paired_ratio(ours, theirs)
    assert found["value"] == pytest.approx((80 / 35) / (30 / 20))


def test_an_arm_against_itself_and_against_half_of_itself_has_no_spread() -> None:
    generator = np.random.default_rng(0)
    rounds = generator.integers(5, 30, size=(3, 20))
    emitted = rounds * generator.integers(1, 6, size=(1, 20))
    same = paired_ratio(_results(emitted, rounds), _results(emitted, rounds))
    assert [same[k] for k in ("value", "low", "high")] == pytest.approx([1, 1, 1])
    double = paired_ratio(_results(2 * emitted, rounds), _results(emitted, rounds))
    assert [double[k] for k in ("value", "low", "high")] == pytest.approx([2, 2, 2])


def test_the_interval_is_that_of_a_bootstrap_written_out() -> None:
    """Prompts drawn one by one with another generator; percentiles of 4,000 draws agree to 0.01,
    three standard errors of a percentile of 2,000 draws at this spread."""
    generator = np.random.default_rng(1)
    rounds, ours, theirs = _noisy(generator, 1.1)
    found = paired_ratio(_results(ours, rounds), _results(theirs, rounds))
    draws = []
    for _ in range(4000):
        chosen = generator.integers(0, rounds.shape[1], size=rounds.shape[1])
        sums = [float(side[:, chosen].sum()) for side in (ours, rounds, theirs, rounds)]
        draws.append((sums[0] / sums[1]) / (sums[2] / sums[3]))
    low, high = np.percentile(draws, (2.5, 97.5))
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=0.01)


def test_a_planted_gain_is_found_as_often_as_promised() -> None:
    """40 studies with a gain of 4 %: at least 33 intervals hold it (95 % promised; P < 0.4 % for
    fewer at 92 %, what a percentile bootstrap of 80 prompts keeps) and none takes it for nothing,
    though prompts differ by a factor of 2.7: pairing takes that out."""
    generator = np.random.default_rng(2)
    found = []
    for _ in range(40):
        rounds, ours, theirs = _noisy(generator, 1.04)
        found.append(paired_ratio(_results(ours, rounds), _results(theirs, rounds)))
    assert sum(f["low"] <= 1.04 <= f["high"] for f in found) >= 33
    assert all(f["low"] > 1 for f in found)


def test_one_prompt_gives_a_ratio_and_no_interval() -> None:
    found = paired_ratio([{"emitted": [4], "rounds": [2]}], [{"emitted": [2], "rounds": [2]}])
    assert found == {"value": 2.0, "low": None, "high": None}


# ------------------------------------------------------------------ the table

COUNTS = {
    "left": [([30, 10], [10, 10]), ([20, 20], [10, 10])],
    "right": [([40, 20], [10, 10]), ([30, 30], [10, 10])],
}


def test_table_of_a_folder_made_by_hand(tmp_path: Path) -> None:
    table = build_table(write_study(tmp_path, COUNTS, long=True))
    assert table == read_json(tmp_path / "table.json")
    left, right = table["rows"]
    assert left["results"][0]["accepted_length_per_seed"] == [2.0, 2.0]
    assert right["results"][0]["accepted_length"] == pytest.approx(3.0)
    assert left["results"][0]["ratio"] is None
    assert right["results"][0]["ratio"]["value"] == pytest.approx(1.5)
    assert left["results"][0]["conditional_acceptance"] == [1.0, None]
    assert (left["parameters"], right["parameters"]) == (1000, 1001)
    assert (left["steps"], left["train_s"]) == (10, 4.0)
    assert left["teacher_forced_accepted_length"] == 1.5
    assert [(e["context"], e["tokens"], e["accepted_length"]) for e in right["long"]] == [
        ("none", 0, 3.0), ("chat", 512, 3.0), ("padded", 512, 3.0)
    ]  # fmt: skip
    assert table["missing"] == []


def test_arms_are_compared_on_the_seeds_that_both_have(tmp_path: Path) -> None:
    counts = {**COUNTS, "late": [COUNTS["right"][0], ([5, 5], [10, 10])]}
    out = write_study(tmp_path, counts)
    (out / "left" / "seed-1" / "measure.json").unlink()
    (out / "right" / "seed-0" / "measure.json").unlink()
    table = build_table(out)
    _, right, late = (row["results"][0] for row in table["rows"])
    assert right["ratio"] is None  # seed 1 alone, which the reference has not
    assert late["ratio"]["value"] == pytest.approx((60 / 20) / (40 / 20))
    assert late["accepted_length"] == pytest.approx(1.75)  # of both its seeds all the same
    assert table["missing"] == ["left seed 1", "right seed 0"]
    shown = [line.split(" | ")[6] for line in markdown(table).splitlines() if " M | 10 | " in line]
    assert shown[:2] == ["1", "-"]
    assert shown[2].startswith("1.500 [")


def test_markdown_says_how_before_it_says_what(tmp_path: Path) -> None:
    text = markdown(build_table(write_study(tmp_path, COUNTS, long=True)))
    assert text == (tmp_path / "table.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0] == "# Which hand?"
    assert "2 seed(s), draft length 2, 2 held-out prompts" in lines[2]
    assert "Ratio: against `left` on problems, T = 0, 95 %" in lines[2]
    (left,) = [line for line in lines if line.startswith("| left | 0.001 M")]
    assert left.split(" | ")[2:] == [
        "10", "4", "2.000 (2.00 to 2.00)", "1.50", "1", "1.00 - |"
    ]  # fmt: skip
    assert "left: the left one; right: the right one." in lines
    assert "| exact answers of the target | 100 % | 25 % | 100 % |" in lines
    assert "| right | 3.00 | 3.00 | 3.00 |" in lines
    assert "| arm | 1000: ms | 4k: ms | 1000: MB | 4k: MB |" in lines
    assert "| left | 1.00 | 1.00 | 3.00 | 6.10 |" in lines
    # every table has as many cells in each row as in its head
    tables = [[row for row in block.splitlines() if row] for block in text.split("\n\n")]
    for rows in (rows for rows in tables if rows[0].startswith("|")):
        assert len({row.count("|") for row in rows}) == 1


def test_runs_that_are_not_measured_are_left_out_and_named(tmp_path: Path) -> None:
    write_study(tmp_path, COUNTS)
    (tmp_path / "right" / "seed-1" / "measure.json").unlink()
    table = build_table(tmp_path)
    assert table["missing"] == ["right seed 1"]
    assert table["rows"][1]["seeds"] == [0]
    assert "Not measured yet: right seed 1." in (tmp_path / "table.md").read_text(encoding="utf-8")
    for seed in (0, 1):
        (tmp_path / "left" / f"seed-{seed}" / "measure.json").unlink()
    with pytest.raises(UserError, match="no run of the reference, left, is measured yet"):
        build_table(tmp_path)


def test_a_folder_without_a_study(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"study\.json: no study here"):
        build_table(tmp_path)


def test_counts_are_short_only_where_that_is_exact() -> None:
    assert [short_count(n) for n in (0, 500, 512, 1024, 1500, 16384, 2**20)] == [
        "0", "500", "512", "1k", "1500", "16k", "1M"
    ]  # fmt: skip
