"""The backward kernels of `block_attention`: what blocks see of themselves, d k and d v, then d q.

    P = exp(scale q K^T - lse), delta = sum dO O, dS = P (dO V^T - delta)
    dV = P^T dO, dK = scale dS^T q, dQ = scale dS K

`d_keys` forms P and dS once and leaves dS, in the half precision its products take it in, for
`d_queries`: five products, and as nothing is added by atomics, the same numbers every time.
Programs are of a pair of batch row and key head (`group`), the tiles with most work first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.block_attention_tiles_triton import (
    key_rows,
    query_rows,
    row_anchors,
    seen_context,
    seen_own,
    slot_span,
    tile_rows,
    tile_span,
)


@triton.jit(do_not_specialize=["length"])
def d_blocks(  # type: ignore[no-untyped-def]
    q, keys, values, gradient, out, lse, norm, delta, dk, dv, ds_own, count, length, height, scale,
    H: tl.constexpr, J: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, CAUSAL: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """TAKEN whole blocks in one step: delta, d k and d v of their own keys, and d s of these.

    lse is written again as `norm`, by group as the rows of `d_keys` are, and infinite for rows that
    are not there: they get no probability.
    """
    group, start = tl.program_id(0), tl.program_id(1) * (TAKEN * G)
    batch, head = group // J, group % J
    slot, query, inside = tile_rows(start, head, count, SHARED, P, ROWS)
    row = tl.arange(0, ROWS)
    whole = row < TAKEN * G * P
    inside = inside & whole
    g_tile = query_rows(gradient, batch, slot, query, count, H, D)
    o_tile = query_rows(out, batch, slot, query, count, H, D)
    q_tile = query_rows(q, batch, slot, query, count, H, D)
    at = (batch.to(tl.int64) * count + slot) * H + query
    top = tl.load(lse + at, mask=inside, other=float("inf"))
    own = start + tl.arange(0, KEYS)
    k = key_rows(keys, batch, length + own, head, length + count, J, D)
    v = key_rows(values, batch, length + own, head, length + count, J, D)
    dot = tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    seen = seen_own(own[None, :], slot[:, None], G, CAUSAL) & inside[:, None]
    p = tl.exp2(tl.dot(q_tile, tl.trans(k)) * (scale * 1.4426950408889634) - top[:, None])
    p = tl.where(seen, p, 0.0)
    d_value = tl.dot(tl.trans(p.to(q_tile.dtype)), g_tile)
    ds = (p * (tl.dot(g_tile, tl.trans(v)) - dot[:, None])).to(q_tile.dtype)
    d_key = tl.dot(tl.trans(ds), q_tile) * scale
    row = start * P + row
    kept = whole & (row < height)
    to = group.to(tl.int64) * height + row
    tl.store(delta + to, dot, mask=kept)
    tl.store(norm + to, top, mask=kept)
    same = seen_own(own[None, :], slot[:, None], G, False) & inside[:, None]
    tl.store(ds_own + to[:, None] * G + (own % G)[None, :], ds, mask=same)
    at = (batch.to(tl.int64) * (length + count) + length + own) * J + head
    where = at[:, None] * D + tl.arange(0, D)[None, :]
    stored = ((own < start + TAKEN * G) & (own < count))[:, None]
    tl.store(dk + where, d_key.to(dk.dtype.element_ty), mask=stored)
    tl.store(dv + where, d_value.to(dv.dtype.element_ty), mask=stored)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    acc_k, acc_v, place, head, row, q, gradient, norm, delta, k, v, seen, power,
    D: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of d k, before its scale, and of d v; d s. Scores have a row for every key: P and
    dS are then what products take from registers."""
    q_tile = tl.reshape(q.load([place, head, 0]), (ROWS, D))
    g_tile = tl.reshape(gradient.load([place, head, 0]), (ROWS, D))
    norm_row, dot = norm.load([row]), delta.load([row])
    scores, dp = tl.dot(k, tl.trans(q_tile)), tl.dot(v, tl.trans(g_tile))
    p = tl.exp2(scores * power - norm_row[None, :])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    acc_v = tl.dot(p.to(g_tile.dtype), g_tile, acc_v)
    ds = (p * (dp - dot[None, :])).to(q_tile.dtype)
    return tl.dot(ds, q_tile, acc_k), acc_v, tl.trans(ds)


