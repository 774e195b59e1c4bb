"""Training rows: the target's very tokens, exact drops, nothing that depends on batching."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dspark.distill.answers import hold_out
from dspark.distill.batches import derived_generator
from dspark.distill.chat import ChatFormat, TrainingRow
from dspark.distill.messages import Message
from dspark.distill.prompts import PromptRow, read_prompts
from dspark.distill.responses import ResponseSettings, build_rows, cache_key
from dspark.distill.rows import RowSet, check_supervised_share, rows_from_jsonl, rows_to_jsonl
from dspark.errors import UserError
from dspark.runtime.plain import plain_generate
from tests import chat_tokenizers as small
from tests.toy_target import ToyTarget

Pair = tuple[PreTrainedTokenizerFast, ToyTarget]
SETTINGS = ResponseSettings(max_new_tokens=12, max_length=160, batch_size=4)


class EndingTarget(ToyTarget):
    """A toy target that stops after about twenty sampled tokens, and never when greedy."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        logits[..., self.end_token_ids[0]] = 9.0
        return logits


def target_of(tokenizer: PreTrainedTokenizerFast, end: str) -> ToyTarget:
    """A target over the tokenizer's ids whose end token is `end`."""
    ends = (tokenizer.convert_tokens_to_ids(end),)
    return EndingTarget(vocab_size=len(tokenizer), end_token_ids=ends)


@pytest.fixture(scope="module")
def k3() -> Pair:
    tokenizer = small.k3()
    return tokenizer, target_of(tokenizer, "<|end_of_msg|>")


def ask(line: int, *texts: str, file: str = "p.jsonl") -> PromptRow:
    """A conversation whose turns alternate, the user first."""
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[i % 2], content=text) for i, text in enumerate(texts))
    return PromptRow(file, line, messages)


PROMPTS = [ask(i + 1, "apples " * (i % 5 + 1) + str(i)) for i in range(11)]


def test_supervised_ids_are_the_ids_that_the_target_emitted(k3: Pair) -> None:
    tokenizer, target = k3
    rows = build_rows(target, tokenizer, PROMPTS, SETTINGS)
    assert not rows.dropped
    assert [row.line for row in rows.rows] == list(range(1, 12))
    chat = ChatFormat(tokenizer)
    retokenised = 0
    for prompt, row in zip(PROMPTS, rows.rows, strict=True):
        shown = chat.prompt_ids(prompt.messages)
        emitted = list(row.ids[len(shown) :])
        assert list(row.ids[: len(shown)]) == shown
        assert list(row.loss_mask) == [False] * len(shown) + [True] * len(emitted)
        assert row.provenance == "target"
        retokenised += tokenizer.encode(chat.decode(emitted), add_special_tokens=False) != emitted
    # The toy target emits arbitrary bytes: going through text would have changed most rows.
    assert retokenised > 5
    assert rows.ended == sum(row.ids[-1] in target.end_token_ids for row in rows.rows)
    assert 0 < rows.ended < 11


def test_greedy_rows_equal_plain_decoding_one_by_one(k3: Pair) -> None:
    tokenizer, target = k3
    settings = replace(SETTINGS, temperature=0.0)
    rows = build_rows(target, tokenizer, PROMPTS, settings).rows
    chat = ChatFormat(tokenizer)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        shown = chat.prompt_ids(prompt.messages)
        alone = plain_generate(target, shown, max_new_tokens=12, sampling=settings.sampling)
        assert list(row.ids) == shown + alone.tokens


@pytest.mark.parametrize("cut", [False, True])
def test_batch_size_does_not_show(k3: Pair, cut: bool) -> None:
    tokenizer, target = k3
    chat = ChatFormat(tokenizer)
    longest = max(len(chat.prompt_ids(prompt.messages)) for prompt in PROMPTS)
    max_length = longest + 4 if cut else 160
    settings = replace(SETTINGS, max_length=max_length)
    results = [
        build_rows(target, tokenizer, PROMPTS, replace(settings, batch_size=size))
        for size in (1, 3, 4, 64)
    ]
    assert all(result == results[0] for result in results)
    assert any(len(row.ids) == max_length for row in results[0].rows) == cut
    other = build_rows(target, tokenizer, PROMPTS, replace(settings, seed=1))
    assert other.rows != results[0].rows


def test_equal_prompts_get_different_answers(k3: Pair) -> None:
    tokenizer, target = k3
    rows = build_rows(target, tokenizer, [ask(1, "same"), ask(2, "same")], SETTINGS).rows
    assert rows[0].ids != rows[1].ids


