"""The nano target's data: solutions that add up, disjoint splits, tokenizer, template, prompts."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dspark.errors import UserError
from dspark.nano import chat, instructions, problems
from dspark.nano.draw import LARGEST_FACTOR, LARGEST_RESULT, Draw, Family, Redraw
from dspark.nano.generate import (
    SPLITS,
    instruction,
    normalise,
    problem,
    problem_identity,
    row,
    split_of,
)
from dspark.nano.grade import final_answer, is_correct
from dspark.nano.overlap import THRESHOLD, EvaluationIndex, find_hits, read_questions, trigrams
from dspark.nano.prompts import prompt_files, write_prompts
from dspark.nano.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

DATA = Path(__file__).resolve().parent.parent / "data"
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
APPLY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DATA / "k3-nano")


def _names(families: tuple[Family, ...]) -> list[str]:
    return [family.name for family in families]


# -- word problems -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", problems.FAMILIES, ids=_names(problems.FAMILIES))
def test_every_written_calculation_holds_and_the_last_is_the_answer(family: Family) -> None:
    for split in SPLITS:
        for index in range(25):
            made = problem(0, index, split, family)
            equations = EQUATION.findall(made.solution)
            assert len(equations) == made.steps
            for a, op, b, c in equations:
                assert APPLY[op](int(a), int(b)) == int(c), made
            assert equations[-1][-1] == made.answer == final_answer(made.solution)
            assert made.solution.endswith(f"\n#### {made.answer}")
            assert made.solution.count("=") == made.steps, "a sentence wrote its own calculation"
            assert made.question[0].isupper() or made.question[0].isdigit()
            assert "@" not in made.question + made.solution


@pytest.mark.parametrize("family", problems.FAMILIES, ids=_names(problems.FAMILIES))
def test_operands_come_from_the_question_or_an_earlier_step(family: Family) -> None:
    """A reader can follow: apart from small constants (halves, 90 % as nine tenths, the days of a
    week, a dozen, the minutes of an hour) every number was there before."""
    known_facts = {*"23456789", "10", "12", "24", "60"}
    for index in range(25):
        made = problem(1, index, "train", family)
        known = set(re.findall(r"\d+", made.question)) | known_facts
        for a, op, b, c in EQUATION.findall(made.solution):
            # left_over counts the full boxes in its head: its first factor is a quotient.
            if made.family != "left_over":
                assert {a, b} <= known, (made, op)
            known.add(c)


def test_arithmetic_stays_small() -> None:
    for index in range(2000):
        for a, op, b, c in EQUATION.findall(problem(2, index, "train").solution):
            left, right, value = int(a), int(b), int(c)
            assert 2 <= value <= LARGEST_RESULT
            if op == "*":
                assert min(left, right) <= LARGEST_FACTOR
            if op == "/":
                assert right <= LARGEST_FACTOR


@pytest.mark.parametrize(
    ("left", "op", "right"),
    [(7, "/", 2), (3, "-", 2), (3, "-", 9), (13, "*", 13), (600, "+", 400), (26, "/", 13)],
)
def test_a_step_outside_the_taught_arithmetic_is_redrawn(left: int, op: str, right: int) -> None:
    with pytest.raises(Redraw):
        Draw("any").step(left, op, right, "@")


def test_families_topics_and_step_counts() -> None:
    assert len(problems.FAMILIES) >= 44
    assert len({family.topic for family in problems.FAMILIES}) >= 12
    names = _names(problems.FAMILIES + instructions.FAMILIES)
    assert len(set(names)) == len(names)
    steps = Counter(problem(0, 0, "train", family).steps for family in problems.FAMILIES)
    assert set(steps) == {1, 2, 3, 4, 5, 6}


def test_wordings_vary_within_a_family() -> None:
    """Without its numbers and names a family still reads in several ways."""
    for family in problems.FAMILIES:
        openings = {
            tuple(re.sub(r"\d+", "0", problem(0, i, "train", family).question).split()[-4:])
            for i in range(40)
        }
        assert len(openings) >= 2, family.name


# -- instructions and rows -----------------------------------------------------------------------


@pytest.mark.parametrize("family", instructions.FAMILIES, ids=_names(instructions.FAMILIES))
def test_every_instruction_exists_in_every_split(family: Family) -> None:
    for split in SPLITS:
        for index in range(10):
            made = instruction(0, index, split, family)
            assert made.question
            assert made.response
            assert "@" not in made.response
            assert made.answer in (None, made.response)
            assert split_of(normalise(made.question)) == split


def _instructions(name: str) -> Iterator[tuple[str, str]]:
    family = next(f for f in instructions.FAMILIES if f.name == name)
    for index in range(100):
        made = instruction(3, index, "train", family)
        yield made.question, made.response


def test_instructions_with_one_answer_are_right() -> None:
    for question, response in _instructions("sort_numbers"):
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        falling = "largest first" in question or "falling" in question
        assert response == ", ".join(map(str, sorted(numbers, reverse=falling)))
    for question, response in _instructions("is_even"):
        number = int(re.findall(r"\d+", question)[0])
        assert response == f"{number} is {('even', 'odd')[number % 2]}."
    for question, response in _instructions("reverse_words"):
        assert response.split() == question.split(": ")[1].split()[::-1]
    for question, response in _instructions("upper_case"):
        assert response == question.split(": ")[1].upper()
    for question, response in _instructions("larger_number"):
        assert int(response) == max(int(n) for n in re.findall(r"\d+", question))


def test_rows_are_a_function_of_seed_index_and_split() -> None:
    assert [row(5, i, "train") for i in range(50)] == [row(5, i, "train") for i in range(50)]
    assert row(5, 0, "train") != row(6, 0, "train")
    assert row(5, 0, "train") != row(5, 0, "test")
    # Pinned: the frozen target was trained on this text, so a change of the generator is a change
    # of the meaning of every published number.
    text = json.dumps([row(0, i, "train").messages for i in range(200)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "5624dc691af8038f"


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of train, validation, test"):
        row(0, 0, "dev")


def test_splits_are_disjoint() -> None:
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    numbers: dict[str, set[str]] = {split: set() for split in SPLITS}
    problem_names = set(_names(problems.FAMILIES))
    for split, size in (("train", 14_000), ("validation", 3000), ("test", 3000)):
        for index in range(size):
            made = row(0, index, split)
            question = made.messages[0]["content"]
            seen[split].add(normalise(question))
            if made.family in problem_names:
                numbers[split].add(problem_identity(made.family, question))
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not seen[one] & seen[other]
        assert not numbers[one] & numbers[other]
    assert len(seen["train"]) > 0.95 * 14_000


def test_share_of_instructions() -> None:
    kinds = set(_names(instructions.FAMILIES))
    share = sum(row(0, i, "train").family in kinds for i in range(5000)) / 5000
    assert abs(share - 0.14) < 0.02  # four standard errors of 0.0049


# -- grading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("4 * 6 = 24\n#### 24", "24", True),
        ("#### 23\nno, wait\n####24 ", "24", True),
        ("#### 24 dollars", "24", False),
        ("4 * 6 = 24", "24", False),
        ("####", "24", False),
        ("#### 240", "24", False),
        (" red blue\n", "red blue", True),
        ("red blue green", "red blue", False),
    ],
)
def test_is_correct(text: str, answer: str, right: bool) -> None:
    assert is_correct(text, answer) is right


# -- tokenizer and template ----------------------------------------------------------------------


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


# -- overlap with evaluation questions -----------------------------------------------------------


def test_trigrams_ignore_case_punctuation_and_the_value_of_numbers() -> None:
    assert trigrams("Buy 3 pens, now!") == trigrams("buy 12 PENS now")
    assert trigrams("two words") == set()


def test_a_copied_question_with_other_numbers_is_found() -> None:
    made = next(r for i in range(99) if "####" in (r := row(0, i, "train")).messages[1]["content"])
    copied = re.sub(r"\d+", "77", made.messages[0]["content"])
    hits, largest = find_hits(EvaluationIndex(["What is love?", copied]), rows=1)
    assert largest == 1.0
    assert [hit.evaluation for hit in hits] == [copied]


def test_half_a_question_is_a_hit_and_a_third_is_not() -> None:
    index = EvaluationIndex(["a b c d e f g h"])
    assert THRESHOLD < index.closest("a b c d e x y z")[0] == 3 / 6
    assert THRESHOLD > index.closest("a b c d x y z w")[0] == 2 / 6
    assert index.closest("q r s t") == (0.0, "")


def test_evaluation_files_in_every_layout(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    messages = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "x"}]
    records = [{"turns": ["a", "b"]}, {"messages": messages}, {"prompt": "d"}]
    path.write_text("\n\n".join(map(json.dumps, records)), "utf-8")
    assert list(read_questions(path)) == ["a", "b", "c", "d"]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n', "utf-8")
    with pytest.raises(UserError, match=r"eval\.jsonl:2: expected a field"):
        list(read_questions(path))
    path.write_text("{\n", "utf-8")
    with pytest.raises(UserError, match=r"eval\.jsonl:1: expected one JSON object"):
        list(read_questions(path))


# -- shipped files -------------------------------------------------------------------------------


def test_shipped_prompts_are_what_the_generator_writes(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["test.jsonl", "train.jsonl", "validation.jsonl"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (DATA / "prompts" / name).read_bytes(), name


def test_prompt_files_are_disjoint_and_sized() -> None:
    files = prompt_files()
    questions = {name: {r["messages"][0]["content"] for r in rs} for name, rs in files.items()}
    assert {name: len(q) for name, q in questions.items()} == {
        "train.jsonl": 2000,
        "validation.jsonl": 200,
        "test.jsonl": 350,
    }
    assert len(set().union(*questions.values())) == 2550
    for records in files.values():
        for record in records:
            assert [m["role"] for m in record["messages"]] == ["user"]
            assert set(record) <= {"id", "family", "messages", "answer"}
    assert sum("answer" in r and r["answer"].isdigit() for r in files["test.jsonl"]) >= 300


def test_readme_names_every_shipped_file_with_its_hash() -> None:
    text = (DATA / "README.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| `([^`]+)` \| [\d,]+ \| `([0-9a-f]{64})` \|", text, re.M))
    files = [DATA / "k3-nano" / n for n in ("tokenizer.json", "tokenizer_config.json")]
    files += [DATA / "k3-nano" / "chat_template.jinja", *(DATA / "prompts").iterdir()]
    for path in files:
        name = path.relative_to(DATA).as_posix()
        assert listed[name] == hashlib.sha256(path.read_bytes()).hexdigest(), name


def test_data_stays_small() -> None:
    sizes = {p: p.stat().st_size for p in DATA.rglob("*") if p.is_file()}
    assert sum(sizes.values()) <= 12 * 2**20
    assert sum(size for p, size in sizes.items() if p.parent.name == "prompts") < 2**20
