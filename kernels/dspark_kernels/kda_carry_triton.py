"""The state of KDA carried over the chunks of a sequence, forward and backward.

One program per sequence, head and tile of values keeps the state in registers, transposed, [V, K]:
then it and the updates are left factors, which the matrix units take from registers, and only what
comes from memory is staged. `kda_within_triton` has made w, u, Qd, Ke, P and exp(G_32) of every
chunk; with the entering state S

    U = u - w S ;  O = Qd S + P U ;  S' = exp(G_32) S + Ke^T U

and backward, from the gradients dO and dS':

    dU = P^T dO + Ke dS' ;  dS = exp(G_32) dS' + Qd^T dO - w^T dU

States and updates of all chunks are kept where someone asks for them: gradients, states at
positions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.kda_within_triton import dot


@triton.jit
def chunks_of(sequence, bounds, table, T, per_row, PACKED: tl.constexpr):
    """First chunk, number of chunks, batch row, first row and rows of a sequence."""
    if PACKED:
        first = tl.load(table + sequence)
        start = tl.load(bounds + sequence)
        rows = tl.load(bounds + sequence + 1) - start
        count, batch = tl.load(table + sequence + 1) - first, sequence * 0
    else:  # no second return: one type each, whichever way the kernel was compiled
        first, start, count, batch, rows = sequence * per_row, sequence * 0, per_row, sequence, T
    return first, count, batch, start, rows


@triton.jit
def tile_of(x, r, columns, width):
    """[C, columns] of a chunk's own tile."""
    here = (columns < width)[None, :]
    return tl.load(x + r[:, None] * width + columns[None, :], mask=here, other=0.0)


@triton.jit
def across(x, r, columns, width):
    """The same transposed, [columns, C]."""
    here = (columns < width)[:, None]
    return tl.load(x + r[None, :] * width + columns[:, None], mask=here, other=0.0)


@triton.jit(do_not_specialize=["T", "per_row"])
def pass_kernel(
    w, u, Qd, Ke, P, end, state, out, last, states, U, bounds, table,
    T, per_row, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    READS: tl.constexpr, KEEPS: tl.constexpr, LAST: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // tiles // H, program // tiles % H
    chunk, count, batch, start, rows = chunks_of(sequence, bounds, table, T, per_row, PACKED)
    r, key, value = tl.arange(0, C), tl.arange(0, BK), program % tiles * BV + tl.arange(0, BV)
    of_state = key[None, :] * V + value[:, None]
    inside = (key < K)[None, :] & (value < V)[:, None]
    place = (sequence * H + head) * K * V
    S = tl.load(state + place + of_state, mask=inside, other=0.0).to(tl.float32)
    out += ((batch * T + start) * H + head) * V
    for n in tl.range(0, count, num_stages=STAGES):
        tile = (chunk + n) * H + head
        if KEEPS:
            tl.store(states + tile * K * V + of_state, S.to(states.dtype.element_ty), mask=inside)
        ws = tile_of(w + tile * C * K, r, key, K)
        Us = across(u + tile * C * V, r, value, V).to(tl.float32)
        Us -= dot(S, tl.trans(ws), PRECISION)
        if KEEPS:
            at = U + tile * C * V + r[None, :] * V + value[:, None]
            tl.store(at, Us.to(U.dtype.element_ty), mask=(value < V)[:, None])
        if READS:
            read = dot(S, tl.trans(tile_of(Qd + tile * C * K, r, key, K)), PRECISION)
            read += dot(Us, tl.trans(tile_of(P + tile * C * C, r, r, C)), PRECISION)
            t = n * C + r
            at = out + t[None, :].to(tl.int64) * H * V + value[:, None]
            here = (t < rows)[None, :] & (value < V)[:, None]
            tl.store(at, read.to(out.dtype.element_ty), mask=here)
        decay = tl.load(end + tile * K + key, mask=key < K, other=0.0)
        S = S * decay[None, :] + dot(Us, tile_of(Ke + tile * C * K, r, key, K), PRECISION)
    if LAST:
        tl.store(last + place + of_state, S.to(last.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "per_row"])
def pass_back_kernel(
    w, Qd, Ke, P, end, dout, dlast, dstates, dU, dstate, more_dU, more_dS, bounds, table,
    T, per_row, H, o_batch, o_row, o_head,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    READS: tl.constexpr, LAST: tl.constexpr, MORE: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // tiles // H, program // tiles % H
    chunk, count, batch, start, rows = chunks_of(sequence, bounds, table, T, per_row, PACKED)
    r, key, value = tl.arange(0, C), tl.arange(0, BK), program % tiles * BV + tl.arange(0, BV)
    of_state = key[None, :] * V + value[:, None]
    inside = (key < K)[None, :] & (value < V)[:, None]
    place = (sequence * H + head) * K * V
    dS = tl.zeros([BV, BK], tl.float32)
    if LAST:
        dS = tl.load(dlast + place + of_state, mask=inside, other=0.0).to(tl.float32)
    dout += batch * o_batch + start * o_row + head * o_head
    for m in tl.range(0, count, num_stages=STAGES):
        n = count - 1 - m
        tile = (chunk + n) * H + head
        of_value = tile * C * V + r[None, :] * V + value[:, None]
        tl.store(dstates + tile * K * V + of_state, dS.to(dstates.dtype.element_ty), mask=inside)
        decay = tl.load(end + tile * K + key, mask=key < K, other=0.0)
        dUs = dot(dS, tl.trans(tile_of(Ke + tile * C * K, r, key, K)), PRECISION)
        dS *= decay[None, :]
        if READS:
            t = n * C + r
            here = (t < rows)[None, :] & (value < V)[:, None]
            at = dout + t[None, :].to(tl.int64) * o_row + value[:, None]
            dO = tl.load(at, mask=here, other=0.0)
            dUs += dot(dO, tile_of(P + tile * C * C, r, r, C), PRECISION)
            dS += dot(dO, tile_of(Qd + tile * C * K, r, key, K), PRECISION)
        if MORE:
            dUs += tl.load(more_dU + of_value, mask=(value < V)[:, None], other=0.0)
            dS += tl.load(more_dS + tile * K * V + of_state, mask=inside, other=0.0)
        tl.store(dU + of_value, dUs.to(dU.dtype.element_ty), mask=(value < V)[:, None])
        dS -= dot(dUs, tile_of(w + tile * C * K, r, key, K), PRECISION)
    tl.store(dstate + place + of_state, dS.to(dstate.dtype.element_ty), mask=inside)