def test_given_answers_are_kept_or_written_anew(k3: Pair) -> None:
    tokenizer, target = k3
    prompts = [
        ask(1, "q", "first answer", "and?", "second answer"),
        ask(2, "q", "history", "open?"),
        ask(3, "open?"),
    ]
    chat = ChatFormat(tokenizer)
    given = build_rows(target, tokenizer, prompts, replace(SETTINGS, responses="given")).rows
    assert [row.provenance for row in given] == ["given", "target", "target"]
    assert given[0] == replace(chat.training_row(prompts[0].messages), file="p.jsonl", line=1)
    anew = build_rows(target, tokenizer, prompts, SETTINGS).rows
    assert [row.provenance for row in anew] == ["target"] * 3
    shown = chat.prompt_ids(prompts[0].messages[:3])
    assert list(anew[0].ids[: len(shown)]) == shown
    assert not any(anew[0].loss_mask[: len(shown)])
    assert all(anew[0].loss_mask[len(shown) :])
    assert anew[1:] == given[1:]


def long_chats() -> list[PromptRow]:
    """Eight chats: about 200 tokens of question, about 10 of answer."""
    return [ask(i + 1, "0123456789" * 20, "#### 12345") for i in range(8)]


def test_rows_that_lose_their_answer_to_truncation_are_dropped(k3: Pair) -> None:
    tokenizer, target = k3
    prompts = [*long_chats(), ask(9, "q", "#### 12345")]
    settings = replace(SETTINGS, responses="given", max_length=64)
    rows = build_rows(target, tokenizer, prompts, settings)
    assert [row.line for row in rows.rows] == [9]
    assert rows.dropped == {"too-few-supervised": tuple(f"p.jsonl:{i}" for i in range(1, 9))}
    assert "8 dropped, too-few-supervised" in rows.summary()
    assert "p.jsonl:1" in rows.summary()


def test_nothing_left_is_one_clear_error(k3: Pair) -> None:
    tokenizer, target = k3
    settings = replace(SETTINGS, max_length=64)
    for responses, reason in (("given", "too-few-supervised"), ("regenerate", "prompt-too-long")):
        with pytest.raises(UserError, match="no training row is left") as caught:
            build_rows(target, tokenizer, long_chats(), replace(settings, responses=responses))
        assert f"8 {reason}" in str(caught.value)
        assert "max_length is 64" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no prompts were given"):
        build_rows(target, tokenizer, [], SETTINGS)


def test_truncation_keeps_what_fits_and_the_minimum_is_exact(k3: Pair) -> None:
    tokenizer, target = k3
    row = ChatFormat(tokenizer).training_row(ask(1, "q", "#### 12345").messages)
    first = row.loss_mask.index(True)
    for kept, survives in ((2, True), (1, False)):
        settings = replace(SETTINGS, responses="given", max_length=first + kept)
        prompts = [ask(1, "q", "#### 12345"), ask(2, "", "#### 12345")]
        rows = build_rows(target, tokenizer, prompts, settings).rows
        assert (1 in [r.line for r in rows]) == survives
        assert all(len(r.ids) <= first + kept for r in rows)


def test_a_prompt_must_leave_room_for_the_minimum(k3: Pair) -> None:
    tokenizer, target = k3
    prompts = [ask(1, "q"), ask(2, "what is the total?")]
    longest = len(ChatFormat(tokenizer).prompt_ids(prompts[1].messages))
    dropped = build_rows(target, tokenizer, prompts, replace(SETTINGS, max_length=longest + 1))
    assert dropped.dropped == {"prompt-too-long": ("p.jsonl:2",)}
    assert [row.line for row in dropped.rows] == [1]
    kept = build_rows(target, tokenizer, prompts, replace(SETTINGS, max_length=longest + 2))
    assert [row.line for row in kept.rows] == [1, 2]
    assert kept.rows[1].supervised == 2


def test_rows_with_an_inexact_mask_are_counted_not_guessed(k3: Pair) -> None:
    tokenizer, target = k3
    settings = replace(SETTINGS, responses="given")
    prompts = [ask(1, "q", "a"), ask(2, "q", "ends <|end_of_msg|> here"), ask(3, "q<|sep|>")]
    rows = build_rows(target, tokenizer, prompts, settings)
    assert [row.line for row in rows.rows] == [1]
    assert rows.dropped == {"marker-in-text": ("p.jsonl:2", "p.jsonl:3")}
    with pytest.raises(UserError) as caught:
        build_rows(target, tokenizer, prompts, replace(settings, strict=True))
    assert str(caught.value).startswith("p.jsonl:2: a turn's text holds a token")
    assert "message 1: '<|end_of_msg|>'" in str(caught.value)


