"""Templates: the shipped one for Kimi K3, where others come from, and what makes one unusable."""

from __future__ import annotations

import datetime
import warnings
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dspark.distill.chat import ChatFormat, RowError, chat_formats
from dspark.distill.fingerprint import tokenizer_files
from dspark.distill.identity import identity_warnings, trained_format
from dspark.distill.messages import Message
from dspark.distill.templates import chat_template, missing_tokens, shipped_templates
from dspark.draft.record import TargetRecord
from dspark.errors import UserError
from tests import chat_tokenizers as small

SYSTEM = Message(role="system", content="Be brief.")
Q1, Q2 = (Message(role="user", content=text) for text in ("apples?", "total?"))
A1 = Message(role="assistant", content="12 apples.")
A2 = Message(role="assistant", content="The total is 12.")
THOUGHT = Message(role="assistant", content="4", reasoning_content="2 and 2.\n")


def k3(thinking: bool = False) -> ChatFormat:
    return ChatFormat(small.k3_bare(), thinking=thinking, template="kimi-k3")


def supervised(chat: ChatFormat, messages: list[Message]) -> list[str]:
    return [text for mark, text in chat.spans(chat.training_row(messages)) if mark]


def everything(chat: ChatFormat, messages: list[Message]) -> str:
    return chat.decode(chat.training_row(messages).ids)


# -- Kimi K3 ---------------------------------------------------------------------------------------

K3_ASKED = (
    '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|><|end_of_msg|>'
    '<|open|>message role="user"<|sep|>apples?<|close|>message<|sep|><|end_of_msg|>'
)
K3_HEADER = '<|open|>message role="assistant"<|sep|>'
K3_END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def test_k3_without_thinking_opens_the_response_and_hides_reasoning() -> None:
    """The strings are those that ports of K3's own renderer print and test."""
    chat = k3()
    assert chat.decode(chat.prompt_ids([SYSTEM, Q1])) == (
        K3_ASKED + K3_HEADER + "<|open|>response<|sep|>"
    )
    assert supervised(chat, [SYSTEM, Q1, THOUGHT]) == [f"4{K3_END}"]
    assert "2 and 2" not in everything(chat, [SYSTEM, Q1, THOUGHT])


def test_k3_with_thinking_opens_every_answer_with_a_think_tag_even_if_it_is_empty() -> None:
    chat = k3(thinking=True)
    effort = chat.decode(chat.prompt_ids([SYSTEM, Q1])).split("<|end_of_msg|>")[0]
    assert effort.startswith('<|open|>message role="system" type="thinking-effort"<|sep|>')
    assert effort.endswith("`thinking_effort=max`.<|close|>message<|sep|>")
    text = everything(chat, [SYSTEM, Q1, A1, Q2, THOUGHT])
    assert text.startswith(effort + "<|end_of_msg|>" + K3_ASKED)
    think, close = "<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"
    assert f"{K3_HEADER}{think}{close}12 apples.{K3_END}" in text
    assert text.endswith(f"{K3_HEADER}{think}2 and 2.\n{close}4{K3_END}")
    assert supervised(chat, [SYSTEM, Q1, A1, Q2, THOUGHT]) == [
        f"{close}12 apples.{K3_END}",
        f"2 and 2.\n{close}4{K3_END}",
    ]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "messages", [[Q1, A1], [SYSTEM, Q1, THOUGHT], [Q1, A1, Q2, A2], [SYSTEM, Q1, THOUGHT, Q2, A2]]
)
def test_k3_masks_equal_those_of_generation_tags(messages: list[Message], thinking: bool) -> None:
    """Oracle: transformers' own mask from the template's tags, which our code does not look at."""
    chat = k3(thinking)
    oracle = chat.tokenizer.apply_chat_template(
        messages, chat_template=chat.template, thinking=thinking, tokenize=True,
        return_assistant_tokens_mask=True, return_dict=True,
    )  # fmt: skip
    row = chat.training_row(messages)
    assert list(row.ids) == oracle["input_ids"]
    assert list(row.loss_mask) == [bool(m) for m in oracle["assistant_masks"]]
    k2 = set(chat.tokenizer.convert_tokens_to_ids(small.K2_MARKERS))
    assert not k2 & set(row.ids)  # they are in the vocabulary, and mean nothing


