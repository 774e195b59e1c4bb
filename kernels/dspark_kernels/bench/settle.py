"""The end of a frame as one launch, beside the same lines in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dspark_kernels import settle as plain
from dspark_kernels import settle_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk

VOCAB = 163_840


def cases() -> Iterator[Case]:
    """A plain step, a block of seven, and 64 seats of one; K3's vocabulary for the end tokens."""
    for batch, primaries in ((1, 0), (1, 7), (64, 7)):
        yield Case(
            f"{batch} seats, {primaries} primaries",
            plain.moved_bytes(batch, primaries),
            0,
            _maker(kernel.settle, batch, primaries),
            _maker(plain.settle, batch, primaries),
            f"torch {torch.__version__}",
        )


def _maker(call: Callable[..., object], batch: int, primaries: int) -> Callable[[], Thunk]:
    def ids(*shape: int, high: int = 1000) -> Tensor:
        return torch.randint(high, shape, device="cuda")

    def make() -> Thunk:
        tokens, wide = ids(batch, primaries), torch.rand(batch, primaries, device="cuda")
        accepted = ids(batch, high=primaries + 1)
        ends = torch.zeros(batch, VOCAB, dtype=torch.bool, device="cuda")
        seats = plain.Seats(*(ids(batch) for _ in range(5)))
        verdict = accepted, ids(batch), ids(batch, high=4), torch.zeros_like(accepted)
        return lambda: call(tokens, *verdict, ends, seats, wide, wide, wide)

    return make
