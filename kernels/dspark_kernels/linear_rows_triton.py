"""`linear_rows` and `gated_rows` in Triton: every byte of the weight once, from memory to lanes.

A program owns BO outputs and reads their weight rows from end to end, in steps of BK inputs. Where
too few outputs make too few programs, each sum is split over inputs, and a second stage adds the
parts in order. What decides the speed is bytes in flight: programs per processor times the bytes
that one has asked for ahead of use. ``plan`` holds what was measured best.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.linear_rows import MAX_ROWS, Situ
from dspark_kernels.overlap import ahead, begin, early, wait
from dspark_kernels.rows_tile import activate, gemm, gemv, gemv_held

HELD_STEP = 256
HELD_INPUTS = 4608
"""A row of so many inputs waits in registers, in tiles of so many."""
MOST_ASKED = (1 << 20) - 16
"""Bytes of one request to the copy engine."""
AHEAD_BYTES = 8 << 20
"""Of a weight that is asked for before its turn. 20 MiB, or all, was no faster."""

SOON_BYTES = 8 << 20
"""Of the weight after next that are fetched while small launches leave memory idle."""


@dataclass(frozen=True)
class Plan:
    """How a product is cut. ``out``: outputs of a program; ``split``: parts of every sum; ``held``:
    tiles of short rows that wait in registers, 0: rows stream through shared memory; ``registers``:
    most of a thread, where one program more on a processor is worth it, 0: as the compiler likes;
    ``tiles``: how many times ``out`` a program takes, one after the other.
    """

    out: int
    step: int
    warps: int
    stages: int
    split: int = 1
    dot: bool = False
    held: int = 0
    registers: int = 0
    tiles: int = 1

    def limits(self) -> dict[str, int]:
        """What a launch adds to its arguments."""
        limited = self.registers and torch.version.hip is None
        return {"maxnreg": self.registers} if limited else {}


@triton.jit
def _sums(
    x, norm, a, b, soon, start, n,
    I: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr,  # noqa: E741
    BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, DUAL: tl.constexpr, DOT: tl.constexpr, HELD: tl.constexpr,
    SOON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Both sums as [BO, N] and squares as [1, N]; without DOT parts of one row's, see `gemv`."""
    if DOT:
        wait(EARLY)
        rows = tl.arange(0, N)
        acc_a, acc_b, square = gemm(
            x, norm, a, b, rows, rows < n, start, I, SPAN, BO, BK, N, STAGES, NORM, DUAL, EVEN
        )
        square = square[None, :]
    elif HELD > 0:
        acc_a, acc_b, square = gemv_held(
            x, norm, a, b, soon, I, BO, BK, HELD, NORM, DUAL, SOON, EARLY
        )
    else:
        acc_a, acc_b, square = gemv(
            x, norm, a, b, start, I, SPAN, BO, BK, STAGES, NORM, DUAL, EVEN, EARLY
        )
    return acc_a, acc_b, square


@triton.jit
def _added(acc, DOT: tl.constexpr):
    """The parts of a row's sums added up: [.., 1]."""
    return acc if DOT else tl.sum(acc, 1)[:, None]