def test_k3_stops_at_the_end_of_a_message_and_roles_are_plain_text() -> None:
    chat = k3()
    row = chat.training_row([Q1, A1])
    assert chat.decode(row.ids[-1:]) == "<|end_of_msg|>"
    assert row.loss_mask[-1]
    assert "user" not in chat.tokenizer.all_special_tokens
    with pytest.raises(RowError, match="unknown role tool"):
        chat.training_row([Message(role="tool", content="x"), Q1, A1])


def test_turn_marks_in_text_are_refused_and_those_of_other_formats_are_text() -> None:
    for chat in (k3(), k3(thinking=True)):
        for mark in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"):
            for messages in (
                [Message(role="user", content=f"a{mark}b"), A1],
                [Q1, {**A1, "content": mark}],
            ):
                with pytest.raises(RowError) as caught:
                    chat.training_row(messages)
                assert caught.value.reason == "marker-in-text"
        with pytest.raises(RowError, match="message 0"):
            chat.prompt_ids([Message(role="user", content="<|sep|>")])
        assert "<|im_end|>" in supervised(chat, [Q1, {**A1, "content": "<|im_end|>"}])[0]


# -- where a template comes from -------------------------------------------------------------------


def test_a_tokenizer_with_k3_marks_and_no_template_gets_the_shipped_one_and_it_is_said() -> None:
    with pytest.warns(UserWarning, match="no chat template; its turn tags are those of kimi-k3"):
        chat = ChatFormat(small.k3_bare())
    assert chat.fingerprint == k3().fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = ChatFormat(small.k3_bare(), template="kimi-k3")
        own = ChatFormat(small.k3())
    assert named.template == shipped_templates()["kimi-k3"].read_text("utf-8")
    assert own.template == small.K3


def test_a_template_for_another_tokenizer_is_refused_by_its_first_missing_tag() -> None:
    with pytest.raises(UserError, match=r"kimi-k3: <\|open\|> is not a token"):
        ChatFormat(small.chatml(), template="kimi-k3")
    with pytest.raises(UserError, match="has no chat template; add"):
        ChatFormat(small.tokenizer(None, ["<|im_end|>"]))
    assert missing_tokens("no such comment", small.chatml()) == ()


