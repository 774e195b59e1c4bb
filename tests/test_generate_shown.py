"""How a text is shown: marks and colours of every token, and pieces as soon as they are certain."""

from __future__ import annotations

import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark.generation.reader import Piece, Reader
from dspark.generation.screen import BRACKETS, Marked, marked
from dspark.runtime.records import Emitted, EmittedKind
from dspark.runtime.stops import StopStrings
from tests import chat_tokenizers, generate_setup, tiny_pair
from tests.generate_setup import QUESTION, Run

pair, run = generate_setup.pair, generate_setup.run
document = generate_setup.document

BROKEN = "\N{REPLACEMENT CHARACTER}"


def _kinds(shown: str) -> list[tuple[str, str]]:
    """Kind and text of each token in brackets, from what a pipe receives."""
    pattern = "|".join(
        rf"{re.escape(left)}(?P<{kind}>.*?){re.escape(right)}"
        for kind, (left, right) in BRACKETS.items()
        if left
    )
    return [(str(m.lastgroup), m[str(m.lastgroup)]) for m in re.finditer(pattern, shown)]


def test_marks_say_where_each_token_came_from(
    run: Run, document: Callable[..., dict[str, Any]], pair: tiny_pair.TinyPair
) -> None:
    """Letters and spaces only, so that the text holds no bracket of its own."""
    tokenizer = chat_tokenizers.k3()
    words = [" apples", " total", " is", " step", "a", "The"]
    bias = [f"{tokenizer(word, add_special_tokens=False).input_ids[0]}:40" for word in words]
    options = ["--logit-bias", *bias, "--siblings", "2"]
    found = document(*options)
    code, out, _ = run(
        QUESTION, "--draft", pair.draft, "--max-new-tokens", "24", "--show-draft", *options
    )
    assert code == 0
    legend, shown = out.split("\n", 1)
    assert [kind for kind, _ in _kinds(legend)] == ["accepted", "sibling", "corrected", "bonus"]
    marks = [(e["kind"], e["text"]) for e in found["emitted"] if e["text"]]
    assert marks[0][0] == "first"
    assert _kinds(shown) == [(kind, text) for kind, text in marks if kind not in ("first", "plain")]
    assert len({kind for kind, _ in marks}) > 2
    for emitted in found["emitted"]:
        assert (emitted["confidence"] is not None) == (emitted["kind"] == "accepted")
    numbers = [int(n) for n in re.findall(r"\)(\d+)", shown)]
    assert numbers == [
        min(99, int(100 * e["confidence"])) for e in found["emitted"] if e["kind"] == "accepted"
    ]


@pytest.mark.parametrize(
    ("kind", "text", "confidence", "colour", "brackets"),
    [
        ("accepted", " a", 0.974, " a⁹⁷", "( a)97"),
        ("accepted", "a\n\nb", 0.999, "a⏎⁹⁹\n⏎\nb", "(a\\n\\nb)99\n\n"),
        ("accepted", "a", None, "a", "(a)"),
        ("sibling", "\n", None, "⏎\n", "<\\n>\n"),
        ("corrected", "é", None, "é", "[é]"),
        ("bonus", "x", None, "x", "{x}"),
        ("first", "x", None, "x", "x"),
        ("plain", "x\n", None, "x⏎\n", "x\n"),
    ],
)
def test_marks_of_each_kind(
    kind: EmittedKind, text: str, confidence: float | None, colour: str, brackets: str
) -> None:
    piece = Piece(text, Emitted(7, kind, confidence))
    assert marked(piece, colour=True).plain == colour
    assert marked(piece, colour=False).plain == brackets


