"""Loss masks by prefix rendering, on the template families in use, against independent oracles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text
from transformers import AutoTokenizer

from dspark.assets import asset
from dspark.distill.chat import ChatFormat, RowError, TrainingRow
from dspark.distill.messages import Message
from dspark.distill.prompts import read_prompts
from dspark.errors import UserError
from tests import chat_tokenizers as small


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, thinking: str | None = None) -> Message:
    if thinking is None:
        return Message(role="assistant", content=text)
    return Message(role="assistant", content=text, reasoning_content=thinking)


def spans(chat: ChatFormat, row: TrainingRow) -> list[str]:
    """Supervised stretches of a row."""
    return [text for supervised, text in chat.spans(row) if supervised]


TWO_TURNS = [
    user("apples?"),
    assistant("12 apples."),
    user("total?"),
    assistant("The total is 12."),
]


def test_k3_plain_chat_supervises_the_whole_body_and_nothing_else() -> None:
    chat = ChatFormat(small.k3())
    row = chat.training_row([Message(role="system", content="think"), *TWO_TURNS])
    assert spans(chat, row) == [
        "<|open|>response<|sep|>12 apples.<|close|>response<|sep|><|end_of_msg|>",
        "<|open|>response<|sep|>The total is 12.<|close|>response<|sep|><|end_of_msg|>",
    ]
    unsupervised = [t for t, m in zip(row.ids, row.loss_mask, strict=True) if not m]
    assert chat.decode(unsupervised) == (
        '<|open|>message role="system"<|sep|>think<|end_of_msg|>'
        '<|open|>message role="user"<|sep|>apples?<|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|>'
        '<|open|>message role="user"<|sep|>total?<|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|>'
    )


def test_k3_thinking_is_supervised_with_its_tags() -> None:
    messages = [user("2+2?"), assistant("4", thinking="First, 2 + 2.\n"), *TWO_TURNS[:2]]
    chat = ChatFormat(small.k3())
    assert spans(chat, chat.training_row(messages))[0] == (
        "<|open|>think<|sep|>First, 2 + 2.\n<|close|>think<|sep|>"
        "<|open|>response<|sep|>4<|close|>response<|sep|><|end_of_msg|>"
    )
    # Thinking switched on: its opening tag belongs to the prompt, as at generation.
    chat = ChatFormat(small.k3(), thinking=True)
    assert spans(chat, chat.training_row(messages[:2])) == [
        "First, 2 + 2.\n<|close|>think<|sep|>"
        "<|open|>response<|sep|>4<|close|>response<|sep|><|end_of_msg|>"
    ]
    with pytest.raises(RowError) as caught:
        chat.training_row(TWO_TURNS)
    assert caught.value.reason == "prompt-mismatch"


def test_markers_of_an_older_format_in_the_text_change_nothing() -> None:
    chat = ChatFormat(small.k3())
    body = "<|im_assistant|>assistant<|im_middle|>12<|im_end|>"
    messages = [user("<|im_user|>apples?<|im_end|>"), assistant(body)]
    assert spans(chat, chat.training_row(messages)) == [
        f"<|open|>response<|sep|>{body}<|close|>response<|sep|><|end_of_msg|>"
    ]


def test_chatml_supervises_the_end_of_turn_but_not_the_line_break_after_it() -> None:
    chat = ChatFormat(small.chatml())
    row = chat.training_row(TWO_TURNS)
    assert spans(chat, row) == ["12 apples.<|im_end|>", "The total is 12.<|im_end|>"]
    assert row.loss_mask[-1] is False
    assert chat.decode(row.ids[-1:]) == "\n"


def test_a_repeated_sentence_stays_supervised_when_the_end_of_turn_is_not_the_end_of_text() -> None:
    chat = ChatFormat(small.chatml())
    same = "assistant\nThe total is 12."
    messages = [user("a"), assistant(same), user(same), assistant(same)]
    assert spans(chat, chat.training_row(messages)) == [f"{same}<|im_end|>"] * 2


def test_llama_has_one_begin_token() -> None:
    chat = ChatFormat(small.llama())
    bos = chat.tokenizer.bos_token_id
    assert chat.tokenizer.encode("x")[0] == bos  # the tokenizer would add one by itself
    assert chat.prompt_ids(TWO_TURNS[:1]).count(bos) == 1
    row = chat.training_row(TWO_TURNS)
    assert row.ids.count(bos) == 1
    assert spans(chat, row) == ["12 apples.<|eot_id|>", "The total is 12.<|eot_id|>"]


def test_the_row_begins_with_the_prompt_that_the_target_is_shown() -> None:
    for make in (small.k3, small.chatml, small.llama, small.qwen3):
        chat = ChatFormat(make())
        row = chat.training_row(TWO_TURNS[:2])
        prompt = chat.prompt_ids(TWO_TURNS[:1])
        assert list(row.ids[: len(prompt)]) == prompt
        assert row.loss_mask.index(True) == len(prompt)


def test_a_template_that_drops_earlier_thinking_is_refused_row_by_row() -> None:
    chat = ChatFormat(small.qwen3())
    assert spans(chat, chat.training_row(TWO_TURNS[:2])) == ["12 apples.<|im_end|>"]
    with pytest.raises(RowError) as caught:
        chat.training_row(TWO_TURNS)
    assert caught.value.reason == "history-rewritten"
    with pytest.raises(RowError) as caught:  # thinking in the data, switched off in the template
        chat.training_row([user("2+2?"), assistant("4", thinking="hm")])
    assert caught.value.reason == "prompt-mismatch"
    thinking = ChatFormat(small.qwen3(), thinking=True)
    row = thinking.training_row([user("2+2?"), assistant("4", thinking="hm")])
    assert spans(thinking, row) == ["<think>\nhm\n</think>\n\n4<|im_end|>"]


def test_a_token_across_the_edge_of_a_turn_is_refused() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = small.tokenizer(template, ["<s>"], eos_token="<s>")
    chat = ChatFormat(tokenizer)
    merged = next(t for t in tokenizer.get_vocab() if t.isalpha() and t.isascii() and len(t) > 3)
    assert len(tokenizer.encode(merged, add_special_tokens=False)) == 1
    with pytest.raises(RowError) as caught:
        chat.training_row([user(merged[:1]), assistant(merged[1:])])
    assert caught.value.reason == "boundary-merged"


def test_a_template_that_refuses_a_conversation_costs_one_row() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    chat = ChatFormat(small.tokenizer(template + small.CHATML, ["<|im_end|>"]))
    with pytest.raises(RowError, match="no system") as caught:
        chat.training_row([Message(role="system", content="x"), *TWO_TURNS])
    assert caught.value.reason == "template-refused"


def test_a_tokenizer_without_a_template_is_a_user_error() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        ChatFormat(small.tokenizer(None, []))


@pytest.fixture(scope="module")
def nano() -> ChatFormat:
    return ChatFormat(AutoTokenizer.from_pretrained(asset("k3-nano")))


def test_nano_masks_equal_those_of_the_templates_own_generation_tags(nano: ChatFormat) -> None:
    """Oracle: transformers' mask from the `generation` tags, which our code does not look at."""
    chats = [
        TWO_TURNS,
        [Message(role="system", content="Be brief."), *TWO_TURNS, user("again?"), assistant("12.")],
        [user("2+2?"), assistant("4", thinking="First, 2 + 2.\n"), *TWO_TURNS],
        [user("role"), assistant('message role="assistant"<|im_end|>'), *TWO_TURNS],
    ]
    for messages in chats:
        oracle = nano.tokenizer.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        row = nano.training_row(messages)
        assert list(row.ids) == oracle["input_ids"]
        assert list(row.loss_mask) == [bool(m) for m in oracle["assistant_masks"]]


