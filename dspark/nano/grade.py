"""Answer checking: what a response gives as its final answer, and whether it is right."""

from __future__ import annotations

import re

_FINAL = re.compile(r"####[ \t]*(\S[^\n]*)")


def final_answer(text: str) -> str | None:
    """What follows the last ``####`` on its line, stripped; None if there is no such mark."""
    found = _FINAL.findall(text)
    return found[-1].strip() if found else None


def is_correct(text: str, answer: str) -> bool:
    """Whether `answer` is what `text` marks as final or, without a mark, its whole text."""
    given = final_answer(text)
    return (text.strip() if given is None else given) == answer
