"""`kda_states.states_at` in Triton, forward and backward.

The chunks of `kda_chunk_triton` without queries, one more of them than the rows need (a position
behind the last row of a full chunk enters the next one), then `kda_anchors_triton`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark_kernels.kda_anchors_triton import rows_back_kernel, states_back_kernel, states_kernel
from dspark_kernels.kda_back_triton import More, again, backward
from dspark_kernels.kda_chunk_triton import refused_rows
from dspark_kernels.kda_launch_triton import (
    Arithmetic,
    C,
    Carried,
    Chunks,
    Rows,
    arithmetic_for,
    bounded,
    carry,
    chunks_of_rows,
    dense_rows,
    launch_of,
    within,
)


def refuses(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    positions: Tensor,
    lower_bound: float | None = None,
) -> str | None:
    """Why the kernels cannot take these tensors, or None."""
    if positions.shape[1] == 0:
        return "no positions"
    return refused_rows((k, v, g, beta), state)


def states_at(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    positions: Tensor,
    lower_bound: float | None = None,
) -> Tensor:
    """See `kda_states.states_at`; positions outside 0..T count as the nearer of the two."""
    states: Tensor = _StatesAt.apply(k, v, g, beta, state, positions, bounded(lower_bound))
    return states


def _chunks(k: Tensor) -> Chunks:
    B, T = k.shape[:2]
    return chunks_of_rows(B, T // C + 1)


class _StatesAt(torch.autograd.Function):
    """Keeps the inputs only; the backward makes everything else again."""

    @staticmethod
    def forward(ctx, k, v, g, beta, state, positions, factored):  # type: ignore[no-untyped-def]
        rows = Rows(None, dense_rows(k), dense_rows(v), dense_rows(g), beta, factored)
        state, positions = state.contiguous(), positions.contiguous()
        chunks, how = _chunks(k), arithmetic_for(k, v)
        made = within(rows, chunks, how, keeps=False)
        carried = carry(
            rows, made, chunks, state, how, reads=False, keeps=torch.float32, ends=False
        )
        ctx.save_for_backward(k, v, g, beta, state, positions)
        ctx.factored = factored
        return _advance(rows, carried, chunks, positions, how)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        k, v, g, beta, state, positions = ctx.saved_tensors
        rows = Rows(None, dense_rows(k), dense_rows(v), dense_rows(g), beta, ctx.factored)
        chunks, how = _chunks(k), arithmetic_for(k, v)
        made, carried = again(rows, chunks, state, how, torch.float32)
        more = _gather(rows, carried, chunks, positions, how, dout.contiguous())
        found = backward(rows, made, carried, chunks, how, None, None, more)
        return found.dk, found.dv, found.dg, found.dbeta, found.dstate, None, None


def _strides(rows: Rows) -> tuple[int, ...]:
    return (*rows.k.stride()[:3], *rows.g.stride()[:3])


def _advance(
    rows: Rows, carried: Carried, chunks: Chunks, positions: Tensor, how: Arithmetic
) -> Tensor:
    B, T, H, K, V = rows.sizes
    A = positions.shape[1]
    launch = launch_of("anchors", how, K, V)
    out = rows.v.new_empty((B, A, H, K, V), dtype=torch.float32)
    states_kernel[(B * A * H * triton.cdiv(V, launch.values),)](
        rows.k, rows.g, carried.states, carried.U, positions, out, T, chunks.per_row, H, A,
        *_strides(rows), K=K, V=V, BK=launch.keys, BV=launch.values, C=C,
        PRECISION=how.products, PARTS=how.parts, **launch.options,
    )  # fmt: skip
    return out


def _gather(
    rows: Rows, carried: Carried, chunks: Chunks, positions: Tensor, how: Arithmetic, dout: Tensor
) -> More:
    """What flows from the states at positions into their chunks."""
    B, T, H, K, V = rows.sizes
    A, N = positions.shape[1], chunks.N
    positions = positions.clamp(0, T)
    ascending, order = positions.sort(dim=1, stable=True)
    edges = torch.arange(chunks.per_row + 1, device=positions.device) * C
    firsts = torch.searchsorted(ascending, edges.expand(B, -1).contiguous())
    new = rows.v.new_empty
    more = More(
        new((N, H, C, V), dtype=torch.float32),
        new((N, H, K, V), dtype=torch.float32),
        *(new((N, H, C, K), dtype=torch.float32) for _ in range(2)),
    )
    where = (positions, order, firsts)
    sizes = (chunks.per_row, H, A, *_strides(rows))
    launch = launch_of("anchors_back", how, K, V)
    states_back_kernel[(N * H * triton.cdiv(V, launch.values),)](
        rows.k, rows.g, dout, *where, more.dU, more.dS, *sizes,
        K=K, V=V, BK=launch.keys, BV=launch.values, C=C,
        PRECISION=how.products, PARTS=how.parts, **launch.options,
    )  # fmt: skip
    rows_back_kernel[(N * H * triton.cdiv(K, launch.keys),)](
        rows.k, rows.g, dout, *where, carried.states, carried.U, more.dk, more.dg, *sizes,
        K=K, V=V, BK=launch.keys, BV=launch.values, C=C,
        PRECISION=how.products, PARTS=how.parts, **launch.options,
    )  # fmt: skip
    return more