def test_shipped_prompts_are_clean_and_short(nano: ChatFormat) -> None:
    files = sorted(asset("prompts").glob("*.jsonl"))
    prompts = read_prompts(files, strict=True)
    assert {row.file for row in prompts.rows} == {str(file) for file in files}
    assert prompts.report.repaired == ()
    lengths = [len(nano.prompt_ids(row.prompt)) for row in prompts.rows[::25]]
    assert max(lengths) < 200


CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(lambda t: "x" + t)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3))
def test_masks_equal_those_from_character_offsets(turns: list[tuple[str, str]]) -> None:
    """Oracle: write the ChatML text by hand, remember where answers stand, map by offsets."""
    chat = ChatFormat(small.chatml())
    text, inside, messages = "", [], []
    for question, reply in turns:
        text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        inside.append((len(text), len(text) + len(reply) + len("<|im_end|>")))
        text += f"{reply}<|im_end|>\n"
        messages += [user(question), assistant(reply)]
    coded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    row = chat.training_row(messages)
    assert list(row.ids) == coded["input_ids"]
    expected = [
        any(a <= start and end <= b for a, b in inside) for start, end in coded["offset_mapping"]
    ]
    assert list(row.loss_mask) == expected
    assert spans(chat, row) == [f"{reply}<|im_end|>" for _, reply in turns]


@pytest.mark.parametrize("text", ["2024-05-01", "42", "nul \x00 rtl \u202eabc\u202c 👩‍🚀 \ufffd"])
@pytest.mark.parametrize("make", [small.k3, small.chatml])
def test_supervised_text_is_the_source_text(make: object, text: str) -> None:
    chat = ChatFormat(make())  # type: ignore[operator]
    (span,) = spans(chat, chat.training_row([user("when?"), assistant(text)]))
    body = span.removeprefix("<|open|>response<|sep|>")
    for mark in ("<|close|>response<|sep|><|end_of_msg|>", "<|im_end|>"):
        body = body.removesuffix(mark)
    assert body == text


def test_describe_row_is_markup_that_renders_to_the_decoded_text() -> None:
    chat = ChatFormat(small.chatml())
    messages = [user("[red]a[/red] \\"), assistant("[1, 2] \\[x]")]
    row = chat.training_row(messages)
    rendered = Text.from_markup(chat.describe_row(row))
    assert rendered.plain == chat.decode(row.ids)
    marked = [rendered.plain[s.start : s.end] for s in rendered.spans if "green" in str(s.style)]
    assert marked == ["[1, 2] \\[x]<|im_end|>"]


def test_the_fingerprint_knows_template_and_thinking() -> None:
    prints = {
        ChatFormat(make(), thinking=thinking).fingerprint
        for make in (small.k3, small.chatml)
        for thinking in (False, True)
    }
    assert len(prints) == 4
    assert ChatFormat(small.k3()).fingerprint == ChatFormat(small.k3()).fingerprint


def test_a_row_knows_its_parts() -> None:
    row = TrainingRow((5, 6, 7), (False, True, True), "target", "f", 3)
    assert row.supervised == 2
    assert row.truncated(2) == TrainingRow((5, 6), (False, True), "target", "f", 3)
    assert row.truncated(3) is row
    with pytest.raises(ValueError, match="2 ids but 1"):
        TrainingRow((1, 2), (True,))
