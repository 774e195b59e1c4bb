"""Averages of a few numbers, and the number that an average asks for."""

from __future__ import annotations

from dspark.nano.draw import Draw, Redraw, families
from dspark.nano.words import DAYS

COUNTED = (
    ("points", "scores", "game"),
    ("pages", "reads", "day"),
    ("km", "runs", "day"),
    ("cars", "washes", "day"),
    ("letters", "writes", "week"),
    ("cups", "sells", "hour"),
    ("eggs", "finds", "morning"),
)


def average_of_three(d: Draw) -> None:
    who, (unit, verb, time) = d.person(), d.pick(COUNTED)
    a, b, c = d.whole(4, 40), d.whole(4, 40), d.whole(4, 40)
    if (a + b + c) % 3:
        raise Redraw
    d.ask(
        f"In three {time}s {who} {verb} {a}, {b} and {c} {unit}. What is the average?",
        f"{who} {verb} {a} {unit} in the first {time}, {b} in the second and {c} in the third. "
        f"What is the mean per {time}?",
    )
    two = d.step(a, "+", b, f"The first two make @ {unit}.", "Adding two: @.")
    three = d.step(two, "+", c, f"All three make @ {unit}.", "Adding the third: @.")
    d.step(three, "/", 3, f"The average is @ {unit}.", "The mean is @.")


def average_of_four(d: Draw) -> None:
    who, (unit, verb, _) = d.person(), d.pick(COUNTED)
    a, b, c, e = (d.whole(2, 25) for _ in range(4))
    if (a + b + c + e) % 4:
        raise Redraw
    first = d.whole(0, 3)
    w, x, y, z = DAYS[first : first + 4]
    d.ask(
        f"{who} {verb} {a} {unit} on {w}, {b} on {x}, {c} on {y} and {e} on {z}. "
        "What is the average per day?",
        f"On four days {who} {verb} {a}, {b}, {c} and {e} {unit}. Find the daily average.",
    )
    two = d.step(a, "+", b, "Two days: @.", f"The first two days make @ {unit}.")
    three = d.step(two, "+", c, "Three days: @.", f"With the third day it is @ {unit}.")
    four = d.step(three, "+", e, "Four days: @.", f"With the fourth day it is @ {unit}.")
    d.step(four, "/", 4, f"The average is @ {unit}.", "Per day that is @.")


def needed_for_average(d: Draw) -> None:
    who, (unit, verb, time) = d.person(), d.pick(COUNTED)
    goal, a, b = d.whole(8, 30), d.whole(3, 30), d.whole(3, 30)
    d.ask(
        f"{who} {verb} {a} and {b} {unit} in two {time}s. How many {unit} in the third {time} give "
        f"an average of {goal}?",
        f"The average of three {time}s should be {goal} {unit}. {who} {verb} {a} {unit} in the "
        f"first and {b} in the second. What must the third be?",
    )
    total = d.step(goal, "*", 3, f"Three {time}s need @ {unit}.", "The sum must be @.")
    so_far = d.step(a, "+", b, f"So far there are @ {unit}.", f"{who} already has @.")
    d.step(total, "-", so_far, f"The third {time} must give @ {unit}.", f"That leaves @ {unit}.")


FAMILIES = families("averages", average_of_three, average_of_four, needed_for_average)
