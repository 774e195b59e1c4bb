"""Words the generator draws from: people with their pronouns, countable things, places, kinds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Person:
    """A first name and the pronouns that follow it; formats as the name."""

    name: str
    he: str
    his: str
    him: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return "He" if self.he == "he" else "She"


@dataclass(frozen=True, slots=True)
class Noun:
    """A countable noun in both numbers."""

    one: str
    many: str

    @property
    def a(self) -> str:
        """The singular with its article: an apple, a pear."""
        return article(self.one)


def article(phrase: str) -> str:
    """`phrase` with a or an before it."""
    return f"an {phrase}" if phrase[0] in "aeio" else f"a {phrase}"


_IRREGULAR = {
    "loaf": "loaves", "knife": "knives", "shelf": "shelves", "leaf": "leaves", "fish": "fish",
    "sheep": "sheep", "goose": "geese", "mouse": "mice", "child": "children", "potato": "potatoes",
    "tomato": "tomatoes", "foot": "feet", "tooth": "teeth", "man": "men", "woman": "women",
    "scarf": "scarves", "wolf": "wolves",
}  # fmt: skip


def plural(word: str) -> str:
    """The English plural of a singular noun; of a phrase, that of its last word."""
    head, _, last = word.rpartition(" ")
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif last.endswith(("s", "sh", "ch", "x")):
        last += "es"
    elif last.endswith("y") and last[-2] not in "aeiou":
        last = last[:-1] + "ies"
    else:
        last += "s"
    return f"{head} {last}".strip()


def nouns(words: str) -> tuple[Noun, ...]:
    """Nouns from a comma-separated list of singulars."""
    singulars = [word.strip() for word in words.split(",")]
    return tuple(Noun(word, plural(word)) for word in singulars)


def _people(names: str, he: str, his: str, him: str) -> tuple[Person, ...]:
    return tuple(Person(name, he, his, him) for name in names.split())


PEOPLE = _people(
    "Adam Ben Carl Dan Eric Felix Gus Henry Ivan Jack Karim Leo Max Noah Omar Paul Raj Sam Tom "
    "Victor Will Yusuf Hugo Mateo Kofi Jonas Luca Pedro Arun Finn",
    "he", "his", "him",
) + _people(
    "Anna Beth Clara Dora Emma Fay Gina Hana Iris Julia Kate Lena Mia Nora Olga Priya Rosa Sara "
    "Tina Uma Vera Wendy Yuki Zoe Amina Carmen Elena Freya Leila Ruth",
    "she", "her", "her",
)  # fmt: skip

FRUITS = nouns("apple, pear, plum, peach, orange, lemon, banana, mango, cherry, fig, melon, berry")
VEGETABLES = nouns("carrot, onion, potato, tomato, bean, pepper, cabbage, radish, pumpkin, turnip")
SNACKS = nouns("cookie, muffin, sandwich, bun, pancake, waffle, cupcake, biscuit, pie, cracker")
STATIONERY = nouns("pen, pencil, notebook, eraser, ruler, marker, crayon, folder, brush, notepad")
TOYS = nouns("marble, sticker, kite, puzzle, card, toy car, balloon, doll, block, robot, whistle")
CLOTHES = nouns("shirt, hat, scarf, sock, jacket, glove, belt, cap, dress, sweater")
HOUSEWARES = nouns("cup, plate, bowl, spoon, lamp, candle, towel, pillow, basket, vase")
ANIMALS = nouns("cat, dog, horse, cow, goat, sheep, rabbit, duck, goose, mouse, fox, wolf, bear")
FARM_ANIMALS = nouns("cow, goat, sheep, duck, goose, horse, pig, rabbit, hen, donkey")
BIRDS = nouns("robin, eagle, owl, crow, swan, parrot, sparrow, stork, pigeon, heron")
FLOWERS = nouns("rose, tulip, daisy, lily, violet, poppy, orchid, sunflower")
PLANTS = nouns("rose bush, apple tree, tulip, bean plant, pepper plant, oak, pine, pear tree")
BOXES = nouns("box, bag, basket, crate, tray, jar, bin, case")
READING = nouns("book, comic, magazine, letter, poster, postcard, map, stamp")
MAKINGS = nouns("bracelet, candle, basket, scarf, card, vase, toy boat, lantern, birdhouse, mask")

GOODS = STATIONERY + TOYS + CLOTHES + HOUSEWARES + SNACKS
SMALL_THINGS = FRUITS + SNACKS + STATIONERY + TOYS + READING

PLACES = (
    "park",
    "school",
    "library",
    "market",
    "museum",
    "beach",
    "station",
    "lake",
    "farm",
    "zoo",
)
SHOPS = ("shop", "store", "market", "bakery", "fair", "stall")
TOWNS = ("Alton", "Brook", "Carby", "Denley", "Elmor", "Fairview", "Glenby", "Harwick")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "orange", "purple", "pink")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
GROUPS = ("class", "club", "team", "camp", "choir")

CATEGORIES: dict[str, tuple[str, ...]] = {
    "fruits": tuple(n.one for n in FRUITS),
    "vegetables": tuple(n.one for n in VEGETABLES),
    "animals": tuple(n.one for n in ANIMALS),
    "birds": tuple(n.one for n in BIRDS),
    "flowers": tuple(n.one for n in FLOWERS),
    "colours": COLOURS,
    "clothes": tuple(n.one for n in CLOTHES),
    "tools": ("hammer", "saw", "drill", "rake", "shovel", "wrench", "axe", "chisel", "ladder"),
    "sports": ("tennis", "football", "hockey", "golf", "rowing", "skiing", "chess", "cricket"),
    "drinks": ("water", "milk", "tea", "coffee", "juice", "cocoa", "lemonade", "soda"),
    "instruments": ("piano", "violin", "drum", "flute", "guitar", "harp", "trumpet", "cello"),
    "shapes": ("circle", "square", "triangle", "rectangle", "oval", "star", "cube", "cone"),
    "rooms": ("kitchen", "bedroom", "bathroom", "hall", "attic", "cellar", "office", "garage"),
    "metals": ("iron", "gold", "silver", "copper", "tin", "lead", "zinc", "nickel"),
    "vehicles": ("car", "bus", "train", "truck", "boat", "bicycle", "tram", "plane", "van"),
}