def test_a_template_that_rewrites_history_gives_one_row_for_each_answer() -> None:
    """Each as the target was shown it at that turn; all stay on one side of the held-out split."""
    tokenizer = small.qwen3()
    target = target_of(tokenizer, "<|im_end|>")
    messages = ask(2, "q", "first", "r", "second", "s", "third").messages
    prompts = [ask(1, "p", "a"), PromptRow("p.jsonl", 2, messages)]
    rows = build_rows(target, tokenizer, prompts, replace(SETTINGS, responses="given"))
    assert [row.line for row in rows.rows] == [1, 2, 2, 2]
    assert not rows.dropped
    chat = ChatFormat(tokenizer)
    for row, place in zip(rows.rows[1:], (1, 3, 5), strict=True):
        shown = chat.prompt_ids(messages[:place])
        assert list(row.ids[: len(shown)]) == shown
        assert row.loss_mask.index(True) == len(shown)
        answer = [t for t, m in zip(row.ids, row.loss_mask, strict=True) if m]
        assert chat.decode(answer) == messages[place]["content"] + "<|im_end|>"
    split = hold_out(rows, 3, seed=0)
    assert [row.line for row in split.held_out] in ([2, 2, 2], [1])
    # Answered anew, the same conversation has one exact row: its history is only read.
    assert len(build_rows(target, tokenizer, prompts, SETTINGS).rows) == 2


def test_both_ways_of_thinking_are_rows_of_their_own(k3: Pair) -> None:
    tokenizer, target = k3
    both = build_rows(target, tokenizer, PROMPTS, replace(SETTINGS, thinking="both"))
    off = build_rows(target, tokenizer, PROMPTS, SETTINGS)
    assert both.rows[: len(PROMPTS)] == off.rows
    assert [row.line for row in both.rows] == [row.line for row in off.rows] * 2
    marked = build_rows(
        target, tokenizer, [*PROMPTS, ask(12, "<|sep|>")], replace(SETTINGS, thinking="both")
    )
    assert marked.dropped == {"marker-in-text": ("p.jsonl:12",)}  # a line once
    chats = [ChatFormat(tokenizer, thinking=thinking) for thinking in (False, True)]
    asked = [chat.prompt_ids(prompt.messages) for chat in chats for prompt in PROMPTS]
    assert [list(r.ids[: r.loss_mask.index(True)]) for r in both.rows] == asked
    assert chats[0].prompt_ids(PROMPTS[0].messages) != chats[1].prompt_ids(PROMPTS[0].messages)
    split = hold_out(both, 4, seed=1)
    assert len(split.held_out) == 4
    assert len({row.line for row in split.held_out}) == 2
    assert not {row.line for row in split.held_out} & {row.line for row in split.training}


def test_a_given_answer_belongs_to_the_way_it_was_written(k3: Pair) -> None:
    tokenizer, target = k3
    thought = Message(role="assistant", content="4", reasoning_content="2 and 2")
    prompts = [ask(1, "q", "plain"), PromptRow("p.jsonl", 2, (*ask(2, "q").messages, thought))]
    rows = build_rows(
        target, tokenizer, prompts, replace(SETTINGS, responses="given", thinking="both")
    )
    assert [row.line for row in rows.rows] == [1, 2]
    assert not rows.dropped
    texts = [ChatFormat(tokenizer).decode(row.ids) for row in rows.rows]
    assert ["think" in text for text in texts] == [False, True]


def test_thinking_without_a_switch_is_refused() -> None:
    tokenizer = small.chatml()
    target = target_of(tokenizer, "<|im_end|>")
    for thinking in ("on", "both"):
        with pytest.raises(UserError, match=f"data.thinking is {thinking}.* no thinking switch"):
            build_rows(target, tokenizer, PROMPTS, replace(SETTINGS, thinking=thinking))


