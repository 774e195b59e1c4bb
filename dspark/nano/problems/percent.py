"""Percentages that are clean parts: 10, 20, 25 and 50 per cent, and their multiples."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import CLOTHES, GROUPS, HOUSEWARES, SMALL_THINGS

CLEAN = ((10, 10), (20, 5), (25, 4), (50, 2))


def discount(d: Draw) -> None:
    who, item = d.person(), d.pick(CLOTHES + HOUSEWARES)
    rate, n = d.pick(CLEAN)
    price = n * d.whole(3, 20)
    d.ask(
        f"{item.a.capitalize()} that costs ${price} is on sale at {rate}% off. "
        f"What does {who} pay for it?",
        f"{who} gets {rate}% off {item.a} for ${price}. How many dollars is the sale price?",
    )
    off = d.step(price, "/", n, f"{rate}% of the price is @ dollars.", "The discount is @ dollars.")
    d.step(price, "-", off, f"{who} pays @ dollars.", "The sale price is @ dollars.")


def tip(d: Draw) -> None:
    who = d.person()
    rate, n = d.pick(CLEAN[:3])
    meal = n * d.whole(2, 30)
    d.ask(
        f"A meal costs ${meal}. {who} adds a tip of {rate}%. How much is paid in all?",
        f"{who} leaves {rate}% on top of a bill of ${meal}. Find the full amount in dollars.",
    )
    extra = d.step(meal, "/", n, "The tip is @ dollars.", f"{rate}% of it is @ dollars.")
    d.step(meal, "+", extra, "In all it is @ dollars.", f"{who} pays @ dollars.")


def multiple_of_ten(d: Draw) -> None:
    group, who = d.pick(GROUPS), d.person()
    tenth, times = d.whole(2, 20), d.pick((3, 4, 6, 7, 8, 9))
    verb = d.pick(("walk", "have a pet", "wear glasses", "like tea", "own a bike", "play chess"))
    d.ask(
        f"In a {group} of {10 * tenth} people, {10 * times}% {verb}. How many people is that?",
        f"{who} asks {10 * tenth} people of a {group}. {10 * times}% of them {verb}. "
        "How many people are they?",
    )
    one = d.step(10 * tenth, "/", 10, "10% is @ people.", "A tenth of them is @.")
    d.step(one, "*", times, f"{10 * times}% is @ people.", f"Those who {verb}: @.")


def percent_left(d: Draw) -> None:
    who, item = d.person(), d.pick(SMALL_THINGS)
    rate, n = d.pick(CLEAN)
    total, gift = n * d.whole(3, 25), d.whole(2, 9)
    d.ask(
        f"{who} sells {rate}% of {total} {item.many} and gives {gift} to a friend. "
        f"How many {item.many} does {who.he} still have?",
        f"Out of {total} {item.many}, {rate}% are sold and {gift} are given away by {who}. "
        "How many stay?",
    )
    sold = d.step(total, "/", n, f"{who} sells @ {item.many}.", f"{rate}% of {total} is @.")
    left = d.step(total, "-", sold, "After that there are @.", f"Unsold are @ {item.many}.")
    d.step(left, "-", gift, f"{who} still has @ {item.many}.", "Then @ stay.")


FAMILIES = families("percent", discount, tip, multiple_of_ten, percent_left)
