"""Counted nouns: one thing has no s."""

from __future__ import annotations

import pytest

from dspark.wording import counted


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 siblings"), (1, "1 sibling"), (2, "2 siblings"), (11, "11 siblings")],
)
def test_one_thing_has_no_s(count: int, words: str) -> None:
    assert counted(count, "sibling") == words


def test_a_large_number_may_be_grouped() -> None:
    assert counted(12_345, "token", style=",") == "12,345 tokens"
