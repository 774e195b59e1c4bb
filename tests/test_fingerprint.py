"""Two tokenizers are the same only if every id means the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dspark.distill.fingerprint import (
    check_stored_tokenizer,
    compare_tokenizers,
    tokenizer_files,
    tokenizer_fingerprint,
)
from dspark.errors import UserError
from tests import chat_tokenizers as small


def edited(tokenizer: PreTrainedTokenizerFast, change: object) -> PreTrainedTokenizerFast:
    """A copy whose serialised state `change` has altered in place."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    change(state)  # type: ignore[operator]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=tokenizer.eos_token
    )


def plain() -> PreTrainedTokenizerFast:
    return small.tokenizer(None, ["<|end|>", "<|other|>"], eos_token="<|end|>")


def refused(a: PreTrainedTokenizerFast, b: PreTrainedTokenizerFast) -> str:
    """The difference found, both ways round; the fingerprints must differ as well."""
    found = compare_tokenizers(a, b)
    assert found is not None
    assert compare_tokenizers(b, a) is not None
    assert tokenizer_fingerprint(a) != tokenizer_fingerprint(b)
    return found


def test_equal_tokenizers_are_equal() -> None:
    a, b = plain(), edited(plain(), lambda state: None)
    assert compare_tokenizers(a, b) is None
    assert tokenizer_fingerprint(a) == tokenizer_fingerprint(b)
    a.chat_template = "x"  # the template has a fingerprint of its own
    assert tokenizer_fingerprint(a) == tokenizer_fingerprint(b)


def test_two_ids_swapped_names_the_first() -> None:
    def swap(state: dict) -> None:
        vocab = state["model"]["vocab"]
        a, b = [token for token, i in vocab.items() if i in (300, 310)]
        vocab[a], vocab[b] = vocab[b], vocab[a]

    assert refused(plain(), edited(plain(), swap)).startswith("token id 300 is ")


def test_swapped_special_tokens_and_another_end_token() -> None:
    other = small.tokenizer(None, ["<|other|>", "<|end|>"], eos_token="<|end|>")
    first = plain().convert_tokens_to_ids("<|end|>")
    assert refused(plain(), other).startswith(f"token id {first} is ")
    other = small.tokenizer(None, ["<|end|>", "<|other|>"], eos_token="<|other|>")
    assert refused(plain(), other).startswith("eos_token_id is ")


def test_rows_that_only_pad_the_table_are_accepted() -> None:
    padded = small.tokenizer(
        None, ["<|end|>", "<|other|>", "<|x0|>", "<|x1|>"], eos_token="<|end|>"
    )
    assert compare_tokenizers(plain(), padded) is None
    assert compare_tokenizers(padded, plain()) is None
    padded.pad_token = "<|x1|>"
    assert compare_tokenizers(plain(), padded) is None


def test_a_hole_in_the_table_is_not_padding() -> None:
    vocab = plain().get_vocab()
    unmerged = next(token for token in vocab if len(token) == 1 and ord(token) > 0x120)

    def mark(state: dict) -> None:
        end = next(token for token in state["added_tokens"] if token["content"] == "<|end|>")
        state["added_tokens"].append({**end, "content": unmerged, "id": vocab[unmerged]})

    def drop(state: dict) -> None:
        del state["model"]["vocab"][unmerged]

    found = refused(edited(plain(), mark), edited(plain(), drop))
    assert found == f"token id {vocab[unmerged]} is {unmerged!a} in one and None in the other"


def test_an_extra_word_at_the_end_is_not_padding() -> None:
    longer = plain()
    longer.add_tokens(["apples"])
    assert (
        refused(plain(), longer)
        == f"token id {len(plain())} is None in one and 'apples' in the other"
    )


def test_rules_count_although_the_vocabulary_is_equal() -> None:
    def merges(state: dict) -> None:
        rules = state["model"]["merges"]
        rules[4], rules[5] = rules[5], rules[4]

    def digits(state: dict) -> None:
        split = {"type": "Digits", "individual_digits": True}
        before = state["pre_tokenizer"]
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, before]}

    assert refused(plain(), edited(plain(), merges)) == "merges differ from number 4 on"
    assert refused(plain(), edited(plain(), digits)) == "their pre_tokenizer differs"


def stored(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    for name, text in tokenizer_files(tokenizer, small.CHATML).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_drafter_folder_names_the_first_id_that_differs(tmp_path: Path) -> None:
    """Same sizes, two ids swapped; other special ids; the same with rows that pad the table."""

    def swap(state: dict) -> None:
        vocab = state["model"]["vocab"]
        a, b = [token for token, i in vocab.items() if i in (300, 310)]
        vocab[a], vocab[b] = vocab[b], vocab[a]

    assert check_stored_tokenizer(tmp_path, plain()) is False  # a folder that keeps none
    folder = stored(tmp_path, plain())
    assert (folder / "chat_template.jinja").read_text("utf-8") == small.CHATML
    assert check_stored_tokenizer(folder, plain()) is True
    with pytest.raises(UserError, match="token id 300 is "):
        check_stored_tokenizer(folder, edited(plain(), swap))
    other = small.tokenizer(None, ["<|other|>", "<|end|>"], eos_token="<|end|>")
    with pytest.raises(
        UserError, match=f"token id {len(plain()) - 2} is '<|end|>' in one".replace("|", r"\|")
    ):
        check_stored_tokenizer(folder, other)
    padded = small.tokenizer(None, ["<|end|>", "<|other|>", "<|x0|>"], eos_token="<|end|>")
    assert check_stored_tokenizer(folder, padded) is True
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        check_stored_tokenizer(folder, plain())
