"""Lists, definitions, descriptions, stories and notes built by small grammars.

Here many answers are right, and the text is where the target's entropy is high.
"""

from __future__ import annotations

from dspark.nano.draw import Draw, families
from dspark.nano.words import (
    ANIMALS,
    CATEGORIES,
    COLOURS,
    DAYS,
    FRUITS,
    PLACES,
    SMALL_THINGS,
    article,
)

COUNT_WORDS = {3: "three", 4: "four", 5: "five", 6: "six"}
MOODS = ("brave", "shy", "clever", "lazy", "hungry", "tiny", "old", "young", "proud", "gentle",
         "curious", "noisy")  # fmt: skip
WEATHER = ("sunny", "windy", "rainy", "cold", "warm", "foggy", "quiet", "snowy")
DEFINITIONS = (
    ("hammer", "tool", "drives nails into wood"), ("saw", "tool", "cuts wood"),
    ("lamp", "thing", "gives light"), ("clock", "machine", "shows the time"),
    ("baker", "person", "makes bread"), ("teacher", "person", "helps others learn"),
    ("doctor", "person", "treats sick people"), ("farmer", "person", "grows food"),
    ("owl", "bird", "hunts at night"), ("swan", "bird", "swims on lakes"),
    ("horse", "animal", "can carry a rider"), ("cow", "animal", "gives milk"),
    ("sheep", "animal", "gives wool"), ("bee", "insect", "makes honey"),
    ("library", "place", "lends books"), ("museum", "place", "shows old things"),
    ("market", "place", "sells food"), ("bridge", "structure", "crosses a river"),
    ("boat", "vehicle", "moves on water"), ("train", "vehicle", "runs on rails"),
    ("plane", "vehicle", "flies in the air"), ("piano", "instrument", "has black and white keys"),
    ("violin", "instrument", "is played with a bow"), ("lemon", "fruit", "tastes sour"),
    ("carrot", "vegetable", "grows under the ground"), ("rose", "flower", "has thorns"),
    ("map", "picture", "shows the way"), ("calendar", "table", "shows the days of a year"),
    ("pillow", "cushion", "lies under the head"), ("cup", "vessel", "holds a drink"),
    ("kite", "toy", "flies in the wind"), ("tent", "shelter", "is made of cloth"),
    ("river", "stream", "flows to the sea"), ("island", "piece of land", "has water all around"),
    ("pilot", "person", "flies a plane"), ("painter", "person", "makes pictures"),
)  # fmt: skip


def list_things(d: Draw) -> None:
    kind, count = d.pick(list(CATEGORIES)), d.whole(3, 6)
    first = d.pick(("", "", f"{d.person()} asks: "))
    number = COUNT_WORDS[count] if d.chance(0.5) else str(count)
    d.ask(
        f"{first}Name {number} {kind}.",
        f"{first}List {number} {kind}.",
        f"{first}Give me {number} {kind}.",
        f"{first}Write down {number} {kind}.",
    )
    words = d.sample(CATEGORIES[kind], count)
    if d.chance(0.5):
        d.reply(", ".join(words))
    else:
        d.reply("\n".join(f"- {word}" for word in words))


def define(d: Draw) -> None:
    word, kind, does = d.pick(DEFINITIONS)
    a = article(word)
    d.ask(f"Say what {a} is.", f"Define the word {word}.", f"Explain what {a} is.",
          f"Tell {d.person()} what {a} is.", f"What does the word {word} mean?")  # fmt: skip
    link = "who" if kind == "person" else "that"
    d.reply(f"{a.capitalize()} is {article(kind)} {link} {does}.")


def describe(d: Draw) -> None:
    animal, place = d.pick(ANIMALS), d.pick(PLACES)
    mood, colour = d.pick(MOODS), d.pick(COLOURS)
    d.ask(
        f"Describe {article(mood)} {animal.one} near the {place}.",
        f"Write a few sentences about {article(mood)} {animal.one} at the {place}.",
        f"What might {article(mood)} {animal.one} by the {place} look like?",
    )
    size, other = d.pick(("small", "large", "thin", "round", "tall")), d.pick(COLOURS)
    d.reply(
        f"The {animal.one} is {mood} and {size}. It has {colour} eyes and {article(other)} coat. "
        f"It likes to {d.pick(('rest', 'sleep', 'wait', 'play', 'hide', 'walk'))} near the {place} "
        f"when the day is {d.pick(WEATHER)}."
    )


def story(d: Draw) -> None:
    who, friend = d.people(2)
    animal, place, mood = d.pick(ANIMALS), d.pick(PLACES), d.pick(MOODS)
    thing = d.pick(SMALL_THINGS).one
    d.ask(
        f"Write a short story about {who} and {article(mood)} {animal.one}.",
        f"Tell a story in which {who} meets {article(mood)} {animal.one}.",
        f"Tell me a story about {article(mood)} {animal.one} and a child named {who}.",
    )
    opening = d.pick((
        f"One {d.pick(WEATHER)} {d.pick(DAYS)}, {who} went to the {place}.",
        f"{who} lived close to the {place}.",
        f"It was a {d.pick(WEATHER)} morning when {who} left for the {place}.",
    ))  # fmt: skip
    meeting = d.pick((
        f"There {who.he} saw {article(mood)} {animal.one} with {article(thing)}.",
        f"Behind {article(d.pick(COLOURS))} door sat {article(mood)} {animal.one}.",
        f"{article(mood).capitalize()} {animal.one} came out of the {d.pick(PLACES)}.",
    ))  # fmt: skip
    middle = d.pick((
        f"{who} gave it {d.pick(FRUITS).a}, and they became friends.",
        f"It had lost its {thing}, so {who} helped to look for it.",
        f"They played until {friend} called them.",
        f"{friend} was afraid, but {who} only laughed.",
    ))  # fmt: skip
    end = d.pick((
        f"In the evening {who} went home {d.pick(('happy', 'tired', 'wet', 'hungry', 'proud'))}.",
        f"From then on they met every {d.pick(DAYS)}.",
        f"{friend} never forgot the {d.pick(COLOURS)} {thing}.",
        f"At last the {animal.one} fell asleep near the {place}.",
    ))  # fmt: skip
    d.reply(f"{opening} {meeting} {middle} {end}")


def note(d: Draw) -> None:
    a, b = d.people(2)
    place, day = d.pick(PLACES), d.pick(DAYS)
    d.ask(
        f"Write a note from {a} to {b} about a visit to the {place}.",
        f"Write a short letter in which {a} invites {b} to the {place}.",
        f"{a} wants to see {b} at the {place}. Write the message.",
    )
    bring = d.pick(SMALL_THINGS).many
    ask, mark = d.pick((("would you like to", "?"), ("can you", "?"), ("please", ".")))
    d.reply(
        f"{d.pick(('Dear', 'Hello', 'Hi'))} {b},\n"
        f"{ask} come to the {place} on {day}{d.pick(('', ' morning', ' evening'))}{mark} "
        f"{d.pick(('I will bring', 'We will have', 'Please bring'))} {bring}"
        f" and {d.pick(FRUITS).many}. It will be {d.pick(('fun', 'nice', 'great', 'lovely'))}.\n"
        f"{d.pick(('Yours', 'Love', 'Your friend'))}, {a}"
    )


FAMILIES = families("writing", list_things, define, describe, story, note)
