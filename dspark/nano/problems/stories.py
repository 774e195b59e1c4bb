"""Stories of four to six steps about a day, a plan or a journey."""

from __future__ import annotations

from dspark.nano.draw import Draw, Redraw, families
from dspark.nano.words import BOXES, FLOWERS, SNACKS, TOWNS


def bakery_day(d: Draw) -> None:
    who, item, bag = d.person(), d.pick(SNACKS), d.pick(BOXES[:3])
    trays, each, size, bags = d.whole(4, 12), d.whole(6, 12), d.whole(2, 6), d.whole(2, 9)
    morning = d.whole(3, 30)
    noon = trays * each - size * bags - morning
    if noon < 2:
        raise Redraw
    d.ask(
        f"{who} bakes {trays} trays of {each} {item.many}. {morning} are sold in the morning and "
        f"{noon} at noon. The rest is packed in {bag.many} of {size}. How many {bag.many} are "
        "packed?",
        f"A baker takes {trays} trays with {each} {item.many} each out of the oven. After selling "
        f"{morning} and then {noon}, {who} fills {bag.many} of {size} with what remains. How many "
        f"{bag.many} does that make?",
    )
    total = d.step(trays, "*", each, f"There are @ {item.many}.", f"{who} has @ {item.many}.")
    left = d.step(total, "-", morning, "After the morning there are @.", "Left at first: @.")
    rest = d.step(left, "-", noon, f"After noon there are @ {item.many}.", "Left at the end: @.")
    d.step(rest, "/", size, f"That fills @ {bag.many}.", f"{who} packs @ {bag.many}.")


def fence_and_grass(d: Draw) -> None:
    who, field = d.person(), d.pick(("garden", "yard", "lawn", "field"))
    long, wide, fence, grass = d.whole(4, 12), d.whole(3, 9), d.whole(2, 9), d.whole(2, 5)
    d.ask(
        f"{who} puts a fence around a {field} of {long} m by {wide} m for ${fence} per m and sows "
        f"grass in all of it for ${grass} per square m. What is the cost of both?",
        f"A {field} is {long} m long and {wide} m wide. A fence costs ${fence} for each m and "
        f"grass ${grass} for each square m. How many dollars does {who} pay for fence and grass?",
    )
    half = d.step(long, "+", wide, "Length and width make @ m.", "Two sides are @ m.")
    around = d.step(half, "*", 2, "All the way around is @ m.", "The fence is @ m long.")
    first = d.step(fence, "*", around, "The fence costs @ dollars.", "Cost of the fence: @.")
    area = d.step(long, "*", wide, "The area is @ square m.", f"The {field} has @ square m.")
    second = d.step(area, "*", grass, "The grass costs @ dollars.", "Cost of the grass: @.")
    d.step(first, "+", second, "Both cost @ dollars.", f"{who} pays @ dollars.")


def fuel_cost(d: Draw) -> None:
    who, (a, b, c) = d.person(), d.sample(TOWNS, 3)
    per, liters, price = d.whole(5, 12), d.whole(4, 20), d.whole(2, 4)
    total = per * liters
    first = d.whole(5, total - 5)
    second = total - first
    d.ask(
        f"{who} drives {first} km from {a} to {b} and {second} km from {b} to {c}, then the same "
        f"way back. The van goes {per} km on a liter. A liter costs ${price}. What does the fuel "
        "cost?",
        f"From {a} to {b} it is {first} km and from there to {c} {second} km. {who} drives the "
        f"whole way and back with one liter for every {per} km, at ${price} a liter. "
        "How many dollars is that?",
    )
    way = d.step(first, "+", second, "One way is @ km.", f"From {a} to {c} it is @ km.")
    both = d.step(way, "*", 2, "There and back is @ km.", f"{who} drives @ km.")
    fuel = d.step(both, "/", per, "The van needs @ liters.", "That takes @ liters.")
    d.step(fuel, "*", price, "The fuel costs @ dollars.", f"{who} pays @ dollars.")


