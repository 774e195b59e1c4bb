"""Where rows of a chain go over the state as one block (`kda_block_gluon`), and not row by row."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from dspark_kernels.kda_rows_triton import MAX_EXPONENT

MAX_ROWS = 8
WIDTHS = (64, 128)
SHARED = 64 * 2**10
"""Bytes of shared memory that a step with its state in them may take."""


def in_blocks(rows: int, K: int, bound: float) -> bool:
    """Whether they do. Their decays are factored: ``bound`` must promise a range (0: none)."""
    fits = 1 < rows <= MAX_ROWS and K in WIDTHS and 0.0 < -bound * rows <= MAX_EXPONENT
    return fits and _matrix_units()


def copied(state: Tensor) -> bool:
    """Whether copies of 16 bytes may bring a state into shared memory: where it begins, the
    compiler must be told that it does so on 16 bytes, and there must be room for it."""
    return state.data_ptr() % 16 == 0 and state.stride(0) % 16 == 0 and _room() >= SHARED


@cache
def _room() -> int:
    """Bytes of shared memory that a program may ask for."""
    device = torch.cuda.current_device()
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


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
