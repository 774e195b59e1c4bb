"""Launches of the backward of chunked KDA: the pass back over the chunks, then each chunk.

Nothing of the forward is kept but its inputs: `within` and `carry` are run again, this time keeping
the inverse, the entering states and the updates of every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dspark_kernels.kda_carry_triton import pass_back_kernel
from dspark_kernels.kda_grads_triton import couplings_kernel, rows_kernel
from dspark_kernels.kda_launch_triton import (
    MOST_WIDTH,
    Arithmetic,
    C,
    Carried,
    Chunks,
    Rows,
    Within,
    at_most,
    carry,
    launch_of,
    within,
)


@dataclass(frozen=True)
class More:
    """What else flows back into a chunk, float32: to its updates [N, H, C, V], its entering state
    [N, H, K, V], its keys and log-decays [N, H, C, K]."""

    dU: Tensor
    dS: Tensor
    dk: Tensor
    dg: Tensor


@dataclass(frozen=True)
class Gradients:
    """[B, T, H, *] in the dtypes of the inputs, dbeta [B, T, H], dstate [S, H, K, V]."""

    dq: Tensor | None
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dstate: Tensor


def again(
    rows: Rows, chunks: Chunks, state: Tensor, how: Arithmetic, states: torch.dtype
) -> tuple[Within, Carried]:
    """The forward, with everything kept that the backward reads."""
    made = within(rows, chunks, how, keeps=True)
    return made, carry(rows, made, chunks, state, how, reads=False, keeps=states, ends=False)


def backward(
    rows: Rows,
    made: Within,
    carried: Carried,
    chunks: Chunks,
    how: Arithmetic,
    dout: Tensor | None,
    dlast: Tensor | None,
    more: More | None = None,
) -> Gradients:
    """Gradients of all inputs from those of the outputs, the last states and ``more``."""
    dU, dstates, dstate = _carry_back(rows, made, chunks, how, dout, dlast, more)
    return _gradients(rows, made, carried, chunks, how, dout, dU, dstates, dstate, more)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:3])


def _carry_back(
    rows: Rows,
    made: Within,
    chunks: Chunks,
    how: Arithmetic,
    dout: Tensor | None,
    dlast: Tensor | None,
    more: More | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dU [N, H, C, V], gradients of the states leaving chunks [N, H, K, V], of those entering
    sequences [S, H, K, V]."""
    _, T, H, K, V = rows.sizes
    launch = launch_of("carry_back", how, K, V)
    new, packed = rows.v.new_empty, chunks.where is not None
    dU = new((chunks.N, H, C, V), dtype=how.dtype)
    dstates = new((chunks.N, H, K, V), dtype=how.dtype)
    dstate = new((chunks.sequences, H, K, V), dtype=torch.float32)
    reads = dout if dout is not None else rows.v
    pass_back_kernel[(chunks.sequences * H * triton.cdiv(V, launch.values),)](
        made.w, made.Qd, made.Ke, made.P, made.end, reads,
        dstate if dlast is None else dlast, dstates, dU, dstate,
        dU if more is None else more.dU, dU if more is None else more.dS,
        chunks.bounds if packed else made.end, chunks.firsts if packed else made.end,
        T, chunks.per_row, H, *_strides(reads),
        K=K, V=V, BK=at_most(MOST_WIDTH, K), BV=launch.values, C=C,
        READS=dout is not None, LAST=dlast is not None, MORE=more is not None, PACKED=packed,
        PRECISION=how.products, STAGES=launch.stages, **launch.options,
    )  # fmt: skip
    return dU, dstates, dstate


def _gradients(
    rows: Rows,
    made: Within,
    carried: Carried,
    chunks: Chunks,
    how: Arithmetic,
    dout: Tensor | None,
    dU: Tensor,
    dstates: Tensor,
    dstate: Tensor,
    more: More | None,
) -> Gradients:
    """Each chunk by itself, first its couplings, then its rows."""
    B, T, H, K, V = rows.sizes
    new, packed, N = rows.v.new_empty, chunks.where is not None, chunks.N
    where = chunks.where if chunks.where is not None else made.end
    reads, q = (rows.v, rows.k) if dout is None else (dout, rows.q)
    assert q is not None
    launch = launch_of("couplings", how, K, V)
    dZ = new((N, H, C, V), dtype=how.dtype)
    dP, dA = (new((N, H, C, C), dtype=how.dtype) for _ in range(2))
    dv = new((B, T, H, V))
    tiles = triton.cdiv(K, launch_of("rows", how, K, V).keys)
    dbeta = new((1 + tiles, B, T, H), dtype=torch.float32)
    couplings_kernel[(N * H,)](
        rows.v, rows.beta, reads, made.M, carried.U, dU, where, dZ, dv, dP, dA, dbeta,
        T, chunks.per_row, H, *_strides(rows.v, rows.beta, reads),
        V=V, BV=launch.values, C=C, READS=dout is not None, PACKED=packed,
        PRECISION=how.products, **launch.options,
    )  # fmt: skip
    launch = launch_of("rows", how, K, V)
    dk, dg = (new((B, T, H, K), dtype=x.dtype) for x in (rows.k, rows.g))
    dq = dk if dout is None else torch.empty_like(dk, dtype=q.dtype)
    rows_kernel[(N * H * tiles,)](
        q, rows.k, rows.g, rows.beta, reads, carried.states, dstates, carried.U, dZ, dP, dA,
        made.end, dk if more is None else more.dk, dg if more is None else more.dg, where,
        dq, dk, dg, dbeta[1:],
        T, chunks.per_row, H, B * T * H, *_strides(q, rows.k, rows.g, rows.beta, reads),
        K=K, V=V, BK=launch.keys, BV=launch.values, C=C,
        BOUNDED=rows.bounded, READS=dout is not None, MORE=more is not None, PACKED=packed,
        PRECISION=how.products, PARTS=how.parts, **launch.options,
    )  # fmt: skip
    dbeta = dbeta.sum(0).to(rows.beta.dtype)
    return Gradients(None if dout is None else dq, dk, dv, dg, dbeta, dstate)
