"""Where a drafter comes from: its target, tokenizer, template and rows, as its folder records it.

None of it shows in a shape, and each of them, if it differs, only costs acceptance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TargetRecord:
    """Which target a drafter was distilled from, so that a mismatch is seen before it costs speed.

    Attributes:
        name: Name or path the target was loaded by.
        tokenizer_hash: SHA-256 (hex) of the tokenizer's vocabulary, or None where unknown.
        template_hash: SHA-256 (hex) of the chat template of its rows, thinking switch included.
        thinking, row_length: That switch, and the most tokens a row had; None where unknown.
    """

    name: str
    tokenizer_hash: str | None = None
    template_hash: str | None = None
    thinking: bool | None = None
    row_length: int | None = None


def record_to_dict(record: TargetRecord | None) -> dict[str, Any] | None:
    """The target that a drafter was distilled from, as it stands in `config.json`."""
    return None if record is None else asdict(record)


def record_from_dict(raw: Any) -> TargetRecord | None:
    """The inverse of `record_to_dict`. Raises ValueError for anything else."""
    if raw is None:
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise ValueError("target: an object with the target's name was expected")
    hashes = [raw.get(key) for key in ("tokenizer_hash", "template_hash")]
    thinking = raw.get("thinking")
    if not all(item is None or isinstance(item, str) for item in hashes):
        raise ValueError("target: tokenizer_hash, template_hash: a string or null was expected")
    length = raw.get("row_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"target.row_length: {length!r} given, a length or null was expected")
    if thinking is not None and not isinstance(thinking, bool):
        raise ValueError(f"target.thinking: {thinking!r} given, true, false or null was expected")
    known: dict[str, Any] = {field.name: raw.get(field.name) for field in fields(TargetRecord)}
    return TargetRecord(**known)
