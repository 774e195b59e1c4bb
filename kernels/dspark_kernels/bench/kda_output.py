"""One row of a KDA layer with its output projection, beside the two ops that it joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dspark_kernels import kda_decode, linear_rows
from dspark_kernels import kda_output_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.kda_decode_triton import kda_decode as decode
from dspark_kernels.linear_rows_triton import linear_rows as project

WIDTH, TAPS, RANK, BOUND, EPS = 128, 4, 128, -5.0, 1e-5
SIZES = (("Kimi-Linear", 32, 2304, 2, None), ("K3", 96, 7168, 1, BOUND))
"""Heads, hidden width, low-rank factors (decay, or gate and decay), bound of the gate."""


def cases() -> Iterator[Case]:
    """A row that counts at once, in both published models."""
    for name, heads, hidden, factors, bound in SIZES:
        yield Case(
            f"{name}, {heads} heads -> {hidden}",
            *cost(heads, hidden, factors),
            _maker(kernel.kda_output, heads, hidden, factors, bound),
            _maker(_apart, heads, hidden, factors, bound),
            "kda_decode, then linear_rows",
        )


def cost(heads: int, hidden: int, factors: int) -> tuple[int, int]:
    """Bytes that must move and operations: the layer's row, its state back, factors, projection."""
    moved, operations = kda_decode.cost(1, 1, 0, heads, WIDTH, WIDTH, TAPS)
    channels = heads * WIDTH
    moved += 4 * channels * WIDTH + 2 * factors * channels * RANK
    moved += linear_rows.moved_bytes(1, channels, hidden, 2, residual=True)
    return moved, operations + 2 * factors * channels * RANK + 2 * channels * hidden


def _apart(
    *,
    rows: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    eps: float,
    lower_bound: float | None,
    weight: Tensor,
    residual: Tensor,
    **given: Tensor,
) -> Tensor:
    y = decode(
        rows,
        A_log=A_log,
        dt_bias=dt_bias,
        eps=eps,
        lower_bound=lower_bound,
        held_decay=rows.new_empty(1, 0, len(dt_bias)),
        held_beta=rows.new_empty(1, 0, len(A_log)),
        accepted=torch.zeros(1, dtype=torch.int64, device="cuda"),
        fold=True,
        **given,
    )
    return project(y.flatten(0, 1), weight, residual=residual)


def _maker(
    call: Callable[..., object], heads: int, hidden: int, factors: int, bound: float | None
) -> Callable[[], Thunk]:
    channels = heads * WIDTH
    widths = (3 * channels, RANK if factors == 2 else channels, RANK, heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda")

    def make() -> Thunk:
        rows, gate, decay, beta = normal(1, 1, sum(widths)).bfloat16().split(widths, dim=-1)
        given = {
            "rows": rows,
            "decay": decay,
            "beta": beta,
            "gate": gate,
            "held_rows": normal(1, TAPS - 1, 3 * channels).bfloat16(),
            "state": normal(1, heads, WIDTH, WIDTH),
            "conv": normal(TAPS, 3 * channels),
            "A_log": normal(heads),
            "dt_bias": normal(channels),
            "norm": normal(WIDTH),
            "eps": EPS,
            "lower_bound": bound,
            "second": (RANK**-0.5 * normal(factors, channels, RANK)).bfloat16(),
            "weight": (channels**-0.5 * normal(hidden, channels)).bfloat16(),
            "residual": normal(1, hidden).bfloat16(),
        }
        return partial(call, **given)

    return make
