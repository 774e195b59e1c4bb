"""One AdamW update with moments of every kind, beside torch's fused one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dspark_kernels import adamw as reference
from dspark_kernels.adamw import Moments, Rates
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.moments import BLOCK

COUNT = 9_728 * 2_560 * 4
"""Values: four of the largest matrices of a drafter for Qwen3-4B."""
RATES = Rates(6e-4, 0.9, 0.999, 1e-8, 0.0, 10, 1)


def cases() -> Iterator[Case]:
    """float32, bfloat16 and one-byte moments, bfloat16 gradients and copies."""
    for kind in ("fp32", "bf16", "int8"):
        moved = reference.cost(COUNT, 2, _moments(kind, "meta"), copy=True)
        peer = _torch if kind == "fp32" else None
        yield Case(
            f"{COUNT / 1e6:.0f} M values, {kind} moments", moved, 20 * COUNT,
            partial(_kernel, kind), peer, "torch fused, fp32 gradient, no copy",
        )  # fmt: skip


def _moments(kind: str, device: str = "cuda") -> Moments:
    def zeros(dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    if kind == "int8":
        scales = (zeros(torch.float32, COUNT // BLOCK) for _ in range(2))
        return Moments(zeros(torch.int8), zeros(torch.uint8), *scales)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    return Moments(zeros(dtype), zeros(dtype))


def _kernel(kind: str) -> Thunk:
    from dspark_kernels import adamw_triton

    weight, gradient = torch.randn(COUNT, device="cuda"), torch.randn(COUNT, device="cuda")
    half, copy = gradient.bfloat16(), torch.empty(COUNT, device="cuda", dtype=torch.bfloat16)
    moments, scale = _moments(kind), torch.ones((), device="cuda")
    del gradient
    return lambda: adamw_triton.adamw(weight, half, moments, scale, RATES, copy)


def _torch() -> Thunk:
    weight = torch.nn.Parameter(torch.randn(COUNT, device="cuda"))
    weight.grad = torch.randn(COUNT, device="cuda")
    optimiser = torch.optim.AdamW([weight], lr=RATES.lr, fused=True, capturable=True)
    optimiser.step()
    return optimiser.step
