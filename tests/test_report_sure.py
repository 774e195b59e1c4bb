"""A report shows what a figure rests on: n, interval, few; no mark looks surer than it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark.files import atomic_write_json
from dspark_eval.plots import draw_positions
from dspark_eval.report_notes import outcome_lines
from dspark_eval.reporting import build
from dspark_eval.reporting.acceptance import evaluation
from dspark_eval.reporting.blocks import Section, Table
from dspark_eval.reporting.comparison import draw_intervals
from dspark_eval.reporting.sources import find_all
from dspark_eval.reporting.throughput import Rate, draw_throughput, throughput
from tests.report_documents import EVAL, RUN


def sure(value: float, n: float, n_prompts: int, ci95: list[float] | None) -> dict[str, Any]:
    return {
        "value": value,
        "n": n,
        "n_prompts": n_prompts,
        "spread": None,
        "ci95": ci95,
        "few": n_prompts < 30,
    }


ONE_ROUND = {
    **RUN,
    "conditional_acceptance": [0.9, 1.0],
    "positions": {
        "conditional_acceptance": [
            sure(0.9, 400, 60, [0.85, 0.95]),
            sure(1.0, 1, 1, [0.21, 1.0]),
        ]
    },
}


def tables(section: Section) -> dict[str, Table]:
    return {block.caption: block for block in section.blocks if isinstance(block, Table)}


def test_a_position_of_one_round_is_hollow_and_its_shade_is_wide() -> None:
    axes = Figure().subplots()
    draw_positions(axes, {"a": ONE_ROUND})
    marked = {
        line.get_fillstyle(): list(zip(*line.get_data(), strict=True))
        for line in axes.lines
        if line.get_linestyle() == "None"
    }
    assert marked == {"full": [(1, 0.9)], "none": [(2, 1.0)]}
    (shade,) = axes.collections
    low = min(y for x, y in shade.get_paths()[0].vertices if x == 2)
    assert low == 0.21


def test_every_share_of_an_evaluation_stands_with_what_it_is_of() -> None:
    suite = {
        **next(iter(EVAL["suites"].values())),
        **{key: ONE_ROUND[key] for key in ("conditional_acceptance", "positions")},
        "estimates": {
            "acceptance_rate": sure(0.5, 120, 40, [0.4, 0.6]),
            "loop_share": sure(0.0, 40, 40, [0.0, 0.088]),
            "accepted_length_without_loops": sure(2.5, 40, 40, [2.4, 2.6]),
        },
        "task": sure(0.75, 4, 4, [0.3, 0.95]),
        "plain": {"task": sure(1.0, 2, 2, [0.34, 1.0])},
        "level_estimates": {
            name: sure(0.25, 8, 4, [0.1, 0.6])
            for name in ("all_accepted", "sibling", "corrected", "cut", "plain")
        },
        "bands": {
            "low": {
                "share": 0.6, "reached": 2, "acceptance": 1.0, "acceptance_ci95": [0.34, 1.0],
                "n_prompts": 2, "few": True, "levels": None,
            }
        },
        "entropy": {
            "positions": [],
            "bins": [
                {
                    "low": 0.0, "high": 0.1, "drafted": 9, "share": 1.0, "reached": 7,
                    "acceptance": 1.0, "acceptance_ci95": [0.9, 1.0], "n_prompts": 35, "few": False,
                }
            ],
        },
    }  # fmt: skip
    found = tables(evaluation("e.json", {**EVAL, "suites": {"s": suite}}))
    (row,) = found["Each prompt set"].rows
    said = dict(zip(found["Each prompt set"].heads, row, strict=True))
    assert said["without loops"] == "2.50 [2.40, 2.60]"
    assert said["accepted drafts"] == "50.0 % [40.0, 60.0]"
    assert said["loops"] == "0.0 % [0.0, 8.8]"
    assert said["exact answers"] == "75.0 % [30.0, 95.0]\nof 4"
    assert said["exact, plain"] == "100.0 % [34.0, 100.0]\nof 2"
    positions = found["Conditional acceptance by draft position"].rows[0]
    assert positions == ("s", "0.90 [0.85, 0.95]\nof 400", "1.00 [0.21, 1.00]\nof 1, few")
    assert found["How rounds ended"].rows[0][1] == "25.0 % [10.0, 60.0]"
    assert found["Drafts by band of confidence"].rows == (
        ("s", "low", "60.0 %", "2, few", "2", "100.0 % [34.0, 100.0]"),
    )
    assert found["Drafts by entropy of the drafter"].rows == (
        ("s", "0 to 0.1", "100.0 %", "35", "7", "100.0 % [90.0, 100.0]"),
    )


def test_a_band_of_two_positions_says_so_on_the_terminal() -> None:
    band = {
        "share": 0.629, "reached": 2, "acceptance": 1.0, "acceptance_ci95": [0.34, 1.0],
        "n_prompts": 2, "few": True, "levels": None,
    }  # fmt: skip
    run = {"levels": {"cut": 1.0}, "bands": {"low": band}, "rows_per_round": 9,
           "draft_length_mean": 7}  # fmt: skip
    *_, said = outcome_lines(run, "nano")
    assert said.endswith("low 62.9 % (accepted 100.0 % of 2, few: of 2 prompts)")


def test_a_model_of_one_batch_is_seen_and_measured_groups_are_counted() -> None:
    axes = Figure().subplots()
    draw_throughput(
        axes,
        [
            Rate(1, 90.0, 180.0, measured=False, origin="s", n=40),
            Rate(1, 80.0, 150.0, measured=True, origin="s", n=40, groups=40),
            Rate(2, 120.0, 250.0, measured=True, origin="s", n=40, groups=20),
        ],
    )
    modelled = [line for line in axes.lines if "modelled" in str(line.get_label())]
    assert [line.get_marker() for line in modelled] == ["_", "_"]
    assert [text.get_text() for text in axes.texts] == ["40 groups", "20 groups"]


def test_groups_and_the_interval_of_a_speed_up_stand_in_the_table() -> None:
    suite = next(iter(EVAL["suites"].values()))
    served = [{"concurrency": 2, "groups": 12, "plain": 90.0, "speculative": 180.0,
               "speedup_ci95": [1.5, 2.5]}]  # fmt: skip
    section = throughput([("eval", {**EVAL, "suites": {"s": {**suite, "served": served}}})])
    assert section is not None
    (found,) = tables(section).values()
    measured = [row for row in found.rows if row[-1] == "measured"]
    assert [(row[3], row[-2]) for row in measured] == [("12", "2.00x [1.50, 2.50]")]


def test_headline_rows_of_one_drafter_say_in_what_they_differ(tmp_path: Path) -> None:
    """Draft length and protocol differ, the seed does not; two of one setting name their file."""
    paper = {**EVAL, "draft_length": 7, "protocol": {"name": "dspark-paper"}}
    for name, value in (("a", EVAL), ("b", paper), ("c", paper)):
        atomic_write_json(tmp_path / f"{name}.json", value)
    (head, *_) = build(find_all([tmp_path]))
    firsts = [row[0].split("\n")[-1] for row in tables(head)["Everything that was decoded"].rows]
    assert firsts[0] == "draft length 3, no protocol"
    for name, first in zip("bc", firsts[1:], strict=True):
        assert first == f"draft length 7, protocol dspark-paper, {tmp_path / name}.json"


def test_the_reference_line_does_not_run_through_a_number() -> None:
    """Values stand right of the axes, in a column of their own."""
    axes = Figure().subplots()
    draw_intervals(axes, [("a", 2.0, [1.9, 2.1]), ("b", 2.0, None)], "accepted length")
    assert [text.get_text() for text in axes.texts] == ["2.00", "2.00"]
    assert all(text.xy[0] > 1 for text in axes.texts)
