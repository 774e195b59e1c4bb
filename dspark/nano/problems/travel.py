"""Distance, speed and time; clocks and trips."""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import PLACES, TOWNS

MOVERS = ("train", "bus", "car", "truck", "van")


def distance(d: Draw) -> None:
    mover, (a, b) = d.pick(MOVERS), d.sample(TOWNS, 2)
    speed, hours = d.whole(2, 18) * 5, d.whole(2, 9)
    d.ask(
        f"A {mover} goes {speed} km per hour. How far does it get in {hours} hours?",
        f"The {mover} from {a} to {b} takes {hours} hours at {speed} km per hour. "
        "How many km is the way?",
        f"At a steady {speed} km per hour, a {mover} needs {hours} hours from {a} to {b}. "
        "Find the distance in km.",
    )
    d.step(speed, "*", hours, "The distance is @ km.", f"The {mover} covers @ km.")


def travel_time(d: Draw) -> None:
    mover, (a, b) = d.pick(("walker", "hiker", "runner", "rider", "boat")), d.sample(TOWNS, 2)
    speed, hours, pause = d.whole(3, 12), d.whole(2, 15), d.whole(2, 9)
    d.ask(
        f"A {mover} does {speed} km in an hour. From {a} to {b} it is {speed * hours} km. With "
        f"{pause} hours of rest on the way, how many hours does the trip last?",
        f"{a} and {b} are {speed * hours} km apart. A {mover} covers {speed} km every hour and "
        f"rests {pause} hours. How long is the whole trip in hours?",
    )
    moving = d.step(speed * hours, "/", speed, "Moving takes @ hours.", f"The {mover} moves for @.")
    d.step(moving, "+", pause, "With the rest it is @ hours.", "The whole trip lasts @ hours.")


def two_legs(d: Draw) -> None:
    who = d.person()
    s, t, u, v = d.whole(3, 25), d.whole(2, 6), d.whole(3, 25), d.whole(2, 6)
    d.ask(
        f"{who} cycles {t} hours at {s} km per hour and then {v} hours at {u} km per hour. "
        "How many km is that?",
        f"For {t} hours {who} rides at {s} km per hour, and for {v} more hours at {u} km per hour. "
        f"What distance does {who.he} ride?",
    )
    first = d.step(s, "*", t, "The first part is @ km.", f"First {who} rides @ km.")
    second = d.step(u, "*", v, "The second part is @ km.", f"Then {who} rides @ km.")
    d.step(first, "+", second, "In all that is @ km.", "The distance is @ km.")


def there_and_back(d: Draw) -> None:
    who, place = d.person(), d.pick(PLACES)
    way, times = d.whole(2, 15), d.whole(2, 9)
    d.ask(
        f"It is {way} km from home to the {place}. {who} goes there and back {times} times. "
        f"How many km does {who.he} travel?",
        f"{who} makes {times} round trips to the {place}, which is {way} km away. "
        "Find the total distance.",
    )
    trip = d.step(way, "*", 2, "One round trip is @ km.", "There and back is @ km.")
    d.step(trip, "*", times, f"{times} trips make @ km.", f"{who} travels @ km.")


def minutes_of_parts(d: Draw) -> None:
    who, place = d.person(), d.pick(PLACES)
    walk, ride, wait = d.whole(3, 25), d.whole(5, 40), d.whole(2, 15)
    d.ask(
        f"To reach the {place}, {who} walks {walk} minutes, waits {wait} minutes and rides the "
        f"tram for {ride} minutes. How long does it take?",
        f"{who} spends {walk} minutes on foot, {wait} minutes at the stop and {ride} minutes on "
        f"the bus to the {place}. How many minutes is the way?",
    )
    first = d.step(walk, "+", wait, "Walking and waiting take @ minutes.", "Before the ride: @.")
    d.step(first, "+", ride, "With the ride it is @ minutes.", "The way takes @ minutes.")


def days_of_trip(d: Draw) -> None:
    who = d.person()
    daily, days, done = d.whole(4, 20), d.whole(3, 12), d.whole(10, 60)
    total = done + daily * days
    d.ask(
        f"A path is {total} km long. {who} has hiked {done} km of it and goes on with {daily} km a "
        "day. How many days are left?",
        f"{who} wants to hike {total} km. After the first {done} km {who.he} does {daily} km a "
        f"day. In how many days will {who.he} arrive?",
    )
    rest = d.step(total, "-", done, "The rest is @ km.", f"{who} still has @ km to go.")
    d.step(rest, "/", daily, "That takes @ days.", f"{who} needs @ days.")


FAMILIES = families(
    "travel", distance, travel_time, two_legs, there_and_back, minutes_of_parts, days_of_trip
)
