"""`moe_decode` of any number of rows: up to 16 as `moe_decode_triton` does them, more in blocks.

A launch of up to 16 rows reads each expert that they chose once; rows in parts of 16 read nearly
all experts again for every part. Here all rows are routed first and sorted by expert, so that each
expert's weights come from memory once, however many rows chose it:

    1 dense     router, latent inputs, shared gate and up, float32 out
    2 route     as of few rows
    3 sort      the (row, choice) pairs by expert
    4 cut       into blocks of up to so many pairs of one expert
    5 gate_up   hidden rows, program (block, tile of outputs)
    6 down      a float32 row per pair
    7 combine   as of few rows: a row's own order, no atomics
    8 dense     back to D, with the shared expert's down; before 7 without a latent space

No shape hangs on what was chosen, so that all of it can be captured. A row meets the same steps of
the same products whoever is beside it and wherever in a block it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dspark_kernels import moe_decode_triton as few
from dspark_kernels.linear_rows import MAX_ROWS
from dspark_kernels.linear_rows_triton import Plan
from dspark_kernels.moe_blocks_triton import cut, dense, down, gate_up, sort
from dspark_kernels.moe_decode import MoE
from dspark_kernels.mxfp4_tile import LIFT
from dspark_kernels.overlap import early

SORTED = 4096
"""Ids that a program of ``sort`` looks at at once."""
LEAST_STEP = 16
"""Inputs of a matrix instruction; words of them where experts are MXFP4."""


@dataclass(frozen=True)
class BlockPlan:
    """How the products are cut.

    Attributes:
        rows: Pairs of a block: a power of two from 16 on.
        side: Rows of a tile of the dense products, likewise.
        dense: Of both; its step is the most inputs, and halves until it divides them.
        gate_up, down: Of the experts' products.
    """

    rows: int
    side: int
    dense: Plan
    gate_up: Plan
    down: Plan


@dataclass(frozen=True)
class _Blocks:
    """Pairs by expert.

    order   [n k] int32: pairs, expert after expert
    table   [most, 3] int32: expert, first and end place in ``order`` of each block
    count   [1] int32: blocks that there are
    """

    order: Tensor
    table: Tensor
    count: Tensor


def moe_decode(
    x: Tensor,
    moe: MoE,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `dspark_kernels.moe_decode.moe_decode`."""
    n = x.shape[0]
    if n <= MAX_ROWS:
        return few.moe_decode(x, moe, norm=norm, eps=eps, residual=residual)
    return by_blocks(x, moe, norm, eps, residual, block_plan(n, moe))


def by_blocks(
    x: Tensor, moe: MoE, norm: Tensor | None, eps: float, residual: Tensor | None, how: BlockPlan
) -> tuple[Tensor, Tensor]:
    """Any number of rows in blocks by a given plan."""
    projected = project(x, moe.inputs, norm, eps, None, torch.float32, how)
    ids, weights, z, tail = few.route_rows(x, moe, norm, eps, projected)
    blocks = blocks_of(ids, moe.experts.count, how.rows)
    partial = _down(_gate_up(z, blocks, moe, how), blocks, moe, how)
    return together(partial, weights, tail, residual, moe, how), ids


def together(
    partial: Tensor,
    weights: Tensor,
    tail: Tensor,
    residual: Tensor | None,
    moe: MoE,
    how: BlockPlan,
) -> Tensor:
    """The layer's output [n, D] from what each pair's expert gave [n k, L].

    tail: [n, L + S] with a latent space, whose first L columns are written here, [n, S] without.
    """
    if moe.latent:
        few.combine_rows(partial, weights, None, None, tail, moe)
        assert moe.outputs is not None
        return project(tail, moe.outputs, None, 0.0, residual, tail.dtype, how)
    shared = None
    if moe.outputs is not None:
        shared = project(tail, moe.outputs, None, 0.0, None, torch.float32, how)
    out = torch.empty(len(tail), moe.experts.width, dtype=tail.dtype, device=tail.device)
    few.combine_rows(partial, weights, shared, residual, out, moe)
    return out


def project(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    dtype: torch.dtype,
    how: BlockPlan,
) -> Tensor:
    """norm(x) W^T + residual of any number of rows."""
    n, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
    out = torch.empty(n, outputs, dtype=dtype, device=x.device)
    by = how.dense
    dense[(triton.cdiv(n, how.side), triton.cdiv(outputs, by.out))](
        x, norm, weight, residual, out, n, eps, I=inputs, O=outputs, BO=by.out,
        BK=_step(inputs, by.step), N=how.side, STAGES=by.stages, NORM=norm is not None,
        ADD=residual is not None, num_warps=by.warps, **early(),
    )  # fmt: skip
    return out


