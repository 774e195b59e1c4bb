"""The nano tokenizer and the chat template: ids, round trips, K3 messages written exactly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dspark.nano import chat
from dspark.nano.generate import row
from dspark.nano.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

DATA = Path(__file__).resolve().parent.parent / "data"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DATA / "k3-nano")


def test_special_tokens_end_the_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCAB_SIZE <= 4096
    ids = tokenizer.convert_tokens_to_ids(list(chat.SPECIAL_TOKENS))
    assert ids == list(range(VOCAB_SIZE - len(ids), VOCAB_SIZE))
    assert tokenizer.eos_token == chat.END_OF_MESSAGE
    assert tokenizer.bos_token == chat.BOS
    assert tokenizer.pad_token == chat.PAD
    assert tokenizer.mask_token == chat.MASK


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for text in ("1234567890", "x12y", " 100%", "$250.75", "3/8"):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
        for token in tokens:
            assert not re.search(r"\d", token) or len(token) == 1


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(blacklist_categories=["Cs"]), max_size=60))
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_generated_text_round_trips_in_few_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = []
    for index in range(500):
        for message in row(9, index, "test").messages:
            ids = tokenizer.encode(message["content"])
            assert tokenizer.decode(ids) == message["content"]
            assert max(ids) < VOCAB_SIZE - len(chat.SPECIAL_TOKENS)
            lengths.append(len(ids))
    assert sum(lengths) / len(lengths) < 45


def test_template_writes_k3_messages(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "4 * 6?"},
        {"role": "assistant", "content": "24", "reasoning_content": "four sixes"},
        {"role": "user", "content": " and 5 * 5?\n"},
    ]
    expected = (
        '[BOS]<|open|>message role="system"<|sep|>Be brief.<|end_of_msg|>'
        '<|open|>message role="user"<|sep|>4 * 6?<|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|>four sixes<|close|>think<|sep|>24<|end_of_msg|>"
        '<|open|>message role="user"<|sep|> and 5 * 5?\n<|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|>'
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == expected
    assert text.endswith(chat.header("assistant"))


def test_no_default_system_message_and_no_thinking(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = row(0, 0, "train").messages
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    question, solution = (message["content"] for message in messages)
    assert text == (
        f"[BOS]{chat.header('user')}{question}<|end_of_msg|>"
        f"{chat.header('assistant')}{solution}<|end_of_msg|>"
    )
    assert "<|im_" not in text


def test_one_bos_however_the_text_is_tokenised(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = row(0, 1, "train").messages
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert ids == tokenizer(text).input_ids == tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_assistant_mask_covers_what_the_target_must_say(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [
        {"role": "user", "content": "Repeat red."},
        {"role": "assistant", "content": "red", "reasoning_content": "one word"},
        {"role": "user", "content": "red"},
        {"role": "assistant", "content": "red"},
    ]
    made = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    said = [i for i, m in zip(made["input_ids"], made["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(said) == (
        "<|open|>think<|sep|>one word<|close|>think<|sep|>red<|end_of_msg|>red<|end_of_msg|>"
    )


def test_template_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="unknown role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)


def test_training_the_tokenizer_again_gives_the_shipped_bytes(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(), tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (DATA / "k3-nano" / path.name).read_bytes(), path.name


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="use more rows"):
        train_tokenizer(rows=20)
