"""Answers at temperature 0 beside sampled ones: which prompts, and what they are."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dspark.distill import answers
from dspark.distill.answers import answer_prompts
from dspark.distill.config import load_config
from dspark.distill.prompts import read_prompts
from dspark.distill.responses import ResponseSettings
from dspark.distill.rows import RowSet
from dspark.distill.run import run_distill
from dspark.runtime.loading import load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark_eval.baselines.rows import read_run
from tests.distill_setup import ALONE
from tests.tiny_pair import write_pair

PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "train.jsonl"


def answered(
    folder: Path, greedy: float, batch_size: int = 2, said: io.StringIO | None = None
) -> RowSet:
    nano = load_target("nano")
    settings = ResponseSettings(max_new_tokens=12, batch_size=batch_size)
    assert nano.tokenizer is not None
    return answer_prompts(
        folder, nano.target, nano.tokenizer, read_prompts([PROMPTS]).rows[:8], settings,
        greedy=greedy, target_digest="nano", processes=ALONE,
        console=Console(file=said or io.StringIO()),
    )  # fmt: skip


def test_half_of_the_parts_hold_what_plain_decoding_says_at_temperature_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "PART", 2)
    sampled, mixed = answered(tmp_path / "a", 0.0), answered(tmp_path / "b", 0.5)
    assert len(sampled.rows) == len(mixed.rows) == 8
    target = load_target("nano").target
    for at, (row, other) in enumerate(zip(mixed.rows, sampled.rows, strict=True)):
        asked = row.loss_mask.index(True)
        greedy = plain_generate(
            target, row.ids[:asked], max_new_tokens=12, sampling=SamplingParams()
        ).tokens
        if at // 2 % 2:  # parts 1 and 3 of four
            assert list(row.ids[asked:]) == greedy
        else:
            assert row.ids == other.ids


def test_a_part_holds_as_many_prompts_as_are_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "PART", 2)
    answered(tmp_path / "small", 0.0)
    answered(tmp_path / "large", 0.0, batch_size=8)
    assert len(list((tmp_path / "small").glob("*.jsonl"))) == 4
    assert len(list((tmp_path / "large").glob("*.jsonl"))) == 1


def test_a_share_that_whole_parts_cannot_give_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    answered(tmp_path / "one", 0.5, batch_size=8, said=said)
    assert "at temperature 0: 0 of 8 prompts (data.greedy 0.5)" in said.getvalue()
    monkeypatch.setattr(answers, "PART", 2)
    answered(tmp_path / "four", 0.5, said=said)
    assert "at temperature 0: 4 of 8 prompts" in said.getvalue()


def test_baselines_read_the_very_rows_of_a_run_with_greedy_answers(tmp_path: Path) -> None:
    """A run whose answers are kept under keys of their own temperature is not refused."""
    pair = write_pair(tmp_path)
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(6)))
    settings = {
        "target.name": str(pair.target), "data.prompts": [str(prompts)], "data.greedy": 1.0,
        "data.held_out": 2, "data.max_new_tokens": 12, "data.max_length": 64,
        "train.max_steps": 1, "train.epochs": 1, "train.anchors": 2, "eval.prompts": 1,
        "eval.max_new_tokens": 4, "eval.draft_length": 2, "drafter.block_size": 2,
        "drafter.num_heads": 2, "drafter.num_kv_heads": 1, "drafter.head_dim": 16,
        "drafter.intermediate_size": 16, "drafter.markov_rank": 4, "drafter.mask_token_id": 0,
        "out.dir": str(tmp_path / "run"),
    }  # fmt: skip
    run_distill(load_config(None, settings), console=Console(file=io.StringIO()))
    kept = (tmp_path / "run" / "rows" / "part-000-of-001.jsonl").read_bytes()
    data = read_run(tmp_path / "run")
    assert len(data.rows.training) + len(data.rows.held_out) == 6
    assert (tmp_path / "run" / "rows" / "part-000-of-001.jsonl").read_bytes() == kept
