"""The calibrated confidence of a block's slots, beside the launches of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dspark_kernels import calibrate as plain
from dspark_kernels import calibrate_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk

SLOTS = 8


def cases() -> Iterator[Case]:
    """One seat and many."""
    for rows in (1, 64):
        yield Case(
            f"{SLOTS} slots, {rows} seats",
            4 * (2 * rows + 4) * SLOTS,
            0,
            _maker(kernel.calibrate, rows),
            _maker(plain.calibrate, rows),
            f"torch {torch.__version__}",
        )


def _maker(call: Callable[[Tensor, Tensor], Tensor], rows: int) -> Callable[[], Thunk]:
    def make() -> Thunk:
        logits = torch.randn(rows, SLOTS, device="cuda")
        columns = 0.5 + torch.rand(4, SLOTS, device="cuda")
        return lambda: call(logits, columns)

    return make
