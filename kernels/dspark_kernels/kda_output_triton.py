"""`kda_output` in Triton: columns of heads, then their projection, which normalises them.

The first launch splits a head over programs, so that each fits beside what still runs of the launch
before and no processor has to read a head's state and factors alone. What its programs cannot know,
the norm over all columns, the second launch finds from their squares: a thread's weights of one
load are of one head. It moves the window of the convolution, too, which all parts had to read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, var-annotated, unreachable"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels import kda_decode_triton, linear_rows_triton
from dspark_kernels.kda_decode_triton import Layer, one_row
from dspark_kernels.linear_rows_triton import Plan, share_of_soon
from dspark_kernels.overlap import ahead, begin, early, wait
from dspark_kernels.rows_tile import fold, once

PARTS = 2
"""Programs of a head."""
WARPS = 8
MOST_INPUTS = 4608
"""Of a weight whose rows wait in registers."""


@triton.jit
def _scales(squares, first, eps, V: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """What the norm multiplies COUNT groups of eight columns by, from column ``first`` on."""
    head = (first + 8 * tl.arange(0, COUNT)[None, :]) // V
    square = tl.load(squares + head * PARTS)
    for part in tl.static_range(1, PARTS):
        square += tl.load(squares + head * PARTS + part)
    return tl.rsqrt(square / V + eps)


@triton.jit
def _move(row_ptr, held_ptr, c, s_ht, C: tl.constexpr, W: tl.constexpr):
    """Channels ``c`` of the window go past the row."""
    window = ()
    for w in tl.static_range(1, W - 1):
        window = window + (tl.load(held_ptr + w * s_ht + c, mask=c < C),)  # noqa: RUF005
    window = window + (tl.load(row_ptr + c, mask=c < C),)  # noqa: RUF005
    for w in tl.static_range(W - 1):
        tl.store(held_ptr + w * s_ht + c, window[w], mask=c < C)


@triton.jit
def _output_kernel(
    x, squares, weight, residual, out, row_ptr, held_ptr, soon, eps, s_ht,
    I: tl.constexpr, O: tl.constexpr, V: tl.constexpr, C: tl.constexpr, W: tl.constexpr,  # noqa: E741
    BO: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, MOVED: tl.constexpr,
    ADD: tl.constexpr, SOON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    program = tl.program_id(0)
    o = program * BO + tl.arange(0, BO)
    at = tl.arange(0, BK)[None, :] + tl.zeros([BO, 1], tl.int32)
    a = weight + tl.minimum(o, O - 1).to(tl.int64)[:, None] * I + at
    tiles = ()
    for k in tl.static_range(0, I, BK):
        tiles = tiles + (once(a + k),)  # noqa: RUF005
    wait(EARLY)
    if SOON > 0:
        ahead(soon + program * SOON, SOON, EARLY, True)
    acc = tl.zeros([BO, BK // 8], tl.float32)
    for k in tl.static_range(0, I, BK):
        row = tl.load(x + k + at).to(tl.float32)
        sums = fold(tiles[k // BK].to(tl.float32) * row, BO, BK)
        acc += sums * _scales(squares, k, eps, V, PARTS, BK // 8)
    if ADD:
        added = tl.load(residual + o, mask=o < O, other=0.0).to(tl.float32)
    total = tl.sum(acc, 1)
    if ADD:
        total += added
    tl.store(out + o, total.to(out.dtype.element_ty), mask=o < O)
    _move(row_ptr, held_ptr, program * MOVED + tl.arange(0, MOVED), s_ht, C, W)


def kda_output(
    rows: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    held_rows: Tensor,
    state: Tensor,
    conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    lower_bound: float | None,
    second: Tensor | None,
    weight: Tensor,
    residual: Tensor | None = None,
    soon: Tensor | None = None,
) -> Tensor:
    """See `dspark_kernels.kda_output.kda_output`."""
    B, H, _, V = state.shape
    (O, I), C = weight.shape, rows.shape[2]  # noqa: E741
    y = torch.empty((B, H * V), dtype=rows.dtype, device=rows.device)
    many = PARTS if B == 1 and _held(I, V) else 1
    squares = torch.empty((B, H, many), dtype=torch.float32, device=rows.device)
    layer = Layer(conv, A_log, dt_bias, norm, eps, lower_bound, second)
    warps = WARPS if many > 1 else kda_decode_triton.WARPS
    one_row(rows, decay, beta, gate, held_rows, state, layer, y, warps, many, squares)
    if many == 1:
        return linear_rows_triton.linear_rows(y, weight, residual=residual, soon=soon)
    how = plan(I)
    programs = triton.cdiv(O, how.out)
    out = torch.empty((B, O), dtype=rows.dtype, device=rows.device)
    _output_kernel[(programs,)](
        y, squares, weight, residual, out, rows, held_rows, weight if soon is None else soon, eps,
        held_rows.stride(1), I=I, O=O, V=V, C=C, W=len(conv), BO=how.out, BK=how.step, PARTS=many,
        MOVED=triton.next_power_of_2(triton.cdiv(C, programs)), ADD=residual is not None,
        SOON=0 if soon is None else share_of_soon(soon, programs), num_warps=how.warps,
        **how.limits(), **early(),
    )  # fmt: skip
    return out


def plan(inputs: int) -> Plan:
    """How the projection is cut: all of a row waits in registers."""
    return Plan(2, min(512, inputs & -inputs), 4, 1)


def _held(inputs: int, values: int) -> bool:
    return inputs <= MOST_INPUTS and inputs % 128 == 0 and values % (16 * PARTS) == 0


def refuses(
    rows: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    held_rows: Tensor,
    state: Tensor,
    conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    lower_bound: float | None,
    second: Tensor | None,
    weight: Tensor,
    residual: Tensor | None = None,
    soon: Tensor | None = None,
) -> str | None:
    """Why the kernels cannot take these."""
    decays, betas = (rows.new_empty(len(rows), 0, n) for n in (len(dt_bias), len(A_log)))
    counts = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    if rows.shape[1] != 1:
        return f"{rows.shape[1]} rows of a sequence, it takes one"
    return kda_decode_triton.refuses(
        rows, decay, beta, gate, held_rows, decays, betas, counts, state, conv, A_log, dt_bias,
        norm, eps, lower_bound, fold=True, second=second,
    ) or linear_rows_triton.refuses(
        rows.new_empty(len(rows), weight.shape[1]), weight, residual=residual, soon=soon
    )  # fmt: skip
