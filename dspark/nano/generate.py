"""Deterministic rows: a word problem or an instruction for (seed, index, split).

Splits are disjoint by construction. A word problem's identity is its family and the numbers in its
question; an instruction's is its wording. A hash of the identity names the split that owns it, and
a draw that belongs to another split is thrown away. So a held-out problem has numbers that its
family never showed in training, not merely another name or another phrasing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from dspark.nano.draw import Draw, Family, Redraw
from dspark.nano.instructions import FAMILIES as INSTRUCTIONS
from dspark.nano.problems import FAMILIES as PROBLEMS
from dspark.nano.words import PEOPLE

SPLITS = ("train", "validation", "test")
INSTRUCTION_SHARE = 0.14
_DIGITS = re.compile(r"\d+")
_CAPITALISED = {person.name for person in PEOPLE}


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem: `solution` ends with ``#### answer``; `steps` counts its calculations."""

    question: str
    solution: str
    answer: str
    family: str
    steps: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction and a right response; `answer` is the response if no other is right."""

    question: str
    response: str
    answer: str | None
    family: str


@dataclass(frozen=True, slots=True)
class Row:
    """A chat of one user and one assistant turn, and what it came from."""

    id: str
    messages: list[dict[str, str]]
    family: str
    answer: str | None


def normalise(text: str) -> str:
    """Lower-case words and numbers of `text`, single spaces, no punctuation."""
    return " ".join(re.findall(r"[a-z]+|\d+", text.lower()))


def split_of(identity: str) -> str:
    """The one split that owns `identity`: eight of ten hashes train, one each the others."""
    digit = int.from_bytes(blake2b(identity.encode(), digest_size=4).digest(), "big") % 10
    return "train" if digit <= 7 else SPLITS[digit - 7]


def problem_identity(family: str, question: str) -> str:
    """What makes a word problem the same problem: its family and its numbers in order."""
    return f"{family}:{','.join(_DIGITS.findall(question))}"


def problem(seed: int, index: int, split: str, family: Family | None = None) -> Problem:
    """The word problem number `index` of `split`; a given `family` replaces the drawn one."""
    d = _draw("problem", seed, index, split)
    family = family or d.pick(PROBLEMS)
    while True:
        d.clear()
        try:
            family.write(d)
        except Redraw:
            continue
        if split_of(problem_identity(family.name, d.question)) == split:
            break
    steps = len(d.equations)
    return Problem(_decorate(d), _solution(d), str(d.value), family.name, steps)


def instruction(seed: int, index: int, split: str, family: Family | None = None) -> Instruction:
    """The instruction number `index` of `split`; a given `family` replaces the drawn one."""
    d = _draw("instruction", seed, index, split)
    family = family or d.pick(INSTRUCTIONS)
    while True:
        d.clear()
        family.write(d)
        if split_of(normalise(d.question)) == split:
            break
    response = d.sentences[0]
    return Instruction(d.question, response, response if d.exact else None, family.name)


def row(seed: int, index: int, split: str) -> Row:
    """Row `index` of the mixture: a word problem, or with probability 0.14 an instruction."""
    name = f"{split}-{seed}-{index}"
    if _draw("row", seed, index, split).chance(INSTRUCTION_SHARE):
        text = instruction(seed, index, split)
        return Row(name, _chat(text.question, text.response), text.family, text.answer)
    made = problem(seed, index, split)
    return Row(name, _chat(made.question, made.solution), made.family, made.answer)


def _draw(kind: str, seed: int, index: int, split: str) -> Draw:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    return Draw(kind, seed, index, split)


def _chat(question: str, response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": response}]


def _decorate(d: Draw) -> str:
    """The question, now and then with a request for the way of answering."""
    if d.chance(0.85):
        return d.question
    request = d.pick(("Show your work.", "Solve step by step.", "Explain each step."))
    return f"{d.question} {request}"


def _solution(d: Draw) -> str:
    """The steps in one of four layouts, then the final answer."""
    style = d.whole(0, 9)
    if style < 5 or len(d.sentences) == 1:
        lines = d.sentences
    elif style < 8:
        lines = [_linked(d, i, sentence) for i, sentence in enumerate(d.sentences)]
    elif style == 8:
        lines = [f"Step {i}: {sentence}" for i, sentence in enumerate(d.sentences, 1)]
    else:
        lines = [" ".join(d.sentences)]
    return "\n".join([*lines, f"#### {d.value}"])


def _linked(d: Draw, place: int, sentence: str) -> str:
    """`sentence` after a linking word: first, then, finally."""
    first = sentence.split(" ", 1)[0]
    if first == "Then" or ":" in sentence:
        return sentence
    if first not in _CAPITALISED:
        sentence = sentence[0].lower() + sentence[1:]
    if place == 0:
        link = "First"
    elif place == len(d.sentences) - 1:
        link = d.pick(("Finally", "So"))
    else:
        link = d.pick(("Then", "Next"))
    return f"{link}, {sentence}"
