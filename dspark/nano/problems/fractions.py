"""Halves, thirds and other parts of a whole number."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import COLOURS, GROUPS, PLANTS, SMALL_THINGS

PARTS = ((2, "half"), (3, "a third"), (4, "a quarter"), (5, "a fifth"), (10, "a tenth"))


def part_of(d: Draw) -> None:
    who, item, colour = d.person(), d.pick(SMALL_THINGS), d.pick(COLOURS)
    n, word = d.pick(PARTS)
    total = n * d.whole(2, 20)
    d.ask(
        f"{who} has {total} {item.many}, and {word} of them are {colour}. "
        f"How many {item.many} are not {colour}?",
        f"Of {total} {item.many}, {word} are {colour}. {who} counts the others. How many are they?",
    )
    part = d.step(
        total, "/", n, f"There are @ {colour} ones.", f"{word.capitalize()} of them is @."
    )
    d.step(total, "-", part, "The others are @.", f"Not {colour} are @ {item.many}.")


def several_parts(d: Draw) -> None:
    who, item = d.person(), d.pick(SMALL_THINGS)
    n, name = d.pick(((3, "thirds"), (4, "quarters"), (5, "fifths"), (6, "sixths"), (8, "eighths")))
    top = d.whole(2, n - 1)
    total = n * d.whole(2, 12)
    word = ("two", "three", "four", "five", "six", "seven")[top - 2]
    d.ask(
        f"{who} gives away {word} {name} of {who.his} {total} {item.many}. How many are that?",
        f"How many {item.many} are {word} {name} of {total} {item.many}?",
        f"{who} sold {top}/{n} of {total} {item.many}. How many were sold?",
    )
    one = d.step(total, "/", n, "One part is @.", f"Dividing by {n}: @.")
    d.step(one, "*", top, f"{top} parts are @.", f"That makes @ {item.many}.")


def half_then_more(d: Draw) -> None:
    who, item = d.person(), d.pick(SMALL_THINGS)
    total, more = 2 * d.whole(8, 60), d.whole(2, 12)
    d.ask(
        f"{who} uses half of {total} {item.many} in the morning and {more} more in the evening. "
        "How many remain?",
        f"There were {total} {item.many}. Half are gone by noon, then {who} takes {more}. "
        "How many are still there?",
    )
    half = d.step(total, "/", 2, f"Half is @ {item.many}.", "After the first part there are @.")
    d.step(half, "-", more, f"Then @ {item.many} remain.", "What remains is @.")


def two_fractions(d: Draw) -> None:
    group, (x, y) = d.pick(GROUPS), d.sample(("swim", "sing", "paint", "dance", "read", "cook"), 2)
    (n, a), (m, b) = d.sample(PARTS, 2)
    total = n * m * d.whole(1, 6)
    d.ask(
        f"A {group} has {total} children. {a.capitalize()} of them like to {x}, {b} like to {y}, "
        "and nobody likes both. How many like neither?",
        f"In a {group} of {total}, {a} {x}, {b} {y}, and all the rest play ball. "
        "How many play ball?",
    )
    first = d.step(total, "/", n, f"@ of them {x}.", f"Those who {x}: @.")
    second = d.step(total, "/", m, f"@ of them {y}.", f"Those who {y}: @.")
    both = d.step(first, "+", second, "Together that is @.", "The two groups have @.")
    d.step(total, "-", both, "The rest is @.", "There remain @ children.")


def whole_from_part(d: Draw) -> None:
    who, plant = d.person(), d.pick(PLANTS)
    n, word = d.pick(PARTS)
    part = d.whole(3, 40)
    extra = d.whole(2, 20)
    d.ask(
        f"{word.capitalize()} of the {plant.many} of {who} are in bloom. That is {part} of them. "
        f"How many {plant.many} does {who} have after planting {extra} more?",
        f"{part} {plant.many} are {word} of what {who} owns. {who.He} then gets {extra} new ones. "
        "What is the number now?",
    )
    whole = d.step(part, "*", n, f"The whole is @ {plant.many}.", f"{who} had @.")
    d.step(whole, "+", extra, "With the new ones it is @.", f"Now there are @ {plant.many}.")


FAMILIES = families(
    "fractions", part_of, several_parts, half_then_more, two_fractions, whole_from_part
)
