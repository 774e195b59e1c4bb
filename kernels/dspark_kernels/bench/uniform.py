"""Counted random numbers of a request, beside Philox in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dspark_kernels import rng as plain
from dspark_kernels import rng_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk


def cases() -> Iterator[Case]:
    """The coins of a block of eight slots."""
    for batch, count in ((1, 8), (64, 8)):
        yield Case(
            f"{count} uniforms of {batch} requests",
            plain.moved_bytes(batch, count),
            0,
            _maker(kernel.uniform, batch, count),
            _maker(plain.uniform, batch, count),
            f"torch {torch.__version__}",
        )


def _maker(call: Callable[..., object], batch: int, count: int) -> Callable[[], Thunk]:
    def make() -> Thunk:
        seed, position = (torch.randint(2**31, (batch,), device="cuda") for _ in range(2))
        return lambda: call(seed, position, plain.DRAFT, count)

    return make
