"""What the notebooks compute: classes of tokens by hand, orders against what must hold of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dspark.runtime.records import ALL_ACCEPTED, CORRECTED, SIBLING, Generation, RoundRecord
from dspark_eval.linearisation import order_errors
from dspark_eval.notebook import coloured, table
from dspark_eval.token_classes import by_class, hardest, token_class

TEXT = {1: " 12", 2: "pens", 3: ".", 4: "\n", 5: "<end>"}


def record(accepted: int, level: int, verified: int = 2) -> RoundRecord:
    return RoundRecord(
        verified, verified, accepted, accepted + 1, level, 0.0, 0.0, 0.0, (), (0.0,) * verified
    )


def answer() -> Generation:
    """first pens | accepted 12, pens, bonus . | accepted 12, corrected pens | corrected 12"""
    tokens = [2, 1, 2, 3, 1, 2, 1]
    rounds = [record(2, ALL_ACCEPTED), record(1, CORRECTED), record(0, CORRECTED)]
    return Generation(tokens, "length", 0.0, 0.0, rounds)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" 12", "digits"),
        ("pens", "words"),
        ("é", "words"),
        (" .", "punctuation"),
        ("\n ", "white space"),
    ],
)
def test_classes_by_the_first_visible_character(text: str, name: str) -> None:
    assert token_class(text) == name
    assert token_class(text, special=True) == "special"


def test_acceptance_by_class_by_hand() -> None:
    """12: accepted, accepted, corrected; pens: accepted, corrected; the bonus full stop is out."""
    found = {c.name: c for c in by_class([answer()], lambda token: token_class(TEXT[token]))}
    assert {name: (c.judged, c.acceptance) for name, c in found.items()} == {
        "digits": (3, pytest.approx(2 / 3)),
        "words": (2, 0.5),
    }
    assert sum(c.share for c in found.values()) == pytest.approx(1)


def test_a_sibling_is_a_miss_of_the_primary() -> None:
    """first pens | rejected, sibling 12, its bonus full stop"""
    rounds = [replace(record(0, SIBLING), emitted=2, sibling=1)]
    (found,) = by_class(
        [Generation([2, 1, 3], "length", 0.0, 0.0, rounds)], lambda token: token_class(TEXT[token])
    )
    assert (found.name, found.judged, found.acceptance) == ("digits", 1, 0.0)


def test_corrections_and_what_stood_before_them() -> None:
    assert hardest([answer(), answer()], TEXT.__getitem__) == [
        (" 12", "pens", 2),
        ("pens", " 12", 2),
    ]


def test_the_last_order_is_exact_and_orders_improve_where_the_norm_is_below_one() -> None:
    found = order_errors(correlation=0.1, beta=0.3)
    assert found[0].order == "gla"
    assert all(row.norm < 1 for row in found)
    errors = [row.error for row in found[1:]]
    assert errors[-1] == 0
    assert errors == sorted(errors, reverse=True)
    assert found[0].error > errors[0]


def test_an_order_can_be_worse_than_the_one_below_where_keys_are_alike() -> None:
    """Keys nearly equal, beta one, no decay: |A| is about G / 2, and the series swings first."""
    found = order_errors(correlation=0.98, beta=1.0, low=0.0)
    errors = [row.error for row in found[1:]]
    assert found[0].norm > 1
    assert errors[1] > errors[0]
    assert errors[-1] == 0


def test_values_out_of_range() -> None:
    with pytest.raises(ValueError, match="beta 2"):
        order_errors(beta=2.0)


def test_how_a_token_came_to_be_shows_without_colours() -> None:
    """Pages of code hosts strip styles: what is left are tags, a different one for each kind."""
    kinds = ["accepted", "sibling", "corrected", "bonus", "first"]
    sample = {"text": list("abcde"), "kind": kinds, "confidence": [None] * 5}
    bare = re.sub(r"<(/?)span[^>]*>", "", re.sub(r' style="[^"]*"', "", coloured(sample).data))
    answer = bare.split("</p><p>")[1].removesuffix("</p>")
    assert answer == "a<i>b</i><ins>c</ins><b>d</b><small>e</small>"


def test_cells_are_escaped() -> None:
    sample = {"text": ["<b>x"], "kind": ["accepted"], "confidence": [0.5]}
    shown = coloured(sample).data
    assert "&lt;b&gt;x" in shown
    assert "confidence 50 %" in shown
    assert "a\\|b" in table(["x"], [["a|b"]]).data
