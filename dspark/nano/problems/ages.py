"""Ages: older and younger, in the future, sums."""

from __future__ import annotations

from dspark.nano.draw import Draw, families


def age_chain(d: Draw) -> None:
    a, b, c = d.people(3)
    base, up, down = d.whole(6, 40), d.whole(2, 15), d.whole(2, 12)
    d.ask(
        f"{a} is {base} years old. {b} is {up} years older than {a}, and {c} is {down} years "
        f"younger than {b}. How old is {c}?",
        f"{c} is {down} years younger than {b}. {b} is {up} years older than {a}, who is {base}. "
        f"What is the age of {c}?",
    )
    older = d.step(base, "+", up, f"{b} is @ years old.", f"The age of {b} is @.")
    d.step(older, "-", down, f"{c} is @ years old.", f"The age of {c} is @.")


def age_times(d: Draw) -> None:
    a, b = d.people(2)
    age, times, later = d.whole(3, 12), d.whole(2, 6), d.whole(2, 15)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times", 6: "six times"}[times]
    d.ask(
        f"{b} is {word} as old as {a}, who is {age}. How old will {b} be in {later} years?",
        f"{a} is {age} years old and {b} is {word} as old. What age will {b} have {later} years "
        "from now?",
    )
    now = d.step(age, "*", times, f"{b} is @ years old now.", f"Today {b} is @.")
    d.step(now, "+", later, f"In {later} years {b} will be @.", f"{b} will then be @ years old.")


def age_sum(d: Draw) -> None:
    a, b = d.people(2)
    age, gap, later = d.whole(5, 40), d.whole(2, 12), d.whole(2, 10)
    d.ask(
        f"{a} is {age} and {b} is {gap} years older. How many years will both have lived "
        f"in all, {later} years from now?",
        f"{b} is {gap} years older than {a}. {a} is {age} now. How old will the two be together "
        f"after {later} years?",
    )
    other = d.step(age, "+", gap, f"{b} is @ now.", f"The age of {b} is @.")
    first = d.step(age, "+", later, f"{a} will be @.", f"In {later} years {a} is @.")
    second = d.step(other, "+", later, f"{b} will be @.", f"In {later} years {b} is @.")
    d.step(first, "+", second, "The sum is @.", "Together they will be @ years old.")


def birth_gap(d: Draw) -> None:
    a, b = d.people(2)
    parent, child, when = d.whole(28, 60), d.whole(2, 18), d.whole(2, 15)
    d.ask(
        f"{a} is {parent} and has a child {b} of {child}. How old will {a} be when {b} is "
        f"{child + when}?",
        f"When {b} is {child + when} years old, what will be the age of {a}? Now {b} is {child} "
        f"and {a} is {parent}.",
    )
    wait = d.step(
        child + when, "-", child, "That is in @ years.", "The time until then is @ years."
    )
    d.step(parent, "+", wait, f"{a} will be @ years old.", f"Then {a} is @.")


FAMILIES = families("ages", age_chain, age_times, age_sum, birth_gap)
