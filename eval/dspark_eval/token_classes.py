"""Which tokens a drafter misses: acceptance by what the target said there, and by who asked.

    C(class) = #accepted / (#accepted + #instead)        over the target's tokens of a class

Every token that a round judged is one the target let through (accepted) or took instead (a
correction or a sibling); bonus tokens were not drafted and are left out. So this is conditional
acceptance by class, all positions taken together. A class is told by the text of the token alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dspark.runtime.records import Generation
from dspark_eval.intervals import Interval, estimate
from dspark_eval.samples import emitted

CLASSES = ("digits", "words", "punctuation", "white space", "special")


@dataclass(frozen=True)
class ClassAcceptance:
    """Acceptance of one class of tokens. `share`: of all judged tokens."""

    name: str
    judged: int
    share: float
    acceptance: float | None
    ci95: Interval | None


def token_class(text: str, special: bool = False) -> str:
    """One of `CLASSES`, by the first character that is not a space."""
    if special:
        return "special"
    bare = text.strip()
    if not bare:
        return "white space"
    if bare[0].isdigit():
        return "digits"
    return "words" if bare[0].isalpha() else "punctuation"


def by_class(
    answers: Sequence[Generation], name_of: Callable[[int], str], classes: Sequence[str] = CLASSES
) -> list[ClassAcceptance]:
    """Acceptance by class, intervals by bootstrap over answers; classes without tokens left out."""
    counts = [_counts(answer, name_of) for answer in answers]
    total = sum(sum(judged.values()) for judged, _ in counts)
    found = []
    for name in classes:
        judged = [both[name] for both, _ in counts]
        good = [accepted[name] for _, accepted in counts]
        if not sum(judged):
            continue
        value = estimate(good, judged)
        found.append(
            ClassAcceptance(name, sum(judged), sum(judged) / total, value.value, value.ci95)
        )
    return found


def _counts(answer: Generation, name_of: Callable[[int], str]) -> tuple[Counter[str], Counter[str]]:
    judged: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for token in emitted(answer):
        if token.kind in ("accepted", "corrected", "sibling"):
            name = name_of(token.token)
            judged[name] += 1
            accepted[name] += token.kind == "accepted"
    return judged, accepted


def hardest(
    answers: Sequence[Generation], decode: Callable[[int], str], most: int = 12
) -> list[tuple[str, str, int]]:
    """What precedes a correction, and the target's token there: text, text, times; most first."""
    pairs: Counter[tuple[str, str]] = Counter()
    for answer in answers:
        pairs.update(_corrections(answer, decode))
    ordered = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    return [(before, said, times) for (before, said), times in ordered[:most]]


def _corrections(answer: Generation, decode: Callable[[int], str]) -> Iterable[tuple[str, str]]:
    said = emitted(answer)
    for before, token in pairwise(said):
        if token.kind == "corrected":
            yield decode(before.token), decode(token.token)
