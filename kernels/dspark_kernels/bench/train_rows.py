"""What lies between the products of a layer in training, beside the compiled references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark_kernels import train_rows as reference
from dspark_kernels.bench.harness import Case, Thunk

ROWS, WIDTH, HEADS, HEAD_DIM, INNER = 3_584, 2_560, 32, 128, 9_728
"""A drafter for Qwen3-4B, 512 anchors of 7 slots."""
EPS, HALF = 1e-6, torch.bfloat16


def cases() -> Iterator[Case]:
    """Every pass at the size of a training step."""
    moved = reference.cost(ROWS, WIDTH, HEADS, HEAD_DIM, INNER)
    for name, size in moved.items():
        ours, compiled = partial(_kernel, name), partial(_compiled, name)
        yield Case(f"{name}, {ROWS} rows", size, 0, ours, compiled, "compiled reference")


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _inputs(name: str) -> list[Any]:
    weight, root = _normal(WIDTH), _normal(ROWS).abs()
    if name.startswith("norm"):
        hidden, half = _normal(ROWS, WIDTH), _normal(ROWS, WIDTH, dtype=HALF)
        if name == "norm_rows":
            return [hidden, half, weight, EPS, HALF]
        return [hidden, weight, root, half, _normal(ROWS, WIDTH)]
    if name.startswith("turn"):
        heads = [_normal(1, ROWS, HEADS, HEAD_DIM, dtype=HALF) for _ in range(2)]
        tables = [_normal(1, ROWS, HEAD_DIM) for _ in range(2)]
        last = heads[1:] if name.endswith("back") else []
        return [heads[0], _normal(HEAD_DIM), *tables, 0, EPS, *last]
    return [_normal(ROWS, INNER, dtype=HALF) for _ in range(3 if name.endswith("back") else 2)]


def _kernel(name: str) -> Thunk:
    from dspark_kernels import train_rows_triton

    return _call(getattr(train_rows_triton, name), name)


def _compiled(name: str) -> Thunk:
    return _call(torch.compile(getattr(reference, name)), name)


def _call(function: Callable[..., Any], name: str) -> Thunk:
    inputs = _inputs(name)
    return lambda: function(*inputs)
