"""Norms of a drafter's gradients, beside torch's over lists."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dspark_kernels import grad_norms as reference
from dspark_kernels.bench.harness import Case, Thunk

LAYER = ((9_728, 2_560),) * 3 + ((4_096, 2_560),) * 2 + ((1_024, 2_560),) * 2 + ((2_560,),) * 2
"""Gradients of a layer of a drafter for Qwen3-4B."""


def cases() -> Iterator[Case]:
    """Five layers in bfloat16."""
    moved, operations = reference.cost(_gradients("meta"))
    yield Case(
        f"{moved / 2e6:.0f} M values, bfloat16", moved, operations, _kernel, _torch,
        "torch._foreach_norm",
    )  # fmt: skip


def _gradients(device: str) -> list[torch.Tensor]:
    return [torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in LAYER * 5]


def _kernel() -> Thunk:
    from dspark_kernels import grad_norms_triton

    gradients = _gradients("cuda")
    return lambda: grad_norms_triton.grad_norms(gradients)


def _torch() -> Thunk:
    gradients = _gradients("cuda")
    return lambda: torch._foreach_norm(gradients, 2, dtype=torch.float32)
