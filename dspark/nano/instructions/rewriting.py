"""Rewriting: case, word order, plural, tense, pronoun, negation, repetition, opposites."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import ANIMALS, COLOURS, FRUITS, PLACES, SMALL_THINGS, Person

# base, third person, past
VERBS = (
    ("walk", "walks", "walked"), ("run", "runs", "ran"), ("drive", "drives", "drove"),
    ("go", "goes", "went"), ("ride", "rides", "rode"), ("hurry", "hurries", "hurried"),
    ("travel", "travels", "traveled"), ("come", "comes", "came"), ("return", "returns", "returned"),
)  # fmt: skip
ACTIONS = (
    ("buy", "buys", "bought"), ("find", "finds", "found"), ("see", "sees", "saw"),
    ("want", "wants", "wanted"), ("hold", "holds", "held"), ("lose", "loses", "lost"),
    ("paint", "paints", "painted"), ("bring", "brings", "brought"), ("take", "takes", "took"),
)  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "new"), ("long", "short"),
    ("high", "low"), ("early", "late"), ("full", "empty"), ("happy", "sad"), ("hard", "soft"),
    ("open", "closed"), ("light", "dark"), ("wet", "dry"), ("near", "far"), ("loud", "quiet"),
    ("rich", "poor"), ("clean", "dirty"), ("strong", "weak"), ("thick", "thin"), ("left", "right"),
)  # fmt: skip


def _sentence(d: Draw) -> tuple[Person, tuple[str, str, str], str]:
    """Subject, verb forms, and the rest of a simple sentence."""
    who = d.person()
    if d.chance(0.5):
        return who, d.pick(VERBS), f"to the {d.pick(PLACES)}"
    return who, d.pick(ACTIONS), f"the {d.pick(COLOURS)} {d.pick(SMALL_THINGS).one}"


def _phrase(d: Draw, count: int) -> list[str]:
    """`count` different short words."""
    return d.sample([n.one for n in FRUITS + ANIMALS] + list(COLOURS), count)


def upper_case(d: Draw) -> None:
    text = " ".join(_phrase(d, d.whole(1, 3)))
    d.ask(f"Write in capital letters: {text}", f"Make this upper case: {text}")
    d.reply(text.upper(), exact=True)


def lower_case(d: Draw) -> None:
    text = " ".join(_phrase(d, d.whole(1, 3)))
    d.ask(f"Write in small letters: {text.upper()}", f"Make this lower case: {text.upper()}")
    d.reply(text, exact=True)


def reverse_words(d: Draw) -> None:
    words = _phrase(d, d.whole(3, 5))
    text = " ".join(words)
    d.ask(f"Reverse the order of the words: {text}", f"Say these words backwards: {text}")
    d.reply(" ".join(reversed(words)), exact=True)


def make_plural(d: Draw) -> None:
    nouns = d.sample(SMALL_THINGS + ANIMALS, d.whole(1, 3))
    text = ", ".join(noun.one for noun in nouns)
    d.ask(f"Write the plural: {text}", f"Give the plural of: {text}")
    d.reply(", ".join(noun.many for noun in nouns), exact=True)


def past_tense(d: Draw) -> None:
    who, (_, now, past), rest = _sentence(d)
    d.ask(
        f"Put this into the past: {who} {now} {rest}.",
        f"Change to past tense: {who} {now} {rest}.",
    )
    d.reply(f"{who} {past} {rest}.", exact=True)


def use_pronoun(d: Draw) -> None:
    who, (_, now, past), rest = _sentence(d)
    verb = d.pick((now, past))
    d.ask(
        f"Replace the name with he or she: {who} {verb} {rest}.",
        f"Use a pronoun for the name: {who} {verb} {rest}.",
    )
    d.reply(f"{who.He} {verb} {rest}.", exact=True)


def negate(d: Draw) -> None:
    who, (base, now, _), rest = _sentence(d)
    d.ask(f"Say the opposite with not: {who} {now} {rest}.", f"Negate: {who} {now} {rest}.")
    d.reply(f"{who} does not {base} {rest}.", exact=True)


def to_question(d: Draw) -> None:
    who, (base, now, _), rest = _sentence(d)
    d.ask(f"Turn into a question: {who} {now} {rest}.", f"Make a question: {who} {now} {rest}.")
    d.reply(f"Does {who} {base} {rest}?", exact=True)


def repeat_word(d: Draw) -> None:
    (word,), times = _phrase(d, 1), d.whole(2, 6)
    d.ask(f"Write the word {word} {times} times.", f"Repeat {word} {times} times.")
    d.reply(" ".join([word] * times), exact=True)


def opposite(d: Draw) -> None:
    pairs = d.sample(OPPOSITES, d.whole(1, 3))
    sides = [pair if d.chance(0.5) else pair[::-1] for pair in pairs]
    text = ", ".join(a for a, _ in sides)
    d.ask(f"Give the opposite of: {text}", f"Write the opposite: {text}")
    d.reply(", ".join(b for _, b in sides), exact=True)


FAMILIES = families(
    "rewriting",
    upper_case,
    lower_case,
    reverse_words,
    make_plural,
    past_tense,
    use_pronoun,
    negate,
    to_question,
    repeat_word,
    opposite,
)
