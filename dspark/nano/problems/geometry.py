"""Perimeters and areas of rectangles, squares and shapes made of them."""

from __future__ import annotations

from dspark.nano.draw import Draw, families

FIELDS = ("garden", "field", "yard", "room", "park", "lawn", "court")


def rectangle_perimeter(d: Draw) -> None:
    field, who = d.pick(FIELDS), d.person()
    long, wide = d.whole(5, 60), d.whole(3, 40)
    d.ask(
        f"A {field} is {long} m long and {wide} m wide. How many m of fence go around it?",
        f"{who} walks once around a {field} of {long} m by {wide} m. How far is that in m?",
        f"Find the perimeter of a rectangle with sides {long} m and {wide} m.",
    )
    half = d.step(long, "+", wide, "Two sides are @ m.", "Length and width together are @ m.")
    d.step(half, "*", 2, "All four sides are @ m.", "The way around is @ m.")


def rectangle_area(d: Draw) -> None:
    field = d.pick(("garden", "field", "yard", "park", "lawn"))
    long, wide, hole = d.whole(4, 20), d.whole(3, 12), d.whole(2, 30)
    d.ask(
        f"A {field} is {long} m by {wide} m. A pond in it covers {hole} square m. "
        "How many square m are left?",
        f"From a {field} of {long} m by {wide} m, {hole} square m are paved. "
        "What area is not paved?",
    )
    area = d.step(long, "*", wide, f"The {field} has @ square m.", "The area is @ square m.")
    d.step(area, "-", hole, "There are @ square m left.", "The rest is @ square m.")


def side_from_perimeter(d: Draw) -> None:
    field = d.pick(FIELDS)
    side = d.whole(3, 60)
    n, name = d.pick(((3, "triangle"), (4, "square"), (5, "pentagon"), (6, "hexagon")))
    cost = d.whole(2, 12)
    d.ask(
        f"The perimeter of a {name} with equal sides is {n * side} cm. Gold edge costs ${cost} per "
        "cm. What does the edge for one side cost?",
        f"A {field} has the shape of a {name} with equal sides and is {n * side} m around. A fence "
        f"is ${cost} per m. How many dollars is the fence for a single side?",
    )
    one = d.step(n * side, "/", n, f"A {name} has {n} sides, so one is @.", "One side is @.")
    d.step(one, "*", cost, "That costs @ dollars.", "The price for one side is @ dollars.")


def tiles(d: Draw) -> None:
    who, room = d.person(), d.pick(("kitchen", "bathroom", "hall", "cellar", "bedroom"))
    long, wide, per = d.whole(3, 9), d.whole(2, 9), d.whole(2, 9)
    d.ask(
        f"The {room} floor is {long} m by {wide} m. {who} puts {per} tiles on each square m. "
        "How many tiles are used?",
        f"{who} tiles a {room} of {long} m by {wide} m. One square m takes {per} tiles. "
        f"How many tiles does {who.he} need?",
    )
    area = d.step(long, "*", wide, "The floor has @ square m.", "The area is @ square m.")
    d.step(area, "*", per, f"{who} needs @ tiles.", "That takes @ tiles.")


def two_rooms(d: Draw) -> None:
    who = d.person()
    (r, s) = d.sample(("kitchen", "bedroom", "hall", "office", "attic"), 2)
    a, b, c, e = d.whole(3, 12), d.whole(2, 9), d.whole(3, 12), d.whole(2, 9)
    d.ask(
        f"{who} paints the floors of the {r}, {a} m by {b} m, and the {s}, {c} m by {e} m. "
        "How many square m is that?",
        f"The {r} measures {a} m by {b} m and the {s} {c} m by {e} m. "
        f"What floor area do the two have together?",
    )
    first = d.step(a, "*", b, f"The {r} has @ square m.", f"Floor of the {r}: @.")
    second = d.step(c, "*", e, f"The {s} has @ square m.", f"Floor of the {s}: @.")
    d.step(first, "+", second, "Together they have @ square m.", "The sum is @ square m.")


FAMILIES = families(
    "geometry", rectangle_perimeter, rectangle_area, side_from_perimeter, tiles, two_rooms
)
