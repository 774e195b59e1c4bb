"""Kernels that give the same bits every time, for a run on a GPU that must be exactly repeatable.

On a CPU a run repeats itself anyway. On a GPU some sums are taken in whatever order threads arrive,
so two equal runs drift apart by rounding; `train.deterministic` has torch choose other kernels and
cuBLAS a fixed workspace. An operation with no such kernel raises RuntimeError with its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = (":4096:8", ":16:8")
"""Values that cuBLAS's documentation calls reproducible, the faster one first."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic kernels inside, if wanted; the process's own choice again after.

    cuBLAS reads its workspace when it is first used, so the process must not have used it before.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    if os.environ.get(CUBLAS_WORKSPACE) not in FIXED_WORKSPACES:
        os.environ[CUBLAS_WORKSPACE] = FIXED_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
