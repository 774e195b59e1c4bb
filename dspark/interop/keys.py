"""Keys of somebody else's configuration: looked up wherever they may stand, none lost in silence.

The same key may stand at top level, in a nest (`dflash_config`), with a prefix (`dspark_...`) or
under another name. All places that have it must agree: where two disagree, two engines would run
two different drafters. What nobody looked up is kept apart and told to the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NESTS = ("dflash_config", "dspark_config", "transformer_layer_config")
PREFIX = "dspark_"

KINDS: dict[str, tuple[type, ...]] = {
    "an integer": (int,),
    "a number": (int, float),
    "true or false": (bool,),
    "a string": (str,),
    "a list": (list,),
    "an object": (dict,),
}


class Keys:
    """One configuration, and which of its keys have been read.

    Args:
        raw: Content of a `config.json`.

    Raises:
        ValueError: A nest that is no object.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._places: dict[str, Mapping[str, Any]] = {"": raw}
        for nest in NESTS:
            inner = raw.get(nest)
            if inner is not None and not isinstance(inner, Mapping):
                raise ValueError(f"{nest}: {inner!r} given, an object was expected")
            self._places[nest] = inner or {}
        self._read: set[tuple[str, str]] = set()

    def take(self, key: str, kind: str, *aliases: str) -> Any:
        """The value of a key, or None where nobody has it; null counts as absent.

        Args:
            key: Its first name; `dspark_` + key is tried as well.
            kind: One of `KINDS`, in words.
            aliases: Further names of the same thing.

        Raises:
            ValueError: A value of another kind, or places that disagree.
        """
        found = {}
        for name in (key, PREFIX + key, *aliases):
            for nest, values in self._places.items():
                if name not in values:
                    continue
                self._read.add((nest, name))
                if values[name] is not None:
                    found[f"{nest}.{name}" if nest else name] = values[name]
        for where, value in found.items():
            if not _is(kind, value):
                raise ValueError(f"{where}: {value!r} given, {kind} was expected")
        if not found:
            return None
        first = next(iter(found.values()))
        if any(value != first for value in found.values()):
            listed = " but ".join(f"{where} is {value!r}" for where, value in found.items())
            raise ValueError(f"{key}: {listed}; they mean the same")
        return first

    def need(self, key: str, kind: str, *aliases: str, hint: str) -> Any:
        """As `take`, but a key that is nowhere is a `ValueError` that ends in the hint."""
        value = self.take(key, kind, *aliases)
        if value is None:
            raise ValueError(f"{key}: missing; {hint}")
        return value

    def merged(self, *names: str) -> dict[str, Any]:
        """Those keys as they stand, the first place that has each; read as a group elsewhere."""
        found: dict[str, Any] = {}
        for nest, values in self._places.items():
            for name in names:
                if name in values:
                    self._read.add((nest, name))
                    found.setdefault(name, values[name])
        return found

    def rest(self) -> dict[str, Any]:
        """What was never read, nested as in the file; nests that are all read are left out."""
        kept: dict[str, Any] = {}
        for nest, values in self._places.items():
            unread = {
                name: value
                for name, value in values.items()
                if (nest, name) not in self._read and not (nest == "" and name in NESTS)
            }
            if nest == "":
                kept.update(unread)
            elif unread:
                kept[nest] = unread
        return kept


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool) and kind != "true or false":
        return False
    return isinstance(value, KINDS[kind])