@triton.jit(do_not_specialize=["length", "start"])
def d_keys(  # type: ignore[no-untyped-def]
    q, keys, values, anchors, lengths, gradient, norm, delta, dk, dv, ds_seen, count, length,
    height, start, scale, H: tl.constexpr, J: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A tile of context keys, over the slots that see some of it. Early ones are seen most.

    q, gradient, norm, delta and `ds_seen` are descriptors of tiles; the latter begins with group
    `start`.
    """
    group, tile = start + tl.program_id(0), tl.program_id(1)
    batch, head = group // J, group % J
    there, everything = tl.load(lengths + batch), length + count
    key = tile * KEYS + tl.arange(0, KEYS)
    taken: tl.constexpr = ROWS // P
    first, whole, last = slot_span(anchors, batch, count // G, there, tile * KEYS, G, W, KEYS)
    bare, power = (whole + taken - 1) // taken, scale * 1.4426950408889634
    k = key_rows(keys, batch, key, head, everything, J, D)
    v = key_rows(values, batch, key, head, everything, J, D)
    acc_k, acc_v = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, D), tl.float32)
    query, base, to = head * SHARED, group * height, tl.program_id(0) * height
    for at in tl.range(first // taken, bare):
        slot, _, inside = tile_rows(at * taken, head, count, SHARED, P, ROWS)
        anchor = row_anchors(anchors, batch, count, slot, inside, G)
        seen = seen_context(key[:, None], anchor[None, :], there, W)
        acc_k, acc_v, ds = _step(
            acc_k, acc_v, batch * count + at * taken, query, base + at * ROWS, q, gradient, norm,
            delta, k, v, seen, power, D, ROWS, True,
        )  # fmt: skip
        ds_seen.store([to + at * ROWS, tile * KEYS], ds)
    for at in tl.range(bare, (last + taken - 1) // taken):
        acc_k, acc_v, ds = _step(
            acc_k, acc_v, batch * count + at * taken, query, base + at * ROWS, q, gradient, norm,
            delta, k, v, True, power, D, ROWS, False,
        )  # fmt: skip
        ds_seen.store([to + at * ROWS, tile * KEYS], ds)
    at = (batch.to(tl.int64) * everything + key) * J + head
    where = at[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk + where, (acc_k * scale).to(dk.dtype.element_ty), mask=(key < length)[:, None])
    tl.store(dv + where, acc_v.to(dv.dtype.element_ty), mask=(key < length)[:, None])


@triton.jit
def _seen(tile, key, anchor, there, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """d s of context keys that rows see; what `d_keys` did not visit it did not write."""
    return tl.where(seen_context(key[None, :], anchor[:, None], there, W), tile, 0.0)


@triton.jit(do_not_specialize=["length", "start"])
def d_queries(  # type: ignore[no-untyped-def]
    keys, anchors, lengths, ds_seen, ds_own, dq, count, length, height, start, scale,
    H: tl.constexpr, J: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """d q = scale d s K of a tile of queries; `keys` and `ds_seen` are descriptors of tiles."""
    group, tile = start + tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    batch, head = group // J, group % J
    there = tl.load(lengths + batch)
    slot, query, inside = tile_rows(tile * (ROWS // P), head, count, SHARED, P, ROWS)
    anchor = row_anchors(anchors, batch, count, slot, inside, G)
    begin, bare, whole, end, first, last = tile_span(slot, inside, anchor, there, G, W, KEYS)
    acc, lane = tl.zeros((ROWS, D), tl.float32), tl.arange(0, KEYS)
    row, place, column = tile * ROWS, batch * (length + count), head * D
    to = tl.program_id(0) * height + row
    if W > 0:
        for at in tl.range(begin, bare, KEYS):
            ds = _seen(ds_seen.load([to, at]), at + lane, anchor, there, W)
            acc = tl.dot(ds, keys.load([place + at, column]), acc)
    for at in tl.range(bare, whole, KEYS):
        acc = tl.dot(ds_seen.load([to, at]), keys.load([place + at, column]), acc)
    for at in tl.range(whole, end, KEYS):
        ds = _seen(ds_seen.load([to, at]), at + lane, anchor, there, W)
        acc = tl.dot(ds, keys.load([place + at, column]), acc)
    own = ds_own + (group.to(tl.int64) * height + row + tl.arange(0, ROWS))[:, None] * G
    for at in tl.range(first, last, KEYS):
        key = at + lane
        same = seen_own(key[None, :], slot[:, None], G, False) & inside[:, None]
        ds = tl.load(own + (key % G)[None, :], mask=same, other=0.0)
        acc = tl.dot(ds, keys.load([place + length + at, column]), acc)
    at = (batch.to(tl.int64) * count + slot) * H + query
    result = (acc * scale).to(dq.dtype.element_ty)
    tl.store(dq + at[:, None] * D + tl.arange(0, D)[None, :], result, mask=inside[:, None])
