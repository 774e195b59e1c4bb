"""Where rows of a chain go over the state as one block (`kda_block_gluon`), and not row by row."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

import torch

from dspark_kernels.kda_rows_triton import MAX_EXPONENT

MAX_ROWS = 8
WIDTHS = (64, 128)


def in_blocks(rows: int, K: int, bound: float) -> bool:
    """Whether they do. Their decays are factored: ``bound`` must promise a range (0: none)."""
    fits = 1 < rows <= MAX_ROWS and K in WIDTHS and 0.0 < -bound * rows <= MAX_EXPONENT
    return fits and _matrix_units()


@cache
def _matrix_units() -> bool:
    """Those that the kernels are written for: of NVIDIA's GPUs since Ampere."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


@cache
def block_kernel(name: str) -> Any:
    """`step` or `round`. Imported where it runs: other cards' Triton need not know Gluon."""
    return getattr(import_module(f"dspark_kernels.kda_{name}_block_gluon"), f"{name}_block_kernel")
