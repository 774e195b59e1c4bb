"""What the document of every measurement that is run as a module begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import dspark


def assert_headed(
    document: Mapping[str, Any],
    module: str,
    asked: Sequence[str],
    seed: int | None,
    dtype: str = "float32",
) -> None:
    """A schema, the command that can be typed again, the seed and the machine come first."""
    first = ["schema_version", "command", "seed", "environment", "warnings"]
    assert list(document)[: len(first)] == first
    assert document["schema_version"] == 1
    assert document["command"] == f"python -m dspark_eval.{module} {' '.join(asked)}"
    assert document["seed"] == seed
    environment = document["environment"]
    assert (environment["device"], environment["dtype"]) == ("cpu", dtype)
    assert environment["torch"] == torch.__version__
    assert environment["dspark"] == dspark.__version__
