"""What a measured number depends on besides the code, and whether the machine was busy.

Every document of a measurement that is run as a module begins with `heading`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dspark.machine import cpu_model as cpu_model
from dspark.machine import describe_environment as describe_environment
from dspark.machine import git_revision as git_revision
from dspark.wording import counted

SCHEMA_VERSION = 1


def busy_warnings(facts: Mapping[str, Any]) -> list[str]:
    """A sentence to print when more ran than the machine has cores."""
    load, cores = facts["load_average_1m"], facts["cpu_cores"]
    if not load or not cores or load <= cores:
        return []
    return [
        f"busy machine: load {load:g} on {counted(cores, 'core')} before the measurement; seconds "
        "are not to be relied on"
    ]


def heading(
    module: str,
    arguments: Sequence[str],
    seed: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The first keys of a document, known before anything is measured.

    Args:
        module: In `dspark_eval`.
        arguments: It was called with.
        seed: Of what is drawn; None where a run has none to choose.
        device, dtype: Of what is measured.
    """
    facts = describe_environment(device, dtype)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": " ".join([f"python -m dspark_eval.{module}", *arguments]),
        "seed": seed,
        "environment": facts,
        "warnings": busy_warnings(facts),
    }
