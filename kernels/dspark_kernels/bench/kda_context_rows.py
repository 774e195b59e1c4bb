"""What a `kda` drafter's context folds after a round, beside the launches of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dspark_kernels import kda_context_rows as plain
from dspark_kernels import kda_context_rows_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk

WIDTH, ROWS, TAPS, RANK = 128, 9, 4, 128


def cases() -> Iterator[Case]:
    """The four layers of a drafter of K3's size with 64 heads, and five with 96."""
    for batch, layers, heads in ((1, 4, 64), (1, 5, 96), (16, 4, 64)):
        yield Case(
            f"{ROWS} rows, {layers} x {heads} heads x {WIDTH}, batch {batch}",
            plain.moved_bytes(batch, ROWS, layers, heads, WIDTH, RANK, TAPS, 2),
            2 * batch * ROWS * RANK * layers * heads * WIDTH,
            _maker(kernel.kda_context_rows, batch, layers, heads),
            _maker(plain.kda_context_rows, batch, layers, heads),
            f"torch {torch.__version__}",
        )


def _maker(call: Callable[..., object], batch: int, layers: int, heads: int) -> Callable[[], Thunk]:
    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    def make() -> Thunk:
        every, low = layers * heads, torch.bfloat16
        channels = 3 * every * WIDTH
        given = (
            normal(batch, ROWS, channels + layers * RANK + every, dtype=low),
            normal(batch, TAPS - 1, channels, dtype=low),
            normal(TAPS, channels),
            normal(layers, RANK, heads * WIDTH, dtype=low) * RANK**-0.5,
            normal(every, WIDTH),
            normal(every, 1).exp(),
        )
        keep = torch.full((batch,), ROWS - 1, device="cuda")
        return lambda: call(*given, -5.0, keep)

    return make
