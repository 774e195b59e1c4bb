"""Repeats in closed form, and where a text starts to be a loop."""

from __future__ import annotations

from dspark.loops import is_loop, repeated_share


def test_repeated_share_in_closed_form() -> None:
    assert repeated_share([1, 2, 3], 4) == 0.0
    assert repeated_share(range(30), 4) == 0.0
    assert repeated_share([7] * 23, 4) == 1 - 1 / 20
    assert repeated_share([1, 2, 3, 4] * 5, 4) == 1 - 4 / 17
    assert repeated_share([1, 2, 3, 4] * 20) == 1 - 4 / 73


def test_a_loop_repeats_more_than_three_tenths_of_its_8_grams() -> None:
    """37 tokens and the first r of them again: r - 7 repeats among 30 + r 8-grams."""
    for again, loops in ((7, False), (22, False), (23, True), (37, True)):
        text = [*range(37), *range(again)]
        assert repeated_share(text) == 1 - 37 / (30 + again)
        assert is_loop(text) == loops
    assert not is_loop([])