def blocks_of(ids: Tensor, experts: int, rows: int) -> _Blocks:
    """The pairs of chosen experts [n, k], every one below ``experts``, in blocks of ``rows``."""
    n, k = ids.shape
    pairs, wide = n * k, triton.next_power_of_2(experts)
    used = min(pairs, experts)
    # an expert of c pairs has 1 + (c - 1) div rows blocks: most where as many as can have one pair
    most = used + (pairs - used) // rows
    order, starts, table, count = (
        torch.empty(shape, dtype=torch.int32, device=ids.device)
        for shape in ((pairs,), (experts + 1,), (most, 3), (1,))
    )
    block = min(SORTED, triton.next_power_of_2(pairs))
    sort[(experts,)](ids, order, starts, pairs, E=experts, BLOCK=block, num_warps=8, **early())
    cut[(experts,)](
        starts, table, count, E=experts, EP=wide, N=rows,
        MOST=triton.next_power_of_2(triton.cdiv(n, rows)), num_warps=2, **early(),
    )  # fmt: skip
    return _Blocks(order, table, count)


def _gate_up(z: Tensor, blocks: _Blocks, moe: MoE, how: BlockPlan) -> Tensor:
    """Hidden rows [n k, I], a pair's in its own place."""
    (w1, w3, _), (s1, s3, _) = few.stored(moe.experts)
    inner, L, packed = moe.experts.inner, moe.experts.width, moe.experts.packed
    h = torch.empty(len(blocks.order), inner, dtype=z.dtype, device=z.device)
    beta, linear_beta = moe.situ or (1.0, 1.0)
    by = how.gate_up
    gate_up[(len(blocks.table), triton.cdiv(inner, by.out))](
        z, blocks.order, blocks.table, blocks.count, w1, w3, s1, s3, h,
        LIFT.value if packed else 1.0, beta, linear_beta, K=moe.top_k, INNER=inner, L=L,
        BO=by.out, BK=by.step, N=how.rows, STAGES=by.stages, PACKED=packed,
        SITU=moe.situ is not None, num_warps=by.warps, **early(),
    )  # fmt: skip
    return h


def _down(h: Tensor, blocks: _Blocks, moe: MoE, how: BlockPlan) -> Tensor:
    """What a pair's expert gives, [n k, L] float32, before its weight."""
    (_, _, w2), (_, _, s2) = few.stored(moe.experts)
    inner, L = moe.experts.inner, moe.experts.width
    partial = torch.empty(len(blocks.order), L, dtype=torch.float32, device=h.device)
    by = how.down
    down[(len(blocks.table), triton.cdiv(L, by.out))](
        h, blocks.order, blocks.table, blocks.count, w2, s2, partial, INNER=inner, L=L,
        BO=by.out, BK=by.step, N=how.rows, STAGES=by.stages, PACKED=moe.experts.packed,
        num_warps=by.warps, **early(),
    )  # fmt: skip
    return partial


def block_plan(n: int, moe: MoE) -> BlockPlan:
    """Blocks about twice as long as rows per expert, as rows choose some experts more than others,
    but no longer than 64: where multiplying bounds it, more blocks of an expert find its tile in
    the L2 cache, and blocks of 128 were never faster (kernels/docs/moe_decode.md).
    MXFP4 is unpacked once a block, in registers that longer ones would not leave.
    """
    mean = n * moe.top_k / moe.experts.count
    if moe.experts.packed:
        return plan_of(n, moe, 16 if mean <= 4 else 32)
    return plan_of(n, moe, 32 if mean <= 8 else 64)


def plan_of(n: int, moe: MoE, rows: int) -> BlockPlan:
    """The plan of blocks of 16, 32 or 64 pairs; MXFP4: of 16 or 32."""
    inner, L = moe.experts.inner, moe.experts.width
    side, tile = 64, Plan(64, 64, 4, 5, dot=True)
    if n > 2 * side:
        side, tile = 128, Plan(128, 64, 8, 4, dot=True)
    if moe.experts.packed:
        gate, out = (Plan(64, _step(i // 8, 64), 4, 2, dot=True) for i in (L, inner))
    else:
        gate = Plan(64, _step(L, 64), 4, 4, dot=True)
        wide, step = (64, 128) if rows < 64 else (128, 64)
        out = Plan(wide, _step(inner, step), 4, 4, dot=True)
    return BlockPlan(rows, side, tile, gate, out)


def _step(inputs: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides the inputs."""
    return min(most, inputs & -inputs)


def refuses(
    x: Tensor,
    moe: MoE,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> str | None:
    """Why the kernels cannot take this; None: they can."""
    n = x.shape[0]
    if n <= MAX_ROWS or x.dim() != 2:
        return few.refuses(x, moe, norm=norm, eps=eps, residual=residual)
    some = None if residual is None else residual[:MAX_ROWS]
    inner, L = moe.experts.inner, moe.experts.width
    if moe.experts.packed and min(_step(i // 8, 64) for i in (inner, L)) < LEAST_STEP:
        return f"MXFP4 sizes {inner} and {L} are no multiples of {8 * LEAST_STEP}"
    if moe.outputs is not None and moe.outputs.shape[1] % LEAST_STEP:
        return f"a shared expert of width {moe.shared}, no multiple of {LEAST_STEP}"
    if n * max(moe.top_k * inner, moe.top_k * L, *moe.inputs.shape) >= 2**31:
        return f"{n} rows are more than offsets of 32 bits reach"
    return few.refuses(x[:MAX_ROWS], moe, norm=norm, eps=eps, residual=some)