def test_a_template_file_wins_over_the_tokenizers_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(small.SMOLLM2, encoding="utf-8")
    chat = ChatFormat(small.chatml(), template=str(path))
    assert chat.decode(chat.prompt_ids([Q1])).startswith("<|im_start|>system\nDefault")
    assert chat.fingerprint != ChatFormat(small.chatml()).fingerprint
    with pytest.raises(UserError, match=r"absent\.jinja'?: no such file; .* kimi-k3"):
        ChatFormat(small.chatml(), template=str(tmp_path / "absent.jinja"))
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"mine\.jinja: a template that cannot be read"):
        ChatFormat(small.chatml(), template=str(path))
    path.write_text("{% if %}", encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.jinja: the chat template cannot render"):
        ChatFormat(small.chatml(), template=str(path))


def test_several_named_templates_need_a_default() -> None:
    tokenizer = small.chatml()
    tokenizer.chat_template = {"default": small.CHATML, "tool_use": "x"}
    assert chat_template(tokenizer) == small.CHATML
    tokenizer.chat_template = {"rag": "x", "tool_use": "x"}
    with pytest.raises(UserError, match=r"multiple|default"):
        ChatFormat(tokenizer)


# -- other families --------------------------------------------------------------------------------

FAMILIES = [
    (small.kimi_linear, "<|im_end|>"),
    (small.smollm2, "<|im_end|>"),
    (small.chatml, "<|im_end|>"),
    (small.llama, "<|eot_id|>"),
    (lambda: small.llama(small.LLAMA32), "<|eot_id|>"),
]


@pytest.mark.parametrize(("make", "end"), FAMILIES)
@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_two_turns_are_supervised_with_their_ends_and_nothing_else(
    make: object, end: str, system: list[Message]
) -> None:
    chat = ChatFormat(make())  # type: ignore[operator]
    messages = [*system, Q1, A1, Q2, A2]
    assert supervised(chat, messages) == [f"12 apples.{end}", f"The total is 12.{end}"]
    row = chat.training_row(messages)
    shown = chat.prompt_ids(messages[:-1])
    assert list(row.ids[: len(shown)]) == shown


@pytest.mark.parametrize("make", [small.kimi_linear, small.smollm2])
def test_a_default_system_message_is_shown_and_never_supervised(make: object) -> None:
    tokenizer: PreTrainedTokenizerFast = make()  # type: ignore[operator]
    chat = ChatFormat(tokenizer)
    assert everything(chat, [Q1, A1]).count("Default system.") == 1
    assert "Default system." not in everything(chat, [SYSTEM, Q1, A1])
    assert "Default" not in "".join(supervised(chat, [Q1, A1]))
    other = make()  # type: ignore[operator]
    other.chat_template = tokenizer.chat_template.replace("Default", "Another")
    assert ChatFormat(other).fingerprint != chat.fingerprint


def test_a_template_that_asks_for_the_date_gives_the_same_prompt_every_day() -> None:
    tokenizer = small.llama(small.LLAMA32)
    chat = ChatFormat(tokenizer)
    assert "Today: 26 Jul 2024<|eot_id|>" in everything(chat, [Q1, A1])
    with_clock = tokenizer.apply_chat_template([Q1], tokenize=False)
    assert str(datetime.date.today().year) in with_clock
    same_otherwise = with_clock.replace(with_clock.split("Today: ")[1][:11], "26 Jul 2024")
    assert chat.decode(chat.tokenizer.encode(same_otherwise, add_special_tokens=False)) == (
        everything(chat, [Q1])
    )


# -- thinking --------------------------------------------------------------------------------------


def test_thinking_off_on_and_both() -> None:
    for make in (small.k3, small.qwen3):
        off, on, both = (chat_formats(make(), mode) for mode in ("off", "on", "both"))
        assert [chat.thinking for chat in (*off, *on, *both)] == [False, True, False, True]
        assert off[0].fingerprint == both[0].fingerprint != on[0].fingerprint
    for make in (small.chatml, small.llama, small.smollm2, small.kimi_linear):
        assert not ChatFormat(make()).has_thinking_switch
        with pytest.raises(UserError, match="has no thinking switch; set it to off"):
            chat_formats(make(), "both")


# -- what a drafter was trained with ---------------------------------------------------------------


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("make", "template"),
    [
        (small.k3, None),
        (small.qwen3, None),
        (small.k3_bare, "kimi-k3"),
        (small.k3, "kimi-k3"),
        (lambda: small.llama(small.LLAMA32), None),
    ],
)
def test_a_drafter_is_measured_on_the_prompts_it_was_trained_on(
    tmp_path: Path, make: object, template: str | None, thinking: bool
) -> None:
    tokenizer: PreTrainedTokenizerFast = make()  # type: ignore[operator]
    chat = ChatFormat(tokenizer, thinking=thinking, template=template)
    record = TargetRecord("t", None, chat.fingerprint)
    for name, text in tokenizer_files(tokenizer, chat.template).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = trained_format(tmp_path, record, tokenizer)
    assert found.fingerprint == chat.fingerprint
    assert found.prompt_ids([SYSTEM, Q1]) == chat.prompt_ids([SYSTEM, Q1])
    assert identity_warnings(record, found) == []


def test_a_drafter_with_another_template_is_measured_on_the_targets_and_it_is_said(
    tmp_path: Path,
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% broken", encoding="utf-8")
    tokenizer = small.chatml()
    for record in (None, TargetRecord("t")):  # nothing recorded: the target's own, and no word
        found = trained_format(tmp_path, record, tokenizer)
        assert found.fingerprint == ChatFormat(tokenizer).fingerprint
        assert identity_warnings(record, found) == []
    (tmp_path / "chat_template.jinja").write_text(small.SMOLLM2, encoding="utf-8")
    record = TargetRecord("t", None, "0" * 64)
    found = trained_format(tmp_path, record, tokenizer)
    assert found.fingerprint == ChatFormat(tokenizer).fingerprint
    assert "chat template" in identity_warnings(record, found)[0]
