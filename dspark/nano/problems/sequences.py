"""Numbers that grow by a rule: next terms, days of growth, rows of seats."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import READING, SMALL_THINGS


def next_terms(d: Draw) -> None:
    start, gap = d.whole(2, 60), d.whole(2, 15)
    terms = ", ".join(str(start + gap * i) for i in range(4))
    last = start + 3 * gap
    d.ask(
        f"A list of numbers starts {terms}. Each number is bigger by the same amount. "
        "What is the second number after the last one shown?",
        f"The rule adds the same amount each time: {terms}. Find the term two places after {last}.",
    )
    step = d.step(start + gap, "-", start, "The list grows by @.", "The gap is @.")
    following = d.step(last, "+", step, "The next number is @.", "After that comes @.")
    d.step(following, "+", step, "The one after is @.", "Then comes @.")


def growing_days(d: Draw) -> None:
    who, item = d.person(), d.pick(READING + SMALL_THINGS[:12])
    start, more = d.whole(3, 30), d.whole(2, 12)
    verb = d.pick(("collects", "finds", "sells", "counts", "sorts"))
    d.ask(
        f"On the first day {who} {verb} {start} {item.many}, and each day after that {more} more "
        "than the day before. How many is it on the fourth day?",
        f"{who} {verb} {start} {item.many} on Monday and every day {more} more than the day "
        "before. How many on Thursday?",
    )
    second = d.step(start, "+", more, "On the second day it is @.", "Day two: @.")
    third = d.step(second, "+", more, "On the third day it is @.", "Day three: @.")
    d.step(third, "+", more, "On the fourth day it is @.", "Day four: @.")


def doubling(d: Draw) -> None:
    who, thing = d.person(), d.pick(("cells", "plants", "fish", "ants", "bees", "mice"))
    start, times = d.whole(2, 40), d.whole(2, 4)
    word = {2: "twice", 3: "three times", 4: "four times"}[times]
    d.ask(
        f"{who} counts {start} {thing}. Every week their number doubles. "
        f"How many {thing} are there after it has doubled {word}?",
        f"A group of {start} {thing} doubles {word} while {who} watches. How many are there then?",
    )
    count = start
    for _ in range(times):
        count = d.step(count, "*", 2, "Doubling gives @.", f"Now there are @ {thing}.", "Then: @.")


def rows_of_seats(d: Draw) -> None:
    place = d.pick(("hall", "theater", "cinema", "tent", "stadium"))
    rows, seats, taken = d.whole(3, 12), d.whole(4, 30), d.whole(5, 60)
    d.ask(
        f"A {place} has {rows} rows of {seats} seats. {taken} seats are taken. "
        "How many seats are free?",
        f"In a {place} there are {rows} rows with {seats} seats each. If {taken} people sit down, "
        "how many empty seats remain?",
    )
    total = d.step(rows, "*", seats, f"The {place} has @ seats.", "There are @ seats.")
    d.step(total, "-", taken, "There are @ free seats.", "That leaves @ seats.")


FAMILIES = families("sequences", next_terms, growing_days, doubling, rows_of_seats)