@triton.jit
def _rows_kernel(
    x, norm, weight, residual, out, parts, squares, soon, n, eps,
    I: tl.constexpr, O: tl.constexpr,  # noqa: E741
    BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, DOT: tl.constexpr,
    AHEAD: tl.constexpr, HELD: tl.constexpr, SOON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    tile = tl.program_id(0)
    if NORM:
        ahead(norm, I, EARLY)
    part = tl.program_id(1)
    o = tile * BO + tl.arange(0, BO)
    if AHEAD > 0:
        first = tl.minimum(tile * BO + part * AHEAD, O - 1)
        ahead(weight + first.to(tl.int64) * I, tl.minimum(AHEAD, O - first) * I, EARLY)
    a = weight + tl.minimum(o, O - 1).to(tl.int64) * I
    SPAN: tl.constexpr = (I + SPLIT * BK - 1) // (SPLIT * BK) * BK
    EVEN: tl.constexpr = SPAN * SPLIT == I
    acc, _, square = _sums(
        x, norm, a, a, soon + tile * SOON, part * SPAN, n, I, SPAN, EVEN, BO, BK, N, STAGES, NORM,
        False, DOT, HELD, SOON, EARLY,
    )  # fmt: skip
    rows = tl.arange(0, N)
    at = rows[None, :] * O + o[:, None]
    inside = (rows < n)[None, :] & (o < O)[:, None]
    if ADD and SPLIT == 1:
        added = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    acc = _added(acc, DOT)
    if NORM:
        square = _added(square, DOT)
    if SPLIT > 1:
        tl.store(parts + part * n * O + at, acc, mask=inside)
        if NORM:
            tl.store(
                squares + part * n + rows,
                tl.sum(square, 0) / square.shape[0],
                mask=(rows < n) & (tile == 0),
            )
    else:
        if NORM:
            acc = acc * tl.rsqrt(square / I + eps)
        if ADD:
            acc += added
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(
    parts, squares, residual, out, n, eps,
    I: tl.constexpr, O: tl.constexpr, BO: tl.constexpr,  # noqa: E741
    SPLIT: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    wait(EARLY)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    row = tl.program_id(1)
    inside = o < O
    acc = tl.zeros([BO], tl.float32)
    square = 0.0
    for part in tl.static_range(SPLIT):
        acc += tl.load(parts + (part * n + row) * O + o, mask=inside, other=0.0)
        if NORM:
            square += tl.load(squares + part * n + row)
    if NORM:
        acc = acc * tl.rsqrt(square / I + eps)
    if ADD:
        acc += tl.load(residual + row * O + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * O + o, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(
    x, norm, weight, out, n, eps, beta, linear_beta,
    I: tl.constexpr, S: tl.constexpr,  # noqa: E741
    BO: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, SITU: tl.constexpr, DOT: tl.constexpr, AHEAD: tl.constexpr,
    HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    first = tl.program_id(0) * BO
    o = first + tl.arange(0, BO)
    a = weight + tl.minimum(o, S - 1).to(tl.int64) * I
    b = a + tl.full([], S, tl.int64) * I
    if AHEAD > 0:
        count = tl.minimum(AHEAD, S - first) * I
        ahead(weight + first.to(tl.int64) * I, count, EARLY)
        ahead(weight + (first + tl.full([], S, tl.int64)) * I, count, EARLY)
    SPAN: tl.constexpr = (I + BK - 1) // BK * BK
    gate, up, square = _sums(
        x, norm, a, b, weight, 0, n, I, SPAN, SPAN == I, BO, BK, N, STAGES, NORM, True, DOT, HELD,
        0, EARLY,
    )  # fmt: skip
    gate = _added(gate, DOT)
    up = _added(up, DOT)
    if NORM:
        square = _added(square, DOT)
        scale = tl.rsqrt(square / I + eps)
        gate = gate * scale
        up = up * scale
    rows = tl.arange(0, N)
    inside = (rows < n)[None, :] & (o < S)[:, None]
    value = activate(gate, up, beta, linear_beta, SITU)
    tl.store(out + rows[None, :] * S + o[:, None], value.to(out.dtype.element_ty), mask=inside)


def linear_rows(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    soon: Tensor | None = None,
) -> Tensor:
    """See `dspark_kernels.linear_rows.linear_rows`."""
    how = plan(x.shape[0], weight.shape[1], weight.shape[0])
    return project(x, weight, norm, eps, residual, weight.dtype, how, soon)


def project(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    dtype: torch.dtype,
    how: Plan,
    soon: Tensor | None = None,
) -> Tensor:
    """`linear_rows` by a given plan, with an output of any float dtype."""
    n, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
    out = torch.empty(n, outputs, dtype=dtype, device=x.device)
    parts = squares = out
    if how.split > 1:
        parts = torch.empty(how.split, n, outputs, dtype=torch.float32, device=x.device)
        squares = torch.empty(how.split, n, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(outputs, how.out)
    _rows_kernel[(tiles, how.split)](
        x, norm, weight, residual, out, parts, squares, weight if soon is None else soon, n, eps,
        I=inputs, O=outputs, BO=how.out, BK=how.step, N=MAX_ROWS if how.dot else 1,
        STAGES=how.stages, SPLIT=how.split, NORM=norm is not None, ADD=residual is not None,
        DOT=how.dot, AHEAD=rows_ahead(weight, how.out // how.split), HELD=how.held,
        SOON=0 if soon is None or not how.held else share_of_soon(soon, tiles), num_warps=how.warps,
        **how.limits(), **early(),
    )  # fmt: skip
    if how.split > 1:
        block = 256
        _add_parts[(triton.cdiv(outputs, block), n)](
            parts, squares, residual, out, n, eps, I=inputs, O=outputs, BO=block,
            SPLIT=how.split, NORM=norm is not None, ADD=residual is not None, num_warps=2,
            **early(),
        )  # fmt: skip
    return out


def gated_rows(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    situ: Situ = None,
) -> Tensor:
    """See `dspark_kernels.linear_rows.gated_rows`."""
    n, inputs, width = x.shape[0], x.shape[1], weight.shape[0] // 2
    how = gated_plan(n, inputs)
    beta, linear_beta = situ or (1.0, 1.0)
    out = torch.empty(n, width, dtype=weight.dtype, device=x.device)
    _gated_kernel[(triton.cdiv(width, how.out),)](
        x, norm, weight, out, n, eps, beta, linear_beta, I=inputs, S=width,
        BO=how.out, BK=how.step, N=MAX_ROWS if how.dot else 1, STAGES=how.stages,
        NORM=norm is not None, SITU=situ is not None, DOT=how.dot,
        AHEAD=rows_ahead(weight, how.out), HELD=how.held, num_warps=how.warps, **early(),
    )  # fmt: skip
    return out


def rows_ahead(weight: Tensor, most: int) -> int:
    """How many of a program's ``most`` rows of a weight it asks for before it may begin."""
    row = weight.shape[1] * weight.element_size()
    return min(most, most * AHEAD_BYTES // (len(weight) * row), MOST_ASKED // row)


def share_of_soon(soon: Tensor, programs: int) -> int:
    """How many numbers of the next weight each program asks for: 16 bytes or a multiple."""
    number = soon.element_size()
    each = min(soon.numel() * number, SOON_BYTES) // programs // 16 * 16
    return min(each, MOST_ASKED) // number


def plan(n: int, inputs: int, outputs: int) -> Plan:
    """The measured best cut; the library's product was faster at no size that was measured."""
    if n == 1:
        step = _step(inputs, 1024)
        if step == 1024 and inputs <= HELD_INPUTS and outputs <= 4096:
            return Plan(4, 512, 4, 1, held=inputs // 512)
        if held_tiles(inputs) and 4096 < outputs <= 32768:
            return Plan(16, HELD_STEP, 8, 1, held=4)
        if step == 1024 and outputs <= 4096:
            return Plan(4, step, 4, 1)
        return Plan(16 if step <= 256 and outputs > 8192 else 8, step, 4, 3)
    step = _step(inputs, 256)
    split = 2 if outputs <= 4096 and inputs % (2 * step) == 0 else 1
    return Plan(64, step, 4, 5, split=split, dot=True)


def held_tiles(inputs: int) -> int:
    """Tiles of a row that may wait in registers; 0: it is too long, or does not divide."""
    short = inputs <= HELD_INPUTS and inputs % HELD_STEP == 0
    return inputs // HELD_STEP if short else 0


def gated_plan(n: int, inputs: int) -> Plan:
    """The same for two matrices at once."""
    if n == 1 and held_tiles(inputs):
        return Plan(2, HELD_STEP, 2, 1, held=held_tiles(inputs))
    if n == 1:
        return Plan(8, _step(inputs, 512), 4, 3)
    return Plan(64, _step(inputs, 128), 4, 3, dot=True)


def _step(inputs: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides the inputs, or 64 and a mask."""
    step = most
    while step > 64 and inputs % step:
        step //= 2
    return step


def refuses(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    soon: Tensor | None = None,
    situ: Situ = None,
) -> str | None:
    """Why the kernels cannot take this; None: they can."""
    given = [t for t in (x, weight, norm, residual) if t is not None]
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"weights are {weight.dtype}, not bfloat16 or float16"
    if any(t.dtype != weight.dtype for t in given):
        return "not all tensors have the weight's dtype"
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
        return f"x is {list(x.shape)}, not 1 to {MAX_ROWS} rows"
    if any(not t.is_contiguous() for t in given):
        return "a tensor is not contiguous"
    if weight.shape[1] % 16:
        return f"{weight.shape[1]} inputs are no multiple of 16"
    if any(t.data_ptr() % 16 for t in (weight, norm, soon) if t is not None):
        return "a weight does not begin on 16 bytes"
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "gradients are wanted, and the kernel has no backward"
    return None
