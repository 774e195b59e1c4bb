"""`kda.chunk` in Triton: chunks of 32 rows, forward and backward. See `kda_within_triton`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark_kernels.kda_back_triton import again, backward
from dspark_kernels.kda_launch_triton import (
    MOST_WIDTH,
    C,
    Chunks,
    Rows,
    arithmetic_for,
    bounded,
    carry,
    chunks_of_rows,
    dense_rows,
    packed_chunks,
    within,
)

DTYPES = (torch.float32, torch.bfloat16)


def refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> str | None:
    """Why the kernels cannot take these tensors, or None."""
    return refused_rows((q, k, v, g, beta), state)


def refused_rows(rows: tuple[Tensor, ...], state: Tensor) -> str | None:
    """Of q (if any), k, v, g, beta and the entering state."""
    *keys, v, g, _ = rows
    for x in rows:
        if x.dtype not in DTYPES:
            return f"rows of {x.dtype}; float32 and bfloat16 are taken"
    if state.dtype != torch.float32:
        return f"a state of {state.dtype}; it is float32"
    if any(x.shape != g.shape for x in keys) or v.shape[:3] != g.shape[:3]:
        return "queries, keys, values and decays of different rows or heads"
    if max(g.shape[-1], v.shape[-1]) > MOST_WIDTH:
        return f"heads wider than {MOST_WIDTH}"
    if g.shape[1] == 0:
        return "no rows"
    return None


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kda.chunk`."""
    out, last = _Chunk.apply(q, k, v, g, beta, state, bounded(lower_bound), cu_seqlens)
    return out, last


def _chunks(k: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    B, T = k.shape[:2]
    if cu_seqlens is None:
        return chunks_of_rows(B, -(-T // C))
    return packed_chunks(cu_seqlens, T)


def _rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, factored: bool) -> Rows:
    return Rows(dense_rows(q), dense_rows(k), dense_rows(v), dense_rows(g), beta, factored)


class _Chunk(torch.autograd.Function):
    """Keeps the inputs only; the backward makes everything else again."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, factored, cu_seqlens):  # type: ignore[no-untyped-def]
        rows = _rows(q, k, v, g, beta, factored)
        state = state.contiguous()
        chunks, how = _chunks(k, cu_seqlens), arithmetic_for(q, k, v)
        made = within(rows, chunks, how, keeps=False)
        result = carry(rows, made, chunks, state, how, reads=True, keeps=None)
        ctx.save_for_backward(q, k, v, g, beta, state, cu_seqlens)
        ctx.factored = factored
        return result.out, result.last

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlast):  # type: ignore[no-untyped-def]
        q, k, v, g, beta, state, cu_seqlens = ctx.saved_tensors
        rows = _rows(q, k, v, g, beta, ctx.factored)
        chunks, how = _chunks(k, cu_seqlens), arithmetic_for(q, k, v)
        made, carried = again(rows, chunks, state, how, how.dtype)
        found = backward(rows, made, carried, chunks, how, dense_rows(dout), dlast.contiguous())
        return found.dq, found.dk, found.dv, found.dg, found.dbeta, found.dstate, None, None
