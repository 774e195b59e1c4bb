"""Draw: one random source that picks the words and numbers of a text and writes its solution.

A family is a function of a `Draw`. It draws people, things and numbers, asks one of several
wordings of its question, and takes steps. A step is one operation on whole numbers; it appends one
sentence in which ``@`` stands for the written calculation (``4 * 6 = 24``) and returns the value,
so the solution and the answer come from one piece of code and cannot disagree. A step refuses
numbers that a small model would not learn to combine; the caller then draws the problem afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import TypeVar

from dspark.nano.words import PEOPLE, Noun, Person

T = TypeVar("T")

LARGEST_RESULT = 999
LARGEST_FACTOR = 12
"""One factor of every product, and every divisor, is at most this."""


class Redraw(Exception):
    """The drawn numbers do not make a well-posed problem; draw again."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of text: its name, its topic, and the function that writes one instance."""

    name: str
    topic: str
    write: Callable[[Draw], None]


def families(topic: str, *writers: Callable[[Draw], None]) -> tuple[Family, ...]:
    """One `Family` per writer, named after it."""
    return tuple(Family(writer.__name__, topic, writer) for writer in writers)


class Draw:
    """Random choices for one text, and the text as it grows.

    Only `Random.random` is used: its sequence for a given seed is the same in every Python version,
    which the derived methods of `Random` do not promise.
    """

    __slots__ = ("_random", "equations", "exact", "question", "sentences", "value")

    def __init__(self, *key: object) -> None:
        digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
        self._random = Random(int.from_bytes(digest, "big")).random
        self.clear()

    def clear(self) -> None:
        """Forget the text, keep the random source."""
        self.question = ""
        self.sentences: list[str] = []
        self.equations: list[str] = []
        self.value = 0
        self.exact = True

    # -- choices ---------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def whole(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options in random order."""
        if 2 * count > len(options):
            pool = list(options)
            for i in range(count):
                j = self.whole(i, len(pool) - 1)
                pool[i], pool[j] = pool[j], pool[i]
            return pool[:count]
        chosen: list[T] = []
        while len(chosen) < count:
            option = self.pick(options)
            if option not in chosen:
                chosen.append(option)
        return chosen

    def person(self) -> Person:
        return self.pick(PEOPLE)

    def people(self, count: int) -> list[Person]:
        return self.sample(PEOPLE, count)

    def things(self, nouns: Sequence[Noun], count: int) -> list[Noun]:
        return self.sample(nouns, count)

    # -- text ------------------------------------------------------------------------------------

    def ask(self, *wordings: str) -> None:
        """Set the question to one of `wordings`."""
        self.question = self.pick(wordings)

    def step(self, left: int, op: str, right: int, *wordings: str) -> int:
        """Write ``left op right = value`` inside one of `wordings` (at its ``@``); return value.

        Raises `Redraw` if the value is not a whole number from 2 to 999 or the operands are outside
        the small arithmetic that the nano target is taught.
        """
        value = _apply(left, op, right)
        equation = f"{left} {op} {right} = {value}"
        self.equations.append(equation)
        self.sentences.append(self.pick(wordings).replace("@", equation))
        self.value = value
        return value

    def reply(self, *wordings: str, exact: bool = False) -> None:
        """Answer an instruction with one of `wordings`; `exact` if it is the only right one."""
        self.sentences.append(self.pick(wordings))
        self.exact = exact


def _apply(left: int, op: str, right: int) -> int:
    if op == "+":
        value = left + right
    elif op == "-":
        value = left - right
    elif op == "*":
        value = left * right
        if min(left, right) > LARGEST_FACTOR or max(left, right) > 99:
            raise Redraw
    elif op == "/":
        value, remainder = divmod(left, right)
        if remainder or right > LARGEST_FACTOR or value > 99:
            raise Redraw
    else:
        raise ValueError(f"unknown operation {op!r}; expected one of + - * /")
    if not 2 <= value <= LARGEST_RESULT:
        raise Redraw
    return value