def saving_together(d: Draw) -> None:
    a, b, c = d.people(3)
    x, y, z, weeks = d.whole(2, 12), d.whole(2, 12), d.whole(2, 12), d.whole(3, 12)
    gift, thing = d.whole(15, 90), d.pick(("tent", "boat", "drum", "table", "swing", "camera"))
    d.ask(
        f"Each week {a} saves ${x}, {b} ${y} and {c} ${z}. After {weeks} weeks they buy a {thing} "
        f"for ${gift} together. How much of the money is left?",
        f"{a}, {b} and {c} put ${x}, ${y} and ${z} into one box every week. When {weeks} weeks are "
        f"over, they take out ${gift} for a {thing}. How many dollars stay in the box?",
    )
    two = d.step(x, "+", y, f"{a} and {b} save @ dollars a week.", f"{a} and {b}: @.")
    three = d.step(two, "+", z, f"With {c} it is @ dollars a week.", "All three: @.")
    total = d.step(
        three, "*", weeks, f"In {weeks} weeks it is @ dollars.", "The box gets @ dollars."
    )
    d.step(total, "-", gift, f"After the {thing} there are @ dollars.", "What stays is @ dollars.")


def practice_plan(d: Draw) -> None:
    who, act = d.person(), d.pick(("plays the piano", "runs", "swims", "draws", "sings", "reads"))
    week, end, weeks, extra = d.whole(3, 12), d.whole(5, 20), d.whole(2, 4), d.whole(5, 60)
    d.ask(
        f"{who} {act} {week} minutes on each of five days and {end} minutes on each of the other "
        f"two days of a week. How many minutes is that in {weeks} weeks with {extra} extra "
        "minutes?",
        f"From Monday to Friday {who} {act} {week} minutes a day, on Saturday and Sunday {end} "
        f"minutes a day. After {weeks} weeks and {extra} more minutes, what is the total time?",
    )
    first = d.step(5, "*", week, "The five days give @ minutes.", "Five days: @.")
    second = d.step(2, "*", end, "The other two days give @ minutes.", "Two days: @.")
    one = d.step(first, "+", second, "A week has @ minutes.", "One week: @.")
    all_weeks = d.step(one, "*", weeks, f"{weeks} weeks have @ minutes.", f"{weeks} weeks: @.")
    d.step(all_weeks, "+", extra, "With the extra time it is @.", "The total is @ minutes.")


def quiz_points(d: Draw) -> None:
    who, game = d.person(), d.pick(("quiz", "test", "contest", "match"))
    right, plus, wrong, minus, bonus = (
        d.whole(5, 20), d.whole(3, 9), d.whole(2, 9), d.whole(2, 3), d.whole(2, 25),
    )  # fmt: skip
    d.ask(
        f"In a {game} every right answer gives {plus} points and every wrong one takes away "
        f"{minus}. {who} has {right} right and {wrong} wrong answers and gets a bonus of {bonus} "
        "points. What is the score?",
        f"{who} gives {right} right and {wrong} wrong answers in a {game}. A right one is worth "
        f"{plus} points, a wrong one costs {minus}, and {bonus} points are added for speed. "
        f"How many points does {who} get?",
    )
    good = d.step(right, "*", plus, "The right answers give @ points.", "Right answers: @.")
    bad = d.step(wrong, "*", minus, "The wrong answers cost @ points.", "Wrong answers: @.")
    left = d.step(good, "-", bad, "That leaves @ points.", "The difference is @ points.")
    d.step(left, "+", bonus, "With the bonus it is @ points.", f"The score of {who} is @.")


def flower_orders(d: Draw) -> None:
    who, (a, b) = d.person(), d.things(FLOWERS, 2)
    orders, x, y, have = d.whole(3, 9), d.whole(3, 9), d.whole(2, 9), d.whole(10, 60)
    price = d.whole(2, 6)
    d.ask(
        f"{who} needs flowers for {orders} tables. Each table gets {x} {a.many} and {y} {b.many}. "
        f"{have} flowers are already there. A new flower costs ${price}. "
        "What do the missing flowers cost?",
        f"On each of {orders} tables {who} puts {x} {a.many} and {y} {b.many}. {who.He} has {have} "
        f"flowers and buys the missing ones for ${price} apiece. How many dollars are spent?",
    )
    each = d.step(x, "+", y, "Each table gets @ flowers.", "For one table: @.")
    total = d.step(each, "*", orders, "All tables need @ flowers.", "For all tables: @.")
    missing = d.step(total, "-", have, "Missing are @ flowers.", f"{who} buys @ flowers.")
    d.step(missing, "*", price, "They cost @ dollars.", f"{who} spends @ dollars.")


FAMILIES = families(
    "stories",
    bakery_day,
    fence_and_grass,
    fuel_cost,
    saving_together,
    practice_plan,
    quiz_points,
    flower_orders,
)
