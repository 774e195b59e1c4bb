"""Stop strings and streamed text: where one-token decoding would have ended, whatever came at once.

The reference reads the whole text again after every token, which nothing incremental can get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

from dspark.assets import asset
from dspark.errors import UserError
from dspark.runtime.ending import Ending
from dspark.runtime.stops import StopStrings
from dspark.runtime.text import Detokenizer, TextStream
from tests import chat_tokenizers

BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Bytes:
    """A tokenizer whose token i is the bytes `pieces[i]`; None is a special token."""

    pieces: tuple[bytes | None, ...]
    added_tokens_decoder: ClassVar[dict[int, AddedToken]] = {8: AddedToken("<end>", special=True)}

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        assert skip_special_tokens
        assert clean_up_tokenization_spaces is False
        return b"".join(self.pieces[token] or b"" for token in token_ids).decode(errors="replace")


# Every byte of a text of one- to four-byte characters, and tokens that hold several.
SMALL = Bytes(
    (
        *(b"a", b"b", b"ab", b"ba", b"c", b"\n", b" ab", b"bc\n\n", None),
        *("é".encode(), "€".encode(), "💩".encode()),
        *(bytes([byte]) for byte in (0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x92)),
    )
)


def _reference(tokenizer: Detokenizer, tokens: list[int], stops: list[str]) -> tuple[int, str]:
    """Tokens kept and text, by reading everything again after every token."""
    text = ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(
            tokens[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False
        ).rstrip(BROKEN)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return count, text[: min(found)]
    return len(tokens) + 1, text


def _search(
    tokenizer: Detokenizer, blocks: list[list[int]], stops: list[str], **options: int
) -> tuple[int, str]:
    search = StopStrings(stops, tokenizer).start(**options)
    before = 0
    for block in blocks:
        kept = search.push(block)
        if kept is not None:
            assert 1 <= kept <= len(block)
            return before + kept, search.text
        before += len(block)
    return before + 1, search.text


def _blocks(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    blocks = []
    for size in sizes:
        blocks.append(tokens[:size])
        tokens = tokens[size:]
    return [*blocks, tokens]


@given(
    tokens=st.lists(st.integers(0, len(SMALL.pieces) - 1), max_size=40),
    sizes=st.lists(st.integers(1, 9), max_size=12),
    stops=st.lists(
        st.sampled_from(["ab", "ba", "aba", "bb", "c", "é", "€a", "\n\n", "b\n", "💩", "zz"]),
        max_size=4,
    ),
)
def test_a_text_ends_where_one_token_decoding_ends_it(
    tokens: list[int], sizes: list[int], stops: list[str]
) -> None:
    """Blocks of any size; stops that overlap, repeat, span blocks and cut characters."""
    expected = _reference(SMALL, tokens, stops)
    assert _search(SMALL, _blocks(tokens, sizes), stops) == expected


def _tokens(text: str) -> list[int]:
    return [SMALL.pieces.index(piece.encode()) for piece in text]


def test_completed_by_the_second_of_twelve_accepted_tokens() -> None:
    assert _search(SMALL, [_tokens("abcccccccccc")], ["ab"]) == (2, "")
    assert _search(SMALL, [_tokens("caccccab"), _tokens("cccab")], ["ab"]) == (8, "cacccc")


def test_split_over_two_blocks() -> None:
    assert _search(SMALL, [_tokens("cca"), _tokens("bcc")], ["ab"]) == (4, "cc")


def test_inside_the_bytes_of_characters() -> None:
    euro = [SMALL.pieces.index(bytes([byte])) for byte in "€".encode()]
    blocks = [[0, euro[0]], [euro[1]], [euro[2], 1, 1, 1]]
    assert _search(SMALL, blocks, ["€b"]) == (5, "a")
    assert _search(SMALL, blocks, ["€"]) == (4, "a")
    assert _search(SMALL, blocks, [BROKEN]) == (8, "a€bbb")


def test_one_token_may_complete_two_stops_and_reach_past_them() -> None:
    """The leftmost begins first, whatever the order; nothing of the straddling token is text."""
    both = SMALL.pieces.index(b"bc\n\n")
    for stops in (["c\n", "bc"], ["bc", "c\n"]):
        assert _search(SMALL, [[0, both, 0]], stops) == (2, "a")
    search = StopStrings(["c\n", "abc"], SMALL).start()
    assert search.push([0, both]) == 2
    assert (search.found, search.text, search.finish()) == ("abc", "", "")


def test_repeated_stops_count_once() -> None:
    assert StopStrings(["ab", "c", "ab"], SMALL).strings == ("ab", "c")
    assert _search(SMALL, [_tokens("bab")], ["ab", "ab"]) == (3, "b")


def test_the_first_tokens_take_no_part_in_a_match() -> None:
    assert _search(SMALL, [_tokens("abcab")], ["ab"], min_new_tokens=2) == (5, "abc")
    assert _search(SMALL, [_tokens("abcab")], ["ab"], min_new_tokens=1) == (5, "abc")
    assert _search(SMALL, [_tokens("abcab")], ["ab"], min_new_tokens=5) == (6, "abcab")


def test_empty_and_special_strings_are_refused() -> None:
    with pytest.raises(UserError, match="at least one character"):
        StopStrings(["a", ""], SMALL)
    with pytest.raises(UserError, match="'<end>' is a special token"):
        StopStrings(["<end>"], SMALL)


@given(st.text(alphabet="abc", max_size=12), st.lists(st.sampled_from(["abc", "cab", "aa"])))
def test_what_is_held_back_is_what_a_stop_could_begin_with(text: str, stops: list[str]) -> None:
    search = StopStrings(stops, SMALL).start()
    shown = ""
    for token in _tokens(text):
        if search.push([token]) is not None:
            assert search.held == 0
            break
        begun = [n for stop in stops for n in range(len(stop)) if search.text.endswith(stop[:n])]
        assert search.held == max(begun, default=0)
        shown = search.text[: len(search.text) - search.held]
    assert search.text.startswith(shown)  # nothing shown was taken back


# ------------------------------------------------------------------------------- real tokenizers


def _sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama's: a space mark that the first token of a text loses, and bytes as a last resort."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    vocab += [(piece, -2.0) for piece in ("▁", "▁a", "a", "b", "▁ab", "é", "▁b", "c")]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


REAL = {
    "nano": PreTrainedTokenizerFast.from_pretrained(asset("k3-nano")),
    "byte-level": chat_tokenizers.k3(),
    "sentencepiece": _sentencepiece(),
}


def _streamed(tokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in tokens), stream.flush()]


@pytest.mark.parametrize("name", REAL)
def test_the_pieces_of_a_stream_are_the_text(name: str) -> None:
    tokenizer = REAL[name]
    text = "ab a  é b\n\n€ 💩💩 naïve <sum> ab. It's 3,000 a , b!  "
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    ends = tokenizer.all_special_ids
    tokens = [ends[-1], *tokens[:5], ends[-1], *tokens[5:]]
    pieces = _streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert "💩" in "".join(pieces) or name == "sentencepiece"
    assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.parametrize("name", ["nano", "byte-level"])
@given(data=st.data())
def test_random_tokens_stream_to_the_text(name: str, data: st.DataObject) -> None:
    """Any ids, so mostly broken characters and special tokens in odd places."""
    tokenizer = REAL[name]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(_streamed(tokenizer, tokens)) == whole


def test_a_piece_never_ends_inside_a_character() -> None:
    tokenizer = REAL["byte-level"]
    tokens = tokenizer("💩", add_special_tokens=False).input_ids
    assert len(tokens) == 4
    assert _streamed(tokenizer, tokens) == ["", "", "", "💩", ""]
    assert _streamed(tokenizer, tokens[:3]) == ["", "", "", BROKEN]


@pytest.mark.parametrize("stops", [["apples"], [". The"], ["ap", "total", "!"], ["ppl"], ["12"]])
def test_the_same_token_as_transformers(stops: list[str]) -> None:
    tokenizer = REAL["nano"]
    text = "There are 12 apples. The total is 120 apples and applause!"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    criterion = StopStringCriteria(tokenizer, stops)
    ids = torch.tensor([tokens])
    first = next(n for n in range(1, len(tokens) + 1) if criterion(ids[:, :n], None)[0])
    assert _search(tokenizer, [tokens], stops)[0] == first


# ---------------------------------------------------------------------------------------- endings


def test_an_ending_is_whichever_comes_first() -> None:
    a, b, c = _tokens("abc")
    stops = StopStrings(["bb"], SMALL)

    def cut(blocks: list[list[int]], ends: set[int], limit: int) -> tuple[list[int], str | None]:
        ending = Ending(frozenset(ends), limit, stops.start())
        kept: list[int] = []
        for block in blocks:
            assert ending.finish is None
            kept += ending.cut(block)
        return kept, ending.finish

    assert cut([[a, b], [b, c]], {c}, 9) == ([a, b, b], "stop")
    assert cut([[a, b], [a, c, b, b]], {c, 99}, 9) == ([a, b, a, c], "end")
    assert cut([[a, b], [a, a, b]], {c}, 3) == ([a, b, a], "length")
    assert cut([[a, b, b]], {b}, 9) == ([a, b], "end")
    assert cut([[a, b, c]], {c}, 3) == ([a, b, c], "end")
    assert cut([[a, a]], set(), 3) == ([a, a], None)