def test_a_question_asked_twice_is_held_out_or_trained_on_but_not_both(k3: Pair) -> None:
    tokenizer, target = k3
    prompts = [ask(i + 1, f"apples {i % 7}") for i in range(21)]
    rows = build_rows(target, tokenizer, prompts, SETTINGS)
    for seed in range(8):
        split = hold_out(rows, 6, seed)
        held = {(row.line - 1) % 7 for row in split.held_out}
        assert len(split.held_out) == 6
        assert len(held) == 2
        assert not held & {(row.line - 1) % 7 for row in split.training}
        assert len(split.training) == 15
    with pytest.raises(UserError, match="every prompt has more rows"):
        hold_out(rows, 2, seed=0)
    alone = RowSet(rows.rows[:7], {})
    order = torch.randperm(7, generator=derived_generator(3, "held out")).tolist()
    assert hold_out(alone, 3, 3).held_out == tuple(alone.rows[i] for i in sorted(order[:3]))


def test_rows_that_are_linked_through_a_third_stay_together() -> None:
    """a and b share a line, b and c a prompt: c must not be trained on when a is held out."""

    def row(ids: tuple[int, ...], line: int) -> TrainingRow:
        return TrainingRow(ids, (False, False, True), "target", "p", line)

    linked = [row((1, 1, 5), 1), row((3, 3, 5), 3), row((2, 2, 5), 1), row((2, 2, 6), 2)]
    rows = RowSet((*linked, *(row((9, i, 5), 10 + i) for i in range(4))), {})
    for seed in range(12):
        held = {row.line for row in hold_out(rows, 4, seed).held_out}
        assert not held & {1, 2} or held >= {1, 2}


def test_rows_cut_at_the_end_are_counted(k3: Pair) -> None:
    tokenizer, target = k3
    prompts = [ask(1, "q", "0123456789" * 9), ask(2, "q", "short")]
    settings = replace(SETTINGS, responses="given", max_length=70)
    rows = build_rows(target, tokenizer, prompts, settings)
    assert rows.cut == 1
    assert "1 cut at max_length" in rows.summary()


