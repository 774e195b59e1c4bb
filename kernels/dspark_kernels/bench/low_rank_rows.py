"""Second factors of a KDA layer, one and eight rows, beside the library's batched product."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dspark_kernels import low_rank_rows as plain
from dspark_kernels import low_rank_rows_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk

SIZES = (("Kimi-Linear gate and decay", 2, 128, 4096), ("K3 decay", 1, 128, 12288))


def cases() -> Iterator[Case]:
    """Both published models."""
    for name, factors, rank, outputs in SIZES:
        for n in (1, 8):
            size = (n, factors, rank, outputs)
            yield Case(
                f"{name} {factors} x {rank} -> {outputs}, {n} rows",
                plain.moved_bytes(*size, 2),
                plain.flops(*size),
                _maker(kernel.low_rank_rows, *size),
                _maker(plain.low_rank_rows, *size),
                f"torch {torch.__version__}",
            )


def _maker(
    call: Callable[[Tensor, Tensor], Tensor], n: int, factors: int, rank: int, outputs: int
) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x = torch.randn(n, factors, rank, device="cuda").bfloat16()
        weight = torch.randn(factors, outputs, rank, device="cuda").bfloat16()
        return lambda: call(x, weight)

    return make
