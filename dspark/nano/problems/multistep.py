"""Longer stories of four to six steps: trips, stalls, parties, gardens, weeks of work."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import BOXES, FRUITS, GOODS, GROUPS, MAKINGS, SNACKS


def class_trip(d: Draw) -> None:
    group, who = d.pick(GROUPS), d.person()
    kids, ticket, lunch, bus = d.whole(4, 12), d.whole(3, 9), d.whole(2, 9), d.whole(20, 90)
    d.ask(
        f"A {group} of {kids} children visits a zoo. A ticket is ${ticket} and a lunch ${lunch} "
        f"per child, and the bus costs ${bus}. What does the trip cost in dollars?",
        f"{who} plans a trip for {kids} children: ${ticket} for a ticket and ${lunch} for lunch "
        f"for each, plus ${bus} for the bus. How much money is needed?",
    )
    tickets = d.step(kids, "*", ticket, "The tickets cost @ dollars.", "Tickets: @.")
    lunches = d.step(kids, "*", lunch, "The lunches cost @ dollars.", "Lunches: @.")
    both = d.step(tickets, "+", lunches, "Together they are @ dollars.", "For the children: @.")
    d.step(both, "+", bus, "With the bus it is @ dollars.", "The trip costs @ dollars.")


def fruit_stall(d: Draw) -> None:
    who, fruit, box = d.person(), d.pick(FRUITS), d.pick(BOXES)
    boxes, size, bad = d.whole(2, 9), d.whole(5, 12), d.whole(2, 12)
    price, paid = d.whole(2, 5), d.whole(3, 12)
    d.ask(
        f"{who} buys {boxes} {box.many} of {size} {fruit.many}. {bad} {fruit.many} are bad. "
        f"The good ones sell for ${price} each, and {who.he} paid ${paid} for each {box.one}. "
        "What is the gain?",
        f"A stall gets {boxes} {box.many} with {size} {fruit.many} in each, for ${paid} a "
        f"{box.one}. {bad} {fruit.many} must be thrown away, the rest are sold at ${price} each. "
        f"How many dollars does {who} gain?",
    )
    total = d.step(boxes, "*", size, f"There are @ {fruit.many}.", f"{who} has @ {fruit.many}.")
    good = d.step(total, "-", bad, f"Good are @ {fruit.many}.", "After the bad ones: @.")
    income = d.step(good, "*", price, "They sell for @ dollars.", "The sale brings @ dollars.")
    cost = d.step(boxes, "*", paid, f"The {box.many} cost @ dollars.", "The cost was @ dollars.")
    d.step(income, "-", cost, "The gain is @ dollars.", f"{who} gains @ dollars.")


def party_food(d: Draw) -> None:
    who, (a, b) = d.person(), d.things(SNACKS, 2)
    guests, x, y, left = d.whole(4, 12), d.whole(2, 6), d.whole(2, 6), d.whole(2, 12)
    d.ask(
        f"{guests} guests come to a party of {who}. Each eats {x} {a.many} and {y} {b.many}, and "
        f"{left} pieces are left over. How many pieces were there at the start?",
        f"{who} serves {a.many} and {b.many}. Every one of {guests} guests takes {x} {a.many} and "
        f"{y} {b.many}. At the end there are {left} pieces. How many did {who} serve?",
    )
    first = d.step(guests, "*", x, f"The guests eat @ {a.many}.", f"{a.many.capitalize()}: @.")
    second = d.step(guests, "*", y, f"They eat @ {b.many}.", f"{b.many.capitalize()}: @.")
    eaten = d.step(first, "+", second, "Eaten are @ pieces.", "In all they eat @ pieces.")
    d.step(eaten, "+", left, "At the start there were @.", f"{who} served @ pieces.")


def shopping_list(d: Draw) -> None:
    who, (a, b, c) = d.person(), d.things(GOODS, 3)
    money = d.whole(10, 30) * 10
    n, p, m, r, s = d.whole(2, 6), d.whole(2, 12), d.whole(2, 6), d.whole(2, 12), d.whole(3, 25)
    d.ask(
        f"{who} has ${money} and buys {n} {a.many} at ${p} each, {m} {b.many} at ${r} each and "
        f"{c.a} for ${s}. How much money is left?",
        f"From ${money}, {who} pays for {n} {a.many} (${p} each), {m} {b.many} (${r} each) and "
        f"one {c.one} (${s}). How many dollars remain?",
    )
    first = d.step(n, "*", p, f"The {a.many} cost @ dollars.", f"{a.many.capitalize()}: @.")
    second = d.step(m, "*", r, f"The {b.many} cost @ dollars.", f"{b.many.capitalize()}: @.")
    two = d.step(first, "+", second, "Together they cost @ dollars.", "Both kinds: @.")
    spent = d.step(two, "+", s, f"With the {c.one} it is @ dollars.", f"{who} spends @ dollars.")
    d.step(money, "-", spent, f"{who} has @ dollars left.", "There remain @ dollars.")


def work_week(d: Draw) -> None:
    who = d.person()
    days, hours, pay, extra, bonus = (
        d.whole(3, 6),
        d.whole(2, 8),
        d.whole(3, 12),
        d.whole(2, 8),
        d.whole(5, 40),
    )
    d.ask(
        f"{who} works {days} days of {hours} hours at ${pay} an hour, and {extra} more hours on "
        f"Sunday at the same pay. A bonus of ${bonus} is added. What does {who.he} earn?",
        f"For ${pay} an hour {who} works {hours} hours on {days} days and {extra} hours on Sunday. "
        f"With a bonus of ${bonus}, how many dollars is that?",
    )
    normal = d.step(days, "*", hours, "The normal hours are @.", f"On {days} days: @ hours.")
    total = d.step(normal, "+", extra, "With Sunday it is @ hours.", "In all: @ hours.")
    earned = d.step(total, "*", pay, "The hours pay @ dollars.", f"{who} earns @ dollars.")
    d.step(earned, "+", bonus, "With the bonus it is @ dollars.", "Adding the bonus: @ dollars.")


def craft_fair(d: Draw) -> None:
    who, (a, b) = d.person(), d.things(MAKINGS, 2)
    n, p, m, r = d.whole(3, 9), d.whole(3, 12), d.whole(3, 9), d.whole(3, 12)
    rent, share = d.whole(5, 30), d.whole(2, 5)
    d.ask(
        f"At a fair {who} sells {n} {a.many} at ${p} each and {m} {b.many} at ${r} each. The stall "
        f"costs ${rent}. The rest is split equally between {share} people. "
        "How many dollars does one person get?",
        f"{share} people share what {who} takes in at a fair: {n} {a.many} for ${p} each, {m} "
        f"{b.many} for ${r} each, less ${rent} for the stall. How much is one share?",
    )
    first = d.step(n, "*", p, f"The {a.many} bring @ dollars.", f"{a.many.capitalize()}: @.")
    second = d.step(m, "*", r, f"The {b.many} bring @ dollars.", f"{b.many.capitalize()}: @.")
    income = d.step(first, "+", second, "Together that is @ dollars.", "The income is @ dollars.")
    rest = d.step(income, "-", rent, "After the stall there are @ dollars.", "The rest is @.")
    d.step(rest, "/", share, "Each person gets @ dollars.", "One share is @ dollars.")


def book_boxes(d: Draw) -> None:
    who, place = d.person(), d.pick(("library", "school", "shop", "museum"))
    shelves, books, sold, gifts, share = (
        d.whole(3, 9), d.whole(5, 12), d.whole(3, 20), d.whole(3, 20), d.whole(2, 6),
    )  # fmt: skip
    new = d.whole(2, 9)
    d.ask(
        f"A {place} has {shelves} shelves with {books} books each. {sold} books are sold and "
        f"{gifts} are given as a gift. Then {new} boxes with {share} books each arrive. "
        f"How many books does {who} count at the end if half of all are lent out?",
        f"{who} has {shelves} shelves of {books} books in a {place}. After selling {sold}, giving "
        f"away {gifts} and getting {new} boxes of {share} books, half of the books are lent out. "
        "How many books are still there?",
    )
    start = d.step(shelves, "*", books, "At first there are @ books.", "On the shelves: @.")
    less = d.step(start, "-", sold, "After the sale there are @.", "Minus the sold ones: @.")
    least = d.step(less, "-", gifts, "After the gifts there are @.", "Minus the gifts: @.")
    added = d.step(new, "*", share, "The boxes bring @ books.", "New books: @.")
    total = d.step(least, "+", added, "Then there are @ books.", "All books: @.")
    d.step(total, "/", 2, "Half of them is @.", "Half stay: @ books.")


FAMILIES = families(
    "multistep",
    class_trip,
    fruit_stall,
    party_food,
    shopping_list,
    work_week,
    craft_fair,
    book_boxes,
)
