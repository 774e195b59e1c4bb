"""Work per hour, machines, reading, water flow."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import MAKINGS, STATIONERY, TOYS

MACHINES = ("machine", "printer", "robot", "press", "worker")


def machines(d: Draw) -> None:
    tool, item = d.pick(MACHINES), d.pick(STATIONERY + TOYS)
    n, rate, hours = d.whole(2, 9), d.whole(2, 12), d.whole(2, 9)
    d.ask(
        f"One {tool} makes {rate} {item.many} an hour. How many {item.many} do {n} of them make in "
        f"{hours} hours?",
        f"{n} {tool}{'es' if tool.endswith('s') else 's'} run for {hours} hours. Each makes {rate} "
        f"{item.many} per hour. How many {item.many} are made?",
    )
    per_hour = d.step(n, "*", rate, "In an hour they make @.", f"Per hour: @ {item.many}.")
    d.step(per_hour, "*", hours, f"In {hours} hours it is @.", f"They make @ {item.many}.")


def same_rate(d: Draw) -> None:
    who, item = d.person(), d.pick(MAKINGS)
    hours, rate, later = d.whole(2, 9), d.whole(2, 12), d.whole(2, 12)
    d.ask(
        f"In {hours} hours {who} makes {hours * rate} {item.many}. At this rate, how many "
        f"{item.many} are made in {later} hours?",
        f"{who} finishes {hours * rate} {item.many} in {hours} hours. "
        f"How many can {who.he} finish in {later} hours?",
    )
    one = d.step(hours * rate, "/", hours, f"In one hour {who} makes @.", "The rate is @ an hour.")
    d.step(one, "*", later, f"In {later} hours it is @.", f"That makes @ {item.many}.")


def pages_to_read(d: Draw) -> None:
    who = d.person()
    daily, days, rest = d.whole(4, 30), d.whole(3, 9), d.whole(5, 90)
    d.ask(
        f"A book has {daily * days + rest} pages. {who} reads {daily} pages a day for {days} days. "
        "How many pages are still unread?",
        f"{who} reads {daily} pages each day. After {days} days, how much is left of a book with "
        f"{daily * days + rest} pages?",
    )
    read = d.step(daily, "*", days, f"{who} reads @ pages.", f"In {days} days it is @ pages.")
    d.step(daily * days + rest, "-", read, "There are @ pages left.", "Unread are @ pages.")


def flow(d: Draw) -> None:
    tank = d.pick(("tank", "pool", "barrel", "pond"))
    fill, drain, minutes = d.whole(5, 30), d.whole(2, 15), d.whole(3, 12)
    d.ask(
        f"A pipe lets {fill} liters a minute into a {tank} while {drain} liters a minute leak out. "
        f"How many liters are gained in {minutes} minutes?",
        f"Each minute a {tank} gets {fill} liters and loses {drain}. By how many liters does it "
        f"grow in {minutes} minutes?",
    )
    net = d.step(fill, "-", drain, "Each minute brings @ liters.", "The gain per minute is @.")
    d.step(
        net, "*", minutes, f"In {minutes} minutes it is @ liters.", f"The {tank} gains @ liters."
    )


def working_together(d: Draw) -> None:
    (a, b), item = d.people(2), d.pick(MAKINGS)
    r, s, hours = d.whole(2, 7), d.whole(2, 5), d.whole(2, 12)
    total = (r + s) * hours
    d.ask(
        f"{a} makes {r} {item.many} an hour and {b} makes {s}. How many hours do they need for "
        f"{total} {item.many} if they work together?",
        f"An order of {total} {item.many} is shared by {a}, who makes {r} an hour, and {b}, who "
        f"makes {s} an hour. After how many hours is it done?",
    )
    both = d.step(r, "+", s, f"Together they make @ {item.many} an hour.", "In an hour: @.")
    d.step(total, "/", both, "They need @ hours.", "That takes @ hours.")


FAMILIES = families("rates", machines, same_rate, pages_to_read, flow, working_together)