def test_a_broken_template_is_blamed_and_not_the_prompt_file() -> None:
    for template, said in (
        ("{% for m in messages %}{{ m.content }}", "Unexpected end of template"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ):
        tokenizer = small.tokenizer(template, ["<|im_end|>"], eos_token="<|im_end|>")
        target = target_of(tokenizer, "<|im_end|>")
        with pytest.raises(UserError, match="cannot render a plain user turn") as caught:
            build_rows(target, tokenizer, [ask(1, "q", "a")], SETTINGS)
        assert said in str(caught.value)
        assert "p.jsonl" not in str(caught.value)


def test_another_models_template_is_refused_with_a_decoded_row() -> None:
    tokenizer = small.chatml()
    target = target_of(tokenizer, "<|im_end|>")
    tokenizer.chat_template = small.LLAMA.replace("bos_token", "''")
    prompts = [ask(4, "q", "a")]
    with pytest.raises(UserError) as caught:
        build_rows(target, tokenizer, prompts, replace(SETTINGS, responses="given"))
    message = str(caught.value)
    assert message.startswith("p.jsonl:4: answers end with ")
    assert "stops at '<|im_end|>'" in message
    assert "⟦a<|eot_id|>⟧" in message


def test_a_tokenizer_larger_than_the_target_is_refused(k3: Pair) -> None:
    tokenizer, _ = k3
    small_target = ToyTarget(vocab_size=100)
    prompts = [ask(1, "q", "a")]
    with pytest.raises(UserError, match="outside the 100 ids of target toy"):
        build_rows(small_target, tokenizer, prompts, replace(SETTINGS, responses="given"))


@pytest.mark.parametrize(("mask", "share"), [(False, "0 %"), (True, "100 %")])
def test_a_file_without_contrast_stops_the_run(mask: bool, share: str) -> None:
    chat = ChatFormat(small.chatml())
    good = chat.training_row(ask(1, "q", "a").messages)
    good = replace(good, file="good.jsonl", line=1)
    flat = replace(good, loss_mask=(mask,) * len(good.ids), file="flat.jsonl", line=3)
    check_supervised_share([good], chat)
    check_supervised_share([replace(good, file="flat.jsonl"), flat], chat)
    with pytest.raises(UserError) as caught:
        check_supervised_share([good, flat, flat], chat)
    assert str(caught.value).startswith(f"flat.jsonl:3: {share}")
    shown = "⟦<|im_start|>user\\nq" if mask else "<|im_start|>user\\nq"
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_hides_answers_stops_the_run() -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    tokenizer = small.tokenizer(template, ["<|im_end|>"], eos_token="<|im_end|>")
    target = target_of(tokenizer, "<|im_end|>")
    prompts = [ask(1, "q", "a")]
    with pytest.raises(UserError, match="0 % of the tokens"):
        build_rows(target, tokenizer, prompts, replace(SETTINGS, responses="given"))


def test_progress_counts_prompts_and_tokens(k3: Pair) -> None:
    tokenizer, target = k3
    seen: list[tuple[int, int, int]] = []
    rows = build_rows(target, tokenizer, PROMPTS, SETTINGS, lambda *now: seen.append(now))
    assert [done for done, _, _ in seen] == [4, 8, 11]
    assert {total for _, total, _ in seen} == {11}
    assert seen[-1][2] == sum(row.supervised for row in rows.rows)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"max_new_tokens": 0},
        {"min_supervised": 1},
        {"batch_size": 0},
        {"max_length": 2},
        {"responses": "both"},
        {"thinking": "maybe"},
    ],
)
def test_wrong_settings_are_user_errors(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        replace(SETTINGS, **wrong)


def test_from_file_to_rows(k3: Pair, tmp_path: Path) -> None:
    """Odd characters go through reading, templating and masking unchanged."""
    tokenizer, target = k3
    text = "emoji 👩‍🚀 nul \x00 rtl \u202eabc\u202c 2024-05-01"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n" + '{"prompt": "\\ud83d"}\n')
    prompts = read_prompts([path])
    rows = build_rows(target, tokenizer, prompts.rows, replace(SETTINGS, responses="given")).rows
    answer = [t for t, m in zip(rows[0].ids, rows[0].loss_mask, strict=True) if m]
    assert text in ChatFormat(tokenizer).decode(answer)
    assert "\ufffd" in ChatFormat(tokenizer).decode(rows[1].ids)


def test_the_row_cache_gives_back_what_was_written(k3: Pair, tmp_path: Path) -> None:
    tokenizer, target = k3
    prompts = [*PROMPTS, ask(12, "x" * 400)]
    rows = build_rows(target, tokenizer, prompts, SETTINGS)
    assert rows.dropped
    key = cache_key("weights", tokenizer, prompts, SETTINGS)
    path = tmp_path / "cache" / "rows.jsonl"
    rows_to_jsonl(path, rows, key)
    assert rows_from_jsonl(path, key) == rows
    assert [item.name for item in path.parent.iterdir()] == ["rows.jsonl"]
    other_batch = cache_key("weights", tokenizer, prompts, replace(SETTINGS, batch_size=9))
    assert rows_from_jsonl(path, other_batch) == rows


def test_mask_runs_of_any_shape_survive(tmp_path: Path) -> None:
    masks = [(), (True,), (False,), (True, False, False, True), (False, True, True)]
    rows = RowSet(tuple(TrainingRow(tuple(range(len(m))), m) for m in masks), {})
    rows_to_jsonl(tmp_path / "r", rows, {})
    assert rows_from_jsonl(tmp_path / "r", {}) == rows


def test_a_cache_made_otherwise_is_refused_by_name(k3: Pair, tmp_path: Path) -> None:
    tokenizer, _ = k3
    path = tmp_path / "rows.jsonl"
    key = cache_key("weights", tokenizer, PROMPTS, SETTINGS)
    rows_to_jsonl(path, RowSet((), {}), key)
    others = {
        "target": cache_key("other weights", tokenizer, PROMPTS, SETTINGS),
        "tokenizer": cache_key("weights", small.chatml(), PROMPTS, SETTINGS),
        "prompts": cache_key("weights", tokenizer, PROMPTS[:5], SETTINGS),
        "seed": cache_key("weights", tokenizer, PROMPTS, replace(SETTINGS, seed=5)),
        "temperature": cache_key("weights", tokenizer, PROMPTS, replace(SETTINGS, temperature=0.0)),
        "thinking": cache_key("weights", tokenizer, PROMPTS, replace(SETTINGS, thinking="on")),
    }
    for name, other in others.items():
        with pytest.raises(UserError, match=f"made with another .*{name}"):
            rows_from_jsonl(path, other)


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = TrainingRow((1, 2), (False, True))
    rows_to_jsonl(path, RowSet((row, row), {}), {})
    whole = path.read_text()
    for broken in (
        "",
        whole[:-20],
        "\n".join(whole.splitlines()[:2]),
        whole.replace("rows-2", "rows-1"),
    ):
        path.write_text(broken)
        with pytest.raises(UserError, match="not a complete row cache"):
            rows_from_jsonl(path, {})
    with pytest.raises(UserError, match="cannot be read"):
        rows_from_jsonl(tmp_path / "absent", {})
