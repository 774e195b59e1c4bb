"""Sorting, counting, comparing, yes or no."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import CATEGORIES, SMALL_THINGS, article

KINDS = {"fruits": "fruit", "vegetables": "vegetable", "animals": "animal", "birds": "bird",
         "flowers": "flower", "tools": "tool", "shapes": "shape", "vehicles": "vehicle",
         "rooms": "room", "instruments": "instrument"}  # fmt: skip


def sort_numbers(d: Draw) -> None:
    numbers = d.sample(range(1, 100), d.whole(3, 5))
    text = ", ".join(map(str, numbers))
    down = d.chance(0.3)
    if down:
        d.ask(f"Sort these, largest first: {text}", f"Put {text} in falling order.")
    else:
        d.ask(f"Sort these, smallest first: {text}", f"Put {text} in rising order.")
    d.reply(", ".join(map(str, sorted(numbers, reverse=down))), exact=True)


def sort_words(d: Draw) -> None:
    words = d.sample([noun.one for noun in SMALL_THINGS if " " not in noun.one], 3)
    text = ", ".join(words)
    d.ask(f"Sort these words by the alphabet: {text}", f"Put in alphabetical order: {text}")
    d.reply(", ".join(sorted(words)), exact=True)


def larger_number(d: Draw) -> None:
    a, b = d.sample(range(1, 1000), 2)
    d.ask(f"Which is larger, {a} or {b}?", f"Name the larger number: {a} or {b}.")
    d.reply(str(max(a, b)), exact=True)


def is_greater(d: Draw) -> None:
    a, b = d.sample(range(1, 200), 2)
    d.ask(f"Is {a} greater than {b}?", f"Yes or no: {a} is more than {b}.")
    if a > b:
        d.reply(f"Yes, {a} is greater than {b}.", exact=True)
    else:
        d.reply(f"No, {a} is less than {b}.", exact=True)


def is_even(d: Draw) -> None:
    n = d.whole(2, 999)
    d.ask(f"Is {n} even or odd?", f"Even or odd: {n}?")
    d.reply(f"{n} is {'odd' if n % 2 else 'even'}.", exact=True)


def is_member(d: Draw) -> None:
    kind, other = d.sample(list(KINDS), 2)
    word = d.pick(CATEGORIES[kind if d.chance(0.5) else other])
    label = KINDS[kind]
    phrase = article(word)
    d.ask(f"Is {phrase} {article(label)}?", f"Yes or no: {phrase} is {article(label)}.")
    if word in CATEGORIES[kind]:
        d.reply(f"Yes, {phrase} is {article(label)}.", exact=True)
    else:
        d.reply(f"No, {phrase} is not {article(label)}.", exact=True)


def count_up(d: Draw) -> None:
    start, gap, n = d.whole(1, 60), d.pick((1, 1, 2, 3, 5, 10)), d.whole(4, 7)
    end = start + gap * (n - 1)
    numbers = [str(start + gap * i) for i in range(n)]
    if gap == 1:
        d.ask(
            f"Count up, start {start}, end {end}.",
            f"Write every number between {start} and {end}, both included.",
        )
    else:
        d.ask(
            f"Count in steps of {gap}, start {start}, end {end}.",
            f"Start at {start} and add {gap} until you reach {end}.",
        )
    d.reply(", ".join(numbers), exact=True)


FAMILIES = families(
    "ordering", sort_numbers, sort_words, larger_number, is_greater, is_even, is_member, count_up
)
