"""Change, savings, earnings, coins."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import GOODS, MAKINGS


def change_from_note(d: Draw) -> None:
    who, item = d.person(), d.pick(GOODS)
    note, n, price = d.pick((20, 50, 100)), d.whole(2, 9), d.whole(2, 12)
    d.ask(
        f"{who} buys {n} {item.many} at ${price} each and gives the clerk a ${note} note. "
        f"How much change does {who.he} get?",
        f"{item.many.capitalize()} are ${price} each. {who} pays for {n} of them with ${note}. "
        "How many dollars come back?",
        f"{who} hands over ${note} for {n} {item.many} that cost ${price} apiece. "
        "What is the change?",
    )
    cost = d.step(n, "*", price, f"The {item.many} cost @ dollars.", f"{who} owes @ dollars.")
    d.step(note, "-", cost, "The change is @ dollars.", f"{who} gets back @ dollars.")


def saving_up(d: Draw) -> None:
    who, item = d.person(), d.pick(("bike", "phone", "guitar", "camera", "tent", "desk"))
    have, week, weeks = d.whole(10, 90), d.whole(3, 12), d.whole(3, 12)
    price = have + week * weeks
    d.ask(
        f"{who} dreams of a {item} for ${price}. In the jar are ${have}, and every week "
        f"{who.he} puts in ${week}. After how many weeks is the {item} paid?",
        f"A {item} is ${price}. {who} has ${have} and puts aside ${week} every week. "
        f"After how many weeks can {who.he} buy it?",
    )
    missing = d.step(price, "-", have, f"{who} still needs @ dollars.", "The missing part is @.")
    d.step(missing, "/", week, "That takes @ weeks.", f"{who} needs @ weeks.")


def weekly_savings(d: Draw) -> None:
    who = d.person()
    have, week, weeks = d.whole(5, 80), d.whole(3, 15), d.whole(3, 12)
    d.ask(
        f"{who} has ${have} in a jar and adds ${week} each week. "
        f"How many dollars are in the jar after {weeks} weeks?",
        f"With ${have} at the start and ${week} more every week, how much money does {who} have "
        f"when {weeks} weeks are over?",
    )
    added = d.step(week, "*", weeks, f"{who} adds @ dollars.", f"In {weeks} weeks {who} adds @.")
    d.step(have, "+", added, "The jar then holds @ dollars.", f"{who} has @ dollars.")


def earn_and_spend(d: Draw) -> None:
    who, item = d.person(), d.pick(GOODS)
    hours, pay, spent = d.whole(3, 12), d.whole(6, 20), d.whole(5, 60)
    d.ask(
        f"{who} works {hours} hours for ${pay} an hour and then spends ${spent} on {item.many}. "
        "How much money is left?",
        f"An hour of work pays ${pay}. {who} works {hours} hours and buys {item.many} for "
        f"${spent}. How many dollars remain?",
    )
    earned = d.step(hours, "*", pay, f"{who} earns @ dollars.", "The work pays @ dollars.")
    d.step(earned, "-", spent, f"{who} has @ dollars left.", f"After the {item.many}, @ is left.")


def profit(d: Draw) -> None:
    who, item = d.person(), d.pick(MAKINGS)
    n, price, cost = d.whole(3, 12), d.whole(5, 20), d.whole(2, 9)
    d.ask(
        f"{who} makes {n} {item.many}. Material for each one costs ${cost} and each sells for "
        f"${price}. What is the profit in dollars?",
        f"It costs {who} ${cost} to make {item.a}, and {who.he} sells it for ${price}. "
        f"How much profit do {n} {item.many} bring?",
    )
    each = d.step(price, "-", cost, f"Each {item.one} brings @ dollars.", "Profit on one: @.")
    d.step(n, "*", each, f"The {n} {item.many} bring @ dollars.", "The profit is @ dollars.")


def coins(d: Draw) -> None:
    who = d.person()
    a, b = d.sample((2, 5, 10, 20), 2)
    n, m = d.whole(2, 12), d.whole(2, 12)
    d.ask(
        f"{who} finds {n} coins of {a} cents and {m} coins of {b} cents. "
        "How many cents is that in all?",
        f"A purse holds {n} {a}-cent coins and {m} {b}-cent coins. How many cents does {who} have?",
    )
    first = d.step(n, "*", a, f"The {a}-cent coins are worth @ cents.", f"{n} coins of {a}: @.")
    second = d.step(m, "*", b, f"The {b}-cent coins are worth @ cents.", f"{m} coins of {b}: @.")
    d.step(first, "+", second, "In all it is @ cents.", f"{who} has @ cents.")


FAMILIES = families(
    "money", change_from_note, saving_up, weekly_savings, earn_and_spend, profit, coins
)
