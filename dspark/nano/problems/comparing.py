"""More than, fewer than, times as many, differences and totals of two or three people."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import FARM_ANIMALS, FLOWERS, READING, SMALL_THINGS

TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


def more_and_total(d: Draw) -> None:
    (a, b), item = d.people(2), d.pick(SMALL_THINGS)
    n, more = d.whole(4, 90), d.whole(2, 40)
    d.ask(
        f"{a} has {n} {item.many}. {b} has {more} more than {a}. How many do they have together?",
        f"{b} owns {more} {item.many} more than {a}, who owns {n}. Find the total.",
    )
    other = d.step(n, "+", more, f"{b} has @ {item.many}.", f"The number of {b} is @.")
    d.step(n, "+", other, f"Together they have @ {item.many}.", "The total is @.")


def fewer_and_total(d: Draw) -> None:
    (a, b), item = d.people(2), d.pick(READING)
    n, less = d.whole(15, 95), d.whole(3, 40)
    d.ask(
        f"{a} bought {n} {item.many}, and {b} bought {less} fewer. How many did both buy?",
        f"{b} got {less} {item.many} fewer than {a}. {a} got {n}. What is the sum?",
    )
    other = d.step(n, "-", less, f"{b} has @ {item.many}.", f"{b}: @.")
    d.step(n, "+", other, f"Both have @ {item.many}.", "The sum is @.")


def times_and_difference(d: Draw) -> None:
    (a, b), item = d.people(2), d.pick(SMALL_THINGS)
    n, times = d.whole(3, 30), d.whole(2, 5)
    d.ask(
        f"{b} picked {TIMES[times]} as many {item.many} as {a}. {a} picked {n}. "
        f"How many more did {b} pick?",
        f"{a} made {n} {item.many} and {b} made {TIMES[times]} as many. By how many is {b} ahead?",
    )
    other = d.step(n, "*", times, f"{b} has @ {item.many}.", f"The number of {b} is @.")
    d.step(other, "-", n, "The difference is @.", f"{b} has @ more.")


def three_totals(d: Draw) -> None:
    (a, b, c), item = d.people(3), d.pick(SMALL_THINGS)
    n, times, more = d.whole(4, 25), d.whole(2, 4), d.whole(2, 20)
    d.ask(
        f"{a} has {n} {item.many}. {b} has {TIMES[times]} as many as {a}, and {c} has {more} more "
        f"than {b}. How many {item.many} do the three have?",
        f"{a}, {b} and {c} collect {item.many}. {a} has {n}, {b} {TIMES[times]} as many, "
        f"{c} {more} more than {b}. How many is that in all?",
    )
    second = d.step(n, "*", times, f"{b} has @ {item.many}.", f"{b}: @.")
    third = d.step(second, "+", more, f"{c} has @ {item.many}.", f"{c}: @.")
    two = d.step(n, "+", second, f"{a} and {b} have @.", f"The first two have @ {item.many}.")
    d.step(two, "+", third, "All three have @.", f"In all there are @ {item.many}.")


def farm_legs(d: Draw) -> None:
    who = d.person()
    birds = d.pick(("hens", "ducks", "geese"))
    beast = d.pick([n for n in FARM_ANIMALS if n.one not in ("duck", "goose", "hen")])
    n, m = d.whole(2, 20), d.whole(2, 20)
    d.ask(
        f"On the farm of {who} there are {n} {birds} with two legs each and {m} {beast.many} with "
        "four legs each. How many legs are there?",
        f"{who} keeps {m} {beast.many} and {n} {birds}. Count all their legs.",
    )
    first = d.step(n, "*", 2, f"The {birds} have @ legs.", f"{birds.capitalize()}: @ legs.")
    second = d.step(m, "*", 4, f"The {beast.many} have @ legs.", f"{beast.many.capitalize()}: @.")
    d.step(first, "+", second, "In all there are @ legs.", "The animals have @ legs.")


def flower_beds(d: Draw) -> None:
    who, (a, b) = d.person(), d.things(FLOWERS, 2)
    rows, each, less = d.whole(3, 12), d.whole(3, 12), d.whole(2, 20)
    d.ask(
        f"{who} plants {rows} rows of {each} {a.many}, and {less} fewer {b.many} than {a.many}. "
        "How many flowers are planted?",
        f"A garden has {rows} rows with {each} {a.many} in each. It has {less} fewer {b.many}. "
        f"How many flowers does {who} count?",
    )
    first = d.step(rows, "*", each, f"There are @ {a.many}.", f"{who} has @ {a.many}.")
    second = d.step(first, "-", less, f"There are @ {b.many}.", f"{who} has @ {b.many}.")
    d.step(first, "+", second, "In all there are @ flowers.", "The sum is @ flowers.")


FAMILIES = families(
    "comparing",
    more_and_total,
    fewer_and_total,
    times_and_difference,
    three_totals,
    farm_legs,
    flower_beds,
)
