"""One layer's block of a `kda` drafter, beside the launches of plain torch that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dspark_kernels import kda_linear as plain
from dspark_kernels import kda_linear_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.linear_kda import Order

WIDTH, SLOTS, TAPS, RANK = 128, 8, 4, 128


def cases() -> Iterator[Case]:
    """A drafter of K3's size has 64 heads, the target itself 96."""
    orders: tuple[Order, ...] = (0, 1, "gla", SLOTS - 1)
    shapes = [(1, 64, order) for order in orders] + [(1, 96, 0), (16, 64, 0)]
    for batch, heads, order in shapes:
        yield Case(
            f"{SLOTS} slots, {heads} heads x {WIDTH}, order {order}, batch {batch}",
            plain.moved_bytes(batch, SLOTS, heads, WIDTH, RANK, TAPS, 2),
            plain.flops(batch, SLOTS, heads, WIDTH, RANK, order),
            _maker(kernel.kda_linear, batch, heads, order),
            _maker(plain.kda_linear, batch, heads, order),
            f"torch {torch.__version__}",
        )


def _maker(
    call: Callable[..., object], batch: int, heads: int, order: Order
) -> Callable[[], Thunk]:
    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    def make() -> Thunk:
        channels, low = heads * WIDTH, torch.bfloat16
        given = (
            normal(batch, SLOTS, 4 * channels + RANK + heads, dtype=low),
            normal(batch, TAPS - 1, 3, channels, dtype=low),
            normal(TAPS, 3 * channels),
            normal(RANK, channels, dtype=low) * RANK**-0.5,
            normal(heads, WIDTH),
            normal(heads, 1).exp(),
            normal(WIDTH, dtype=low),
            normal(batch, heads, WIDTH, WIDTH),
        )
        return lambda: call(*given, order, -5.0, 1e-5)

    return make
