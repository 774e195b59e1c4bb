"""Several turns: what goes into the history, which seeds, and what is pooled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark.distill.chat import ChatFormat
from dspark.distill.messages import Message
from dspark.distill.prompts import PromptRow, read_prompts
from dspark.runtime.records import Generation
from dspark_eval.conversations import answer_text, broken_notes, converse, hold_conversations
from dspark_eval.suites import load_suites
from tests import chat_tokenizers
from tests.test_metrics import record

QUESTION = (Message(role="user", content="What is 3 + 4?"),)
FORMATS = {
    "k3": (chat_tokenizers.k3, "<|open|>response<|sep|>", "<|close|>response<|sep|><|end_of_msg|>"),
    "chatml": (chat_tokenizers.chatml, "", "<|im_end|>"),
    "llama": (chat_tokenizers.llama, "", "<|eot_id|>"),
    "kimi_linear": (chat_tokenizers.kimi_linear, "", "<|im_end|>"),
}


def written(chat: ChatFormat, text: str, finish: str = "end") -> Generation:
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    count = len(ids) - 1
    rounds = [replace(record(count, count), emitted=count)] if count else []
    return Generation(ids, finish, 0.1, 0.1, rounds)


@pytest.fixture(params=sorted(FORMATS))
def family(request) -> tuple[ChatFormat, str, str]:
    make, before, behind = FORMATS[request.param]
    return ChatFormat(make()), before, behind


def test_an_answer_is_read_back_as_the_template_would_have_been_given_it(family):
    """Rendered again, the history is the very ids that the target was shown and said."""
    chat, before, behind = family
    answer = written(chat, f"{before}The total is 7 apples.{behind}")
    text = answer_text(chat, QUESTION, answer)
    assert text == "The total is 7 apples."
    history = (*QUESTION, Message(role="assistant", content=text))
    shown = chat.prompt_ids((*history, Message(role="user", content="Why?")))
    said = [*chat.prompt_ids(QUESTION), *answer.tokens]
    assert shown[: len(said)] == said


def test_an_answer_that_was_cut_has_no_end_of_turn_to_lose(family):
    chat, before, _ = family
    assert answer_text(chat, QUESTION, written(chat, f"{before}The tot", "length")) == "The tot"


def test_a_template_that_drops_an_empty_thought_from_the_history():
    chat = ChatFormat(
        chat_tokenizers.tokenizer(
            chat_tokenizers.QWEN3, ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>"
        )
    )
    assert answer_text(chat, QUESTION, written(chat, "Seven.<|im_end|>")) == "Seven."


def test_a_template_that_closes_no_turn_does_not_keep_the_end_token():
    plain = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    chat = ChatFormat(chat_tokenizers.tokenizer(plain + prompt, ["</s>"], eos_token="</s>"))
    assert answer_text(chat, QUESTION, written(chat, "Seven.</s>")) == "Seven."


class Asked:
    """Decodes nothing: says one given answer after the other, and keeps what it was asked."""

    def __init__(self, chat: ChatFormat, *answers: str) -> None:
        self.chat, self.answers, self.calls = chat, list(answers), []

    def __call__(self, prompt: list[int], seed: int) -> Generation:
        self.calls.append((self.chat.decode(prompt), seed))
        return written(self.chat, self.answers[len(self.calls) - 1])


def row(*later: str) -> PromptRow:
    return PromptRow("f", 1, QUESTION, {}, later)


def test_the_second_turn_is_asked_after_the_first_answer():
    chat = ChatFormat(chat_tokenizers.chatml())
    decode = Asked(chat, "Seven.<|im_end|>", "Since 3 + 4 = 7.<|im_end|>")
    first = chat.prompt_ids(QUESTION)
    held = converse(chat, row("Why?"), first, decode, [5, 9])
    assert [turn.question for turn in held.turns] == ["What is 3 + 4?", "Why?"]
    assert decode.calls[1] == (
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\nSeven.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        9,
    )
    assert decode.calls[0] == (chat.decode(first), 5)
    assert held.broken is None
    timing = held.timings
    assert timing.prompt_lengths == [len(turn.prompt) for turn in held.turns]
    assert len(timing.rounds) == sum(len(answer.rounds) for answer in held.answers) == 2


def test_turns_are_limited_and_seeds_are_all_different():
    chat = ChatFormat(chat_tokenizers.chatml())
    rows = [row("Why?", "And?"), row(), row("So?")]
    prompts = [chat.prompt_ids(QUESTION)] * 3
    decode = Asked(chat, *["Yes.<|im_end|>"] * 9)
    held = hold_conversations(chat, rows, prompts, decode, seed=100, turns=None)
    assert [len(c.turns) for c in held] == [3, 1, 2]
    assert [seed for _, seed in decode.calls] == [100, 103, 106, 101, 102, 105]
    decode = Asked(chat, *["Yes.<|im_end|>"] * 9)
    held = hold_conversations(chat, rows, prompts, decode, seed=100, turns=1)
    assert [len(c.turns) for c in held] == [1, 1, 1]


def test_an_answer_that_cannot_be_written_back_ends_the_conversation_and_is_counted():
    chat = ChatFormat(chat_tokenizers.chatml())
    decode = Asked(chat, "Well <|im_start|> hm.<|im_end|>", "never")
    held = converse(chat, row("Why?"), chat.prompt_ids(QUESTION), decode, [0, 1])
    assert len(held.turns) == 1
    assert "sets turns apart" in held.broken
    (note,) = broken_notes([held, held])
    assert note.startswith("2 of 2 conversations ended before their last turn")
    assert broken_notes([replace(held, broken=None)]) == []


def test_later_turns_are_read_and_no_longer_a_reason_to_warn(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"turns": ["a", "b", "c\\ud800"]}\n{"turns": ["d"]}\n', encoding="utf-8")
    rows = read_prompts([path]).rows
    assert [r.later_turns for r in rows] == [("b", "c\ufffd"), ()]
    assert [r.prompt[0]["content"] for r in rows] == ["a", "d"]
    (suite,) = load_suites(path, n_prompts=9, seed=0)
    assert suite.notes == ()
    assert suite.first_turn_note == ["chats: 1 prompt with later turns: only the first is asked"]
