"""Answers at temperature 0 beside sampled ones: which prompts, and what they are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from dspark.distill import answers
from dspark.distill.answers import answer_prompts
from dspark.distill.prompts import read_prompts
from dspark.distill.responses import ResponseSettings
from dspark.distill.rows import RowSet
from dspark.runtime.loading import load_target
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from tests.distill_setup import ALONE

PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "train.jsonl"


def answered(folder: Path, greedy: float, batch_size: int = 2) -> RowSet:
    nano = load_target("nano")
    settings = ResponseSettings(max_new_tokens=12, batch_size=batch_size)
    assert nano.tokenizer is not None
    return answer_prompts(
        folder, nano.target, nano.tokenizer, read_prompts([PROMPTS]).rows[:8], settings,
        greedy=greedy, target_digest="nano", processes=ALONE, console=Console(file=io.StringIO()),
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
