"""Lengths, weights and volumes: cutting, filling, converting, mixing."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import BOXES, SMALL_THINGS

LONG_THINGS = ("rope", "ribbon", "wire", "pipe", "plank", "string")
UNITS = (
    ("hour", "minutes", 60),
    ("day", "hours", 24),
    ("week", "days", 7),
    ("year", "months", 12),
    ("dozen", "pieces", 12),
    ("foot", "inches", 12),
    ("yard", "feet", 3),
)
PLURALS = {"foot": "feet", "dozen": "dozen"}


def cut_pieces(d: Draw) -> None:
    who, stuff = d.person(), d.pick(LONG_THINGS)
    piece, n, rest = d.whole(2, 12), d.whole(2, 12), d.whole(2, 9)
    length = piece * n + rest
    d.ask(
        f"{who} cuts {n} pieces of {piece} cm from a {stuff} of {length} cm. "
        f"How many cm of {stuff} remain?",
        f"A {stuff} is {length} cm long. {who} takes off {n} pieces, each {piece} cm. "
        "How long is the part that is left?",
    )
    cut = d.step(n, "*", piece, "The pieces are @ cm together.", f"{who} cuts off @ cm.")
    d.step(length, "-", cut, f"The rest of the {stuff} is @ cm.", "There remain @ cm.")


def number_of_pieces(d: Draw) -> None:
    who, stuff = d.person(), d.pick(LONG_THINGS)
    piece, n, rolls = d.whole(2, 12), d.whole(2, 12), d.whole(2, 9)
    d.ask(
        f"A {stuff} of {piece * n} m is cut into pieces of {piece} m. {who} does this with {rolls} "
        f"such {stuff}s. How many pieces are there?",
        f"{who} has {rolls} {stuff}s, each {piece * n} m long, and cuts them into {piece} m "
        "pieces. Find the number of pieces.",
    )
    each = d.step(piece * n, "/", piece, f"One {stuff} gives @ pieces.", f"Each {stuff} makes @.")
    d.step(rolls, "*", each, f"{rolls} {stuff}s give @ pieces.", "In all there are @ pieces.")


def convert_and_add(d: Draw) -> None:
    big, small, size = d.pick(UNITS)
    n, extra = d.whole(2, 9), d.whole(2, size + 9)
    bigs = PLURALS.get(big, big + "s")
    d.ask(
        f"{d.person()} needs {n} {bigs} and {extra} {small}. Give it all in {small}.",
        f"Turn this amount into {small} only: {n} {bigs}, {extra} {small}.",
        f"{d.person()} counts {n} {bigs} plus {extra} single {small}. "
        f"How many {small} does that make?",
    )
    whole = d.step(n, "*", size, f"{n} {bigs} are @ {small}.", f"One {big} is {size} {small}: @.")
    d.step(whole, "+", extra, f"With the other {small} it is @.", f"Together: @ {small}.")


def total_weight(d: Draw) -> None:
    item, box = d.pick(SMALL_THINGS), d.pick(BOXES)
    n, weight, empty = d.whole(3, 12), d.whole(3, 30), d.whole(5, 80)
    d.ask(
        f"An empty {box.one} weighs {empty} grams, one {item.one} {weight} grams. "
        f"What does the {box.one} weigh with {n} {item.many} in it?",
        f"{d.person()} puts {n} {item.many} of {weight} grams each into a {box.one} of {empty} "
        "grams. How many grams is that altogether?",
    )
    inside = d.step(n, "*", weight, f"The {item.many} weigh @ grams.", f"{n} {item.many} weigh @.")
    d.step(inside, "+", empty, f"With the {box.one} it is @ grams.", "The total weight is @ grams.")


def fill_tank(d: Draw) -> None:
    who, tank = d.person(), d.pick(("tank", "barrel", "pool", "bucket", "tub"))
    size, n, inside = d.whole(2, 12), d.whole(3, 12), d.whole(4, 60)
    full = inside + size * n
    d.ask(
        f"A {tank} holds {full} liters and has {inside} liters in it. {who} pours in cans of "
        f"{size} liters. How many cans make it full?",
        f"There are {inside} liters of water in a {tank} for {full} liters. How many {size}-liter "
        f"cans does {who} need to fill it up?",
    )
    room = d.step(
        full, "-", inside, "There is room for @ liters.", "The missing water is @ liters."
    )
    d.step(room, "/", size, f"{who} needs @ cans.", "That makes @ cans.")


def recipe(d: Draw) -> None:
    who = d.person()
    stuff, dish = d.pick(
        (("flour", "bread"), ("sugar", "jam"), ("rice", "soup"), ("milk", "cream"))
    )
    base, per, times = d.whole(2, 6), d.whole(10, 90), d.whole(7, 12)
    d.ask(
        f"For {base} plates of {dish} one needs {per * base} grams of {stuff}. "
        f"How many grams does {who} need for {times} plates?",
        f"{who} uses {per * base} grams of {stuff} for {base} portions of {dish}. How many grams "
        f"of {stuff} go into {times} portions?",
    )
    one = d.step(per * base, "/", base, "One takes @ grams.", f"For one it is @ grams of {stuff}.")
    d.step(one, "*", times, f"For {times} it is @ grams.", f"{who} needs @ grams.")


FAMILIES = families(
    "measuring", cut_pieces, number_of_pieces, convert_and_add, total_weight, fill_tank, recipe
)
