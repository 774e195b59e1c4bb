"""Sharing equally, packing, leftovers, giving away."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import BOXES, GROUPS, SMALL_THINGS


def equal_shares(d: Draw) -> None:
    who, item = d.person(), d.pick(SMALL_THINGS)
    friends, each = d.whole(3, 12), d.whole(2, 15)
    d.ask(
        f"{who} shares {friends * each} {item.many} equally among {friends} friends. "
        "How many does each friend get?",
        f"{friends * each} {item.many} are dealt out evenly to {friends} children by {who}. "
        f"How many {item.many} per child?",
        f"There are {friends} people in a {d.pick(GROUPS)}. {who} gives out "
        f"{friends * each} {item.many} so that all get the same. How many is that each?",
    )
    d.step(
        friends * each, "/", friends,
        f"Each one gets @ {item.many}.",
        f"That is @ {item.many} each.",
        "One share is @.",
    )  # fmt: skip


def keep_then_share(d: Draw) -> None:
    who, item = d.person(), d.pick(SMALL_THINGS)
    friends, each, kept = d.whole(2, 9), d.whole(2, 12), d.whole(2, 15)
    total = friends * each + kept
    d.ask(
        f"{who} has {total} {item.many}. {who.He} keeps {kept} and divides the rest equally "
        f"between {friends} friends. How many {item.many} does a friend get?",
        f"From {total} {item.many}, {who} puts {kept} aside. The others go to {friends} friends in "
        "equal parts. How big is one part?",
    )
    rest = d.step(total, "-", kept, f"There are @ {item.many} to share.", "The rest is @.")
    d.step(rest, "/", friends, f"Each friend gets @ {item.many}.", "One part is @.")


def left_over(d: Draw) -> None:
    who, item, box = d.person(), d.pick(SMALL_THINGS), d.pick(BOXES)
    size, full = d.whole(3, 10), d.whole(2, 9)
    rest = d.whole(2, size - 1) if size > 2 else 0
    total = size * full + rest
    d.ask(
        f"{who} packs {total} {item.many} into {box.many} of {size}. "
        f"How many {item.many} are left over?",
        f"A {box.one} holds {size} {item.many}. {who} fills as many {box.many} as possible from "
        f"{total} {item.many}. How many do not fit into a full {box.one}?",
    )
    packed = d.step(
        full, "*", size, f"The {full} full {box.many} hold @ {item.many}.",
        f"{full} {box.many} can be filled with @ {item.many}.",
    )  # fmt: skip
    d.step(total, "-", packed, f"There are @ {item.many} left over.", "What is left is @.")


def give_and_get(d: Draw) -> None:
    (who, other), item = d.people(2), d.pick(SMALL_THINGS)
    start, gave, got = d.whole(20, 99), d.whole(3, 30), d.whole(3, 40)
    d.ask(
        f"{who} has {start} {item.many}. {who.He} gives {gave} to {other} and then gets {got} from "
        f"an aunt. How many {item.many} does {who} have now?",
        f"After giving {gave} of {who.his} {start} {item.many} to {other}, {who} finds {got} more. "
        "What is the new number?",
    )
    left = d.step(start, "-", gave, f"{who} keeps @ {item.many}.", f"After giving, {who} has @.")
    d.step(left, "+", got, f"Now {who} has @ {item.many}.", "The new number is @.")


def boxes_in_all(d: Draw) -> None:
    who, item, box = d.person(), d.pick(SMALL_THINGS), d.pick(BOXES)
    n, size, extra = d.whole(3, 12), d.whole(3, 12), d.whole(2, 20)
    d.ask(
        f"{who} fills {n} {box.many} with {size} {item.many} each and has {extra} {item.many} "
        f"over. How many {item.many} were there?",
        f"There are {n} {box.many} on a shelf, every one with {size} {item.many}. {who} brings "
        f"{extra} loose {item.many}. How many {item.many} is that altogether?",
    )
    packed = d.step(
        n, "*", size, f"The {box.many} hold @ {item.many}.", f"In the {box.many} there are @."
    )
    d.step(packed, "+", extra, f"Altogether there are @ {item.many}.", "The total is @.")


FAMILIES = families("sharing", equal_shares, keep_then_share, left_over, give_and_get, boxes_in_all)
