"""Projections of one and of eight rows, beside the library's product with its own norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dspark_kernels import linear_rows as plain
from dspark_kernels import linear_rows_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk

EPS = 1e-5
SIZES = (
    ("Kimi-Linear KDA inputs", 2304, 12576),
    ("Kimi-Linear MLA inputs", 2304, 6720),
    ("Kimi-Linear o_proj", 4096, 2304),
    ("Kimi-Linear head", 2304, 163840),
    ("K3 KDA inputs", 7168, 49376),
    ("K3 MLA inputs", 7168, 14400),
    ("K3 o_proj", 12288, 7168),
    ("K3 head", 7168, 163840),
)
GATED = (("Kimi-Linear dense MLP", 2304, 9216), ("K3 dense MLP", 7168, 33792))


def cases() -> Iterator[Case]:
    """The products that a layer's launches are made of."""
    for name, inputs, outputs in SIZES:
        for n in (1, 8):
            yield Case(
                f"{name} {inputs} -> {outputs}, {n} rows",
                plain.moved_bytes(n, inputs, outputs, 2, residual=False),
                plain.flops(n, inputs, outputs),
                _maker(kernel.linear_rows, n, inputs, outputs),
                _maker(plain.linear_rows, n, inputs, outputs),
                f"torch {torch.__version__}",
            )
    for name, inputs, width in GATED:
        for n in (1, 8):
            yield Case(
                f"{name} gate, up {inputs} -> 2 x {width}, {n} rows",
                plain.moved_bytes(n, inputs, 2 * width, 2, residual=False),
                plain.flops(n, inputs, 2 * width),
                _maker(_gated(kernel.gated_rows), n, inputs, 2 * width),
                _maker(_gated(plain.gated_rows), n, inputs, 2 * width),
                f"torch {torch.__version__}",
            )


def _gated(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, norm, eps: call(x, weight, norm=norm, eps=eps, situ=(4.0, 25.0))


def _maker(call: Callable[..., Tensor], n: int, inputs: int, outputs: int) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x = torch.randn(n, inputs, device="cuda").bfloat16()
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda")
        weight.normal_(std=inputs**-0.5)
        norm = torch.rand(inputs, device="cuda").bfloat16()
        return lambda: call(x, weight, norm=norm, eps=EPS)

    return make
