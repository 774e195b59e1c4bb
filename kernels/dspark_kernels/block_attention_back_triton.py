"""The backward kernels of `block_attention`: d q by tiles of queries, d k and d v by tiles of keys.

The scores are formed in both (seven products, not five), and so there are no atomics: the same
numbers every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.block_attention_tiles_triton import (
    key_rows,
    query_rows,
    seen_keys,
    slot_span,
    tile_rows,
    tile_span,
)


@triton.jit
def _probabilities(q, k, lse, seen, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def _add_dq(dq, q, k, v, gradient, lse, delta, seen, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of d q, before its scale."""
    p = _probabilities(q, k, lse, seen, scale, MASKED)
    ds = p * (tl.dot(gradient, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["length"])
def d_queries(  # type: ignore[no-untyped-def]
    q, keys, values, anchors, lengths, gradient, lse, delta, out, dq, count, length, scale,
    H: tl.constexpr, J: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // J, tl.program_id(1) % J
    there = tl.load(lengths + batch)
    slot, query_head, inside, anchor = tile_rows(tile, head, anchors, batch, count, SHARED, G, ROWS)
    q_tile = query_rows(q, batch, slot, query_head, count, H, D)
    g_tile = query_rows(gradient, batch, slot, query_head, count, H, D)
    o_tile = query_rows(out, batch, slot, query_head, count, H, D)
    row = (batch.to(tl.int64) * count + slot) * H + query_head
    dot = tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    tl.store(delta + row, dot, mask=inside)
    norm = tl.load(lse + row, mask=inside, other=0.0)
    start, bare, whole, end, first, last = tile_span(slot, inside, anchor, there, G, W, KEYS)
    acc = tl.zeros((ROWS, D), tl.float32)
    lane, everything, power = tl.arange(0, KEYS), length + count, scale * 1.4426950408889634
    if W > 0:
        for at in tl.range(start, bare, KEYS):
            key = at + lane
            k = key_rows(keys, batch, key, head, everything, J, D)
            v = key_rows(values, batch, key, head, everything, J, D)
            seen = seen_keys(
                key[None, :], slot[:, None], anchor[:, None], there, length, False, G, W, CAUSAL
            )
            acc = _add_dq(acc, q_tile, k, v, g_tile, norm, dot, seen, power, True)
    for at in tl.range(bare, whole, KEYS):
        key = at + lane
        k = key_rows(keys, batch, key, head, everything, J, D)
        v = key_rows(values, batch, key, head, everything, J, D)
        acc = _add_dq(acc, q_tile, k, v, g_tile, norm, dot, True, power, False)
    for at in tl.range(whole, end, KEYS):
        key = at + lane
        k = key_rows(keys, batch, key, head, everything, J, D)
        v = key_rows(values, batch, key, head, everything, J, D)
        seen = seen_keys(
            key[None, :], slot[:, None], anchor[:, None], there, length, False, G, W, CAUSAL
        )
        acc = _add_dq(acc, q_tile, k, v, g_tile, norm, dot, seen, power, True)
    for at in tl.range(first, last, KEYS):
        key = length + at + lane
        k = key_rows(keys, batch, key, head, everything, J, D)
        v = key_rows(values, batch, key, head, everything, J, D)
        seen = seen_keys(
            key[None, :], slot[:, None], anchor[:, None], there, length, True, G, W, CAUSAL
        )
        acc = _add_dq(acc, q_tile, k, v, g_tile, norm, dot, seen, power, True)
    d = tl.arange(0, D)
    result = (acc * scale).to(dq.dtype.element_ty)
    tl.store(dq + row[:, None] * D + d[None, :], result, mask=inside[:, None])


@triton.jit
def _add_dk(  # type: ignore[no-untyped-def]
    acc_k, acc_v, q, gradient, k, v, norm, dot, seen, power, MASKED: tl.constexpr
):  # fmt: skip
    """One step of d k, before its scale, and of d v. Scores have a row for every query: what is
    known of queries is then a number a thread, not one of every column."""
    p = _probabilities(q, k, norm, seen, power, MASKED)
    acc_v = tl.dot(tl.trans(p.to(gradient.dtype)), gradient, acc_v)
    ds = p * (tl.dot(gradient, tl.trans(v)) - dot[:, None])
    return tl.dot(tl.trans(ds.to(q.dtype)), q, acc_k), acc_v


@triton.jit(do_not_specialize=["length"])
def d_keys(  # type: ignore[no-untyped-def]
    q, keys, values, anchors, lengths, gradient, lse, delta, dk, dv, count, length, scale,
    H: tl.constexpr, J: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    batch, head = tl.program_id(1) // J, tl.program_id(1) % J
    there = tl.load(lengths + batch)
    place = tile * KEYS + tl.arange(0, KEYS)
    taken: tl.constexpr = ROWS // SHARED
    if OWN:
        key, limit = length + place, count
        first = tl.min(place, 0) // G * G
        last = tl.minimum(tl.max(place, 0) // G * G + G, count)
        whole = last
    else:
        key, limit = place, length
        first, whole, last = slot_span(anchors, batch, count // G, there, tile * KEYS, G, W, KEYS)
    everything, power = length + count, scale * 1.4426950408889634
    k = key_rows(keys, batch, key, head, everything, J, D)
    v = key_rows(values, batch, key, head, everything, J, D)
    acc_k, acc_v = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, D), tl.float32)
    bare = (whole + taken - 1) // taken
    for at in tl.range(first // taken, bare):
        slot, query, inside, anchor = tile_rows(at, head, anchors, batch, count, SHARED, G, ROWS)
        q_tile = query_rows(q, batch, slot, query, count, H, D)
        g_tile = query_rows(gradient, batch, slot, query, count, H, D)
        row = (batch.to(tl.int64) * count + slot) * H + query
        norm = tl.load(lse + row, mask=inside, other=float("inf"))
        dot = tl.load(delta + row)
        seen = seen_keys(
            key[None, :], slot[:, None], anchor[:, None], there, length, OWN, G, W, CAUSAL
        )
        acc_k, acc_v = _add_dk(acc_k, acc_v, q_tile, g_tile, k, v, norm, dot, seen, power, True)
    # Rows that are not there have no probability, and keys past the end are not stored.
    for at in tl.range(bare, (last + taken - 1) // taken):
        slot, query, inside, anchor = tile_rows(at, head, anchors, batch, count, SHARED, G, ROWS)
        q_tile = query_rows(q, batch, slot, query, count, H, D)
        g_tile = query_rows(gradient, batch, slot, query, count, H, D)
        row = (batch.to(tl.int64) * count + slot) * H + query
        norm = tl.load(lse + row, mask=inside, other=float("inf"))
        dot = tl.load(delta + row)
        acc_k, acc_v = _add_dk(acc_k, acc_v, q_tile, g_tile, k, v, norm, dot, True, power, False)
    at = (batch.to(tl.int64) * everything + key) * J + head
    d = tl.arange(0, D)
    where, stored = at[:, None] * D + d[None, :], (place < limit)[:, None]
    tl.store(dk + where, (acc_k * scale).to(dk.dtype.element_ty), mask=stored)
    tl.store(dv + where, acc_v.to(dv.dtype.element_ty), mask=stored)
