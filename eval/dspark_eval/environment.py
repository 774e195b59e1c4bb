"""What a measured number depends on besides the code, and whether the machine was busy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.machine import cpu_model as cpu_model
from dspark.machine import describe_environment as describe_environment
from dspark.machine import git_revision as git_revision
from dspark.wording import counted


def busy_warnings(facts: Mapping[str, Any]) -> list[str]:
    """A sentence to print when more ran than the machine has cores."""
    load, cores = facts["load_average_1m"], facts["cpu_cores"]
    if not load or not cores or load <= cores:
        return []
    return [
        f"busy machine: load {load:g} on {counted(cores, 'core')} before the measurement; seconds "
        "are not to be relied on"
    ]
