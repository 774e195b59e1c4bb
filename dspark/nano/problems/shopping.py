"""Buying several of one thing, of two things, with a coupon, in packs."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import BOXES, FRUITS, GOODS, SHOPS, SMALL_THINGS, VEGETABLES


def several_of_one(d: Draw) -> None:
    who, item = d.person(), d.pick(GOODS)
    n, price = d.whole(3, 12), d.whole(2, 20)
    d.ask(
        f"{who} buys {n} {item.many} for ${price} each. What is the total price in dollars?",
        f"One {item.one} costs ${price}. How many dollars does {who} pay for {n} of them?",
        f"At the {d.pick(SHOPS)}, {item.many} are ${price} each. {who} wants {n}. "
        f"How much money does {who.he} need?",
        f"{who} needs {n} {item.many}. Each one is ${price}. Find the cost.",
    )
    d.step(
        n, "*", price,
        f"The {n} {item.many} cost @ dollars.",
        f"{who} pays @ dollars.",
        f"{n} {item.many} at ${price} each cost @ dollars.",
        "The total price is @ dollars.",
    )  # fmt: skip


def two_kinds(d: Draw) -> None:
    who, (a, b) = d.person(), d.things(GOODS, 2)
    n, p, m, r = d.whole(2, 9), d.whole(2, 12), d.whole(2, 9), d.whole(2, 12)
    d.ask(
        f"{who} takes {n} {a.many}, ${p} each, as well as {m} {b.many}, ${r} each. "
        f"How much does {who.he} spend?",
        f"At the {d.pick(SHOPS)}, {a.a} is ${p} and {b.a} is ${r}. "
        f"What do {n} {a.many} and {m} {b.many} cost together?",
        f"{who} orders {m} {b.many} and {n} {a.many}. The {b.many} cost ${r} apiece, "
        f"the {a.many} ${p} apiece. Find the total cost in dollars.",
    )
    first = d.step(n, "*", p, f"The {a.many} cost @ dollars.", f"{n} {a.many} cost @ dollars.")
    second = d.step(m, "*", r, f"The {b.many} cost @ dollars.", f"{m} {b.many} cost @ dollars.")
    d.step(
        first, "+", second,
        "Together that is @ dollars.",
        "The total is @ dollars.",
        f"{who} spends @ dollars.",
    )  # fmt: skip


def coupon(d: Draw) -> None:
    who, item = d.person(), d.pick(GOODS)
    n, price, off = d.whole(2, 10), d.whole(4, 15), d.whole(2, 15)
    d.ask(
        f"{who} has a coupon for ${off} off. {who.He} buys {n} {item.many} at ${price} each. "
        f"How many dollars does {who.he} pay?",
        f"Each {item.one} is ${price}. {who} picks {n} of them and uses a coupon for ${off}. "
        "What is the final price?",
        f"A {d.pick(SHOPS)} sells {item.many} for ${price} each and takes ${off} off every order. "
        f"What does an order of {n} {item.many} cost?",
    )
    full = d.step(
        n,
        "*",
        price,
        "The full price is @ dollars.",
        f"Without the coupon, {n} {item.many} cost @.",
    )
    d.step(full, "-", off, "After the coupon it is @ dollars.", f"{who} pays @ dollars.")


def packs_needed(d: Draw) -> None:
    who, item, box = d.person(), d.pick(SMALL_THINGS), d.pick(BOXES)
    size, packs, price = d.whole(3, 12), d.whole(2, 9), d.whole(2, 9)
    need = size * packs
    d.ask(
        f"{item.many.capitalize()} come in {box.many} of {size}. {who} needs {need} {item.many}. "
        f"If one {box.one} costs ${price}, how much will {who.he} pay?",
        f"{who} wants {need} {item.many} for a party. A {box.one} with {size} {item.many} is "
        f"${price}. How many dollars are needed?",
        f"A {box.one} of {size} {item.many} costs ${price}. "
        f"What is the cost of {need} {item.many} for {who}?",
    )
    count = d.step(
        need, "/", size,
        f"{who} needs @ {box.many}.",
        f"The number of {box.many} is @.",
    )  # fmt: skip
    d.step(count, "*", price, f"The {box.many} cost @ dollars.", f"{who} pays @ dollars.")


def by_weight(d: Draw) -> None:
    who, (a, b) = d.person(), d.things(FRUITS + VEGETABLES, 2)
    n, p, m, r = d.whole(2, 9), d.whole(2, 9), d.whole(2, 9), d.whole(2, 9)
    d.ask(
        f"A kilo of {a.many} is ${p} and a kilo of {b.many} is ${r}. {who} takes {n} kilos of "
        f"{a.many} and {m} kilos of {b.many}. What is the bill in dollars?",
        f"{who} weighs {n} kilos of {a.many} at ${p} per kilo, then {m} kilos of {b.many} at "
        f"${r} per kilo. How much is it in all?",
    )
    first = d.step(n, "*", p, f"The {a.many} cost @ dollars.", f"{a.many.capitalize()}: @ dollars.")
    second = d.step(
        m, "*", r, f"The {b.many} cost @ dollars.", f"{b.many.capitalize()}: @ dollars."
    )
    d.step(first, "+", second, "The bill is @ dollars.", "In all it is @ dollars.")


FAMILIES = families("shopping", several_of_one, two_kinds, coupon, packs_needed, by_weight)