def test_colours_on_a_terminal_and_brackets_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        out = io.StringIO()
        screen = Marked(out)
        screen.show(Piece("word", Emitted(7, "corrected")))
        screen.finish()
        return out.getvalue()

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31mword\x1b[0m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[word]" in shown()
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b" not in shown()


def test_the_picture_is_an_svg_of_the_marks_that_needs_no_network(
    run: Run, pair: tiny_pair.TinyPair, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "a.svg"
    code, _, _ = run(
        QUESTION, "--draft", pair.draft, "--max-new-tokens", "9", "--show-draft", "--stats",
        "--svg", file,
    )  # fmt: skip
    assert code == 0
    text = file.read_text(encoding="utf-8")
    assert "@font-face" not in text
    assert set(re.findall(r"https?://[^\s\"]+", text)) <= {
        "http://www.w3.org/2000/svg", "https://www.textualize.io",
    }  # fmt: skip
    words = "".join(ElementTree.fromstring(text).itertext()).replace("\xa0", " ")
    for part in ("dspark generate", "--show-draft --stats", "bonus of the target", "9 tokens"):
        assert part in words
    assert str(pair.draft) not in words


def _reader(stops: Sequence[str], ends: Sequence[int] = ()) -> tuple[Reader, list[str]]:
    shown: list[str] = []
    tokenizer = chat_tokenizers.k3()
    search = StopStrings(stops, tokenizer).start()
    return Reader(search, ends, lambda piece: shown.append(piece.text)), shown


def _emitted(text: str) -> list[Emitted]:
    ids = chat_tokenizers.k3()(text, add_special_tokens=False).input_ids
    return [Emitted(token, "plain") for token in ids]


def test_text_is_shown_as_it_is_committed(
    monkeypatch: pytest.MonkeyPatch, run: Run, pair: tiny_pair.TinyPair
) -> None:
    """After every round stdout holds all of its text, but for an unfinished character."""
    read, lengths = Reader.read, []

    def watched(self: Reader, emitted: Sequence[Emitted]) -> None:
        read(self, emitted)
        lengths.append((len(self.text), len(sys.stdout.getvalue())))  # type: ignore[attr-defined]

    monkeypatch.setattr(Reader, "read", watched)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert run(QUESTION, "--draft", pair.draft, "--max-new-tokens", "24")[0] == 0
    assert len(lengths) > 3
    assert all(certain == written for certain, written in lengths)


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    reader, shown = _reader([])
    for emitted in _emitted("a💩b"):
        reader.read([emitted])
    reader.finish()
    assert shown == ["a", "💩", "b"]
    assert [piece.text for piece in reader.pieces] == ["a", "", "", "", "💩", "b"]


def test_a_text_that_breaks_off_in_a_character_says_so_once() -> None:
    reader, shown = _reader([])
    reader.read(_emitted("a💩")[:3])
    reader.finish()
    assert shown == ["a", BROKEN]
    assert "".join(piece.text for piece in reader.pieces) == reader.text == f"a{BROKEN}"
    assert len(reader.pieces) == 3


def test_what_may_begin_a_stop_string_waits() -> None:
    reader, shown = _reader(["\n\nHuman:"])
    reader.read(_emitted("x"))
    reader.read(_emitted("\n"))
    assert shown == ["x"]
    reader.read(_emitted("y"))
    assert "".join(shown) == "x\ny"
    for emitted in _emitted("\n\nHuman: never shown"):
        if reader.found is None:
            reader.read([emitted])
    reader.finish()
    assert "".join(shown) == reader.text == "x\ny"
    assert reader.found == "\n\nHuman:"


def test_the_token_that_straddles_a_stop_is_cut() -> None:
    tokenizer = chat_tokenizers.k3()
    ordinary = range(256, min(tokenizer.added_tokens_decoder))
    token = max(ordinary, key=lambda i: len(tokenizer.decode([i])))
    text = tokenizer.decode([token])
    assert len(text) >= 4
    reader, shown = _reader([text[2:4]])
    reader.read([Emitted(token, "accepted", 0.5)])
    reader.finish()
    assert shown == [text[:2]]
    assert [piece.text for piece in reader.pieces] == [text[:2]]


def test_an_end_token_has_no_text_even_if_it_is_an_ordinary_word() -> None:
    ends = [_emitted("a")[0].token]
    reader, shown = _reader([], ends)
    reader.read(_emitted("ba"))
    reader.finish()
    assert (shown, len(reader.pieces)) == (["b"], 2)
