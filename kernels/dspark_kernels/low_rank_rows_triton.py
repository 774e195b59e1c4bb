"""`low_rank_rows` in Triton: a program owns BO outputs of one factor, whose weight it holds whole.

It asks for the weight before it waits for the rows, which the launch before it makes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.overlap import begin, early, wait

MAX_ROWS = 16
"""What one matrix instruction holds anyway."""
OUTPUTS = 32
"""Outputs of a program: 256 programs for two factors of 4096."""


@triton.jit
def _factor_kernel(
    x, weight, out, n, x_row, x_factor,
    O: tl.constexpr, R: tl.constexpr, BO: tl.constexpr, N: tl.constexpr,  # noqa: E741
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    factor = tl.program_id(1)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    r = tl.arange(0, R)
    inside = (o < O)[:, None]
    at = (factor * O + o).to(tl.int64)[:, None] * R + r[None, :]
    w = tl.load(weight + at, mask=inside, other=0.0)
    wait(EARLY)
    if N == 1:
        row = tl.load(x + factor * x_factor + r).to(tl.float32)
        one = tl.sum(w.to(tl.float32) * row[None, :], axis=1)
        tl.store(out + factor * O + o, one.to(out.dtype.element_ty), mask=o < O)
    else:
        rows = tl.arange(0, N)
        given = (rows < n)[:, None]
        at = rows[:, None] * x_row + factor * x_factor + r[None, :]
        part = tl.load(x + at, mask=given, other=0.0)
        acc = tl.dot(w, tl.trans(part), input_precision="ieee")
        to = (factor * n + rows)[None, :] * O + o[:, None]
        tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside & tl.trans(given))


def low_rank_rows(x: Tensor, weight: Tensor) -> Tensor:
    """See `low_rank_rows.low_rank_rows`."""
    n, (factors, outputs, rank) = x.shape[0], weight.shape
    out = torch.empty(factors, n, outputs, dtype=weight.dtype, device=x.device)
    _factor_kernel[(triton.cdiv(outputs, OUTPUTS), factors)](
        x, weight, out, n, x.stride(0), x.stride(1), O=outputs, R=rank, BO=OUTPUTS,
        N=1 if n == 1 else MAX_ROWS, num_warps=2, **early(),
    )  # fmt: skip
    return out


def refuses(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot take these; None: it can."""
    n, (_, _, rank) = x.shape[0], weight.shape
    if not 1 <= n <= MAX_ROWS:
        return f"{n} rows; it takes 1 to {MAX_ROWS}"
    if rank & (rank - 1) or not 16 <= rank <= 512:
        return f"a rank of {rank}; it takes powers of two from 16 to 512"
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"rows are {x.dtype}, weights {weight.dtype}"
    if not weight.is_contiguous() or x.stride(2) != 1:
        return "a weight or a row is not contiguous"
    return "gradients" if torch.is_grad_enabled() and weight.requires_grad else None
