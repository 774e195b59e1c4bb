"""Rotary positions in a configuration file, in today's nested form and in the older flat one.

    rope_parameters {rope_theta, rope_type, factor, ...}    or    rope_theta and rope_scaling

Losing the scaling leaves a drafter that works on short texts and not on long ones, so a key here
that is not known is an error and not a warning, and two places that disagree are one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.draft.shapes import Yarn

ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling")
YARN_NUMBERS = (
    "factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
# Values that change nothing, where other writers spell them out.
NEUTRAL = {"truncate": True, "partial_rotary_factor": 1.0}


def rope_to_dict(theta: float, yarn: Yarn | None) -> dict[str, Any]:
    """`rope_parameters`: what is not set is left out."""
    if yarn is None:
        return {"rope_theta": theta, "rope_type": "default"}
    given = {name: getattr(yarn, name) for name in YARN_NUMBERS}
    return {
        "rope_theta": theta,
        "rope_type": "yarn",
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        **{name: value for name, value in given.items() if value is not None},
    }


def rope_from_dict(raw: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """Base and scaling of a configuration.

    Raises:
        ValueError: "key: what is wrong": no base, another kind of scaling, an unknown or missing
            key of the scaling, or two places that disagree.
    """
    nested = _object(raw, "rope_parameters")
    scaling = _object(raw, "rope_scaling")
    theta = raw.get("rope_theta")
    found = []
    if nested:
        base = nested.get("rope_theta", theta)
        found.append((_base(base, "rope_parameters: rope_theta"), _yarn("rope_parameters", nested)))
    if scaling:
        base = theta if theta is not None else nested.get("rope_theta", scaling.get("rope_theta"))
        found.append((_base(base, "rope_theta"), _yarn("rope_scaling", scaling)))
    if not found:
        found.append((_base(theta, "rope_theta"), None))
    if theta is not None:
        found.append((_base(theta, "rope_theta"), found[0][1]))
    if any(entry != found[0] for entry in found):
        raise ValueError(
            "rope_parameters: does not agree with rope_theta and rope_scaling beside it; "
            "keep the one that the drafter was trained with"
        )
    return found[0]


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: {value!r} given, an object was expected")
    return value


def _base(value: Any, key: str) -> float:
    if not _is_number(value):
        raise ValueError(f"{key} is {value!r}, a number was expected: the base of rotary positions")
    return float(value)


def _yarn(place: str, rope: Mapping[str, Any]) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    named = ("rope_theta", "rope_type", "type", *NEUTRAL)
    if kind == "yarn":
        named += (*YARN_NUMBERS, "original_max_position_embeddings")
    elif kind != "default":
        raise ValueError(f"{place}: rope_type {kind!r} is not supported, only 'default' and 'yarn'")
    for key, value in rope.items():
        if key not in named:
            raise ValueError(f"{place}: {key} is not known, and would be lost (rope_type {kind!r})")
        if key in NEUTRAL and value != NEUTRAL[key]:
            raise ValueError(f"{place}: {key} {value!r} is not supported, only {NEUTRAL[key]!r}")
    if kind == "default":
        return None
    original = rope.get("original_max_position_embeddings")
    if not isinstance(original, int) or isinstance(original, bool):
        raise ValueError(
            f"{place}: original_max_position_embeddings is {original!r}, an integer was expected: "
            "revisions differ in it, so it is not guessed"
        )
    numbers = {key: rope[key] for key in YARN_NUMBERS if rope.get(key) is not None}
    for key, value in numbers.items():
        if not _is_number(value):
            raise ValueError(f"{place}: {key} is {value!r}, a number was expected")
    if "factor" not in numbers:
        raise ValueError(f"{place}: factor is missing, YaRN needs it")
    return Yarn(
        original_max_position_embeddings=original,
        **{key: float(value) for key, value in numbers.items()},
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
