"""Results that are there already: taken where the same was asked for, refused where it was not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark.files import read_json

ASKED = "asked"
"""Key of a record under which stands all that decided it."""


def is_there(path: Path, asked: Mapping[str, Any]) -> bool:
    """Whether that was done before. Raises UserError if it was with other settings."""
    if not path.is_file():
        return False
    known = read_json(path).get(ASKED, {})
    other = [key for key in {**known, **asked} if known.get(key) != asked.get(key)]
    if other:
        found = ", ".join(f"{key} {known.get(key)}, not {asked.get(key)}" for key in sorted(other))
        raise UserError(f"{path}: made with {found}; choose another folder or delete the file")
    return True
