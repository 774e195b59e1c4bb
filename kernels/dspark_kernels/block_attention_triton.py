"""Triton kernels of `block_attention`, forward and backward.

A tile of queries is a run of slots times the query heads that share a key head. Forward and d q go
over the context up to the largest anchor of the tile, without a mask up to the smallest, then over
the tile's own blocks. d k and d v go the other way: a tile of keys over the slots that see it.
Exponents are to base 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark_kernels.block_attention_back_triton import d_keys, d_queries
from dspark_kernels.block_attention_tiles_triton import (
    key_rows,
    query_rows,
    seen_keys,
    tile_rows,
    tile_span,
)

ROWS, KEYS, WARPS, STAGES = 64, 64, 4, 3
"""Forward: rows of a query tile, keys of a step. (Chosen on an H200, 512 anchors of 7 slots.)"""
DQ_ROWS, DQ_KEYS, DQ_WARPS, DQ_STAGES = 128, 64, 8, 3
DK_ROWS, DK_KEYS, DK_WARPS, DK_STAGES = 64, 64, 4, 2
"""The two backward kernels; of DK, `KEYS` is the tile that stays and `ROWS` the step."""
LOG2E = 1.4426950408889634


def refuses(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    slots: int,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> str | None:
    """Why the kernels do not take these, or None."""
    del anchors, lengths, slots, scale, window, causal
    if max(x[0].numel() for x in (q, keys)) >= 2**31:
        return "more than 2^31 numbers in a row"
    half = (torch.bfloat16, torch.float16)
    if q.dtype not in half or keys.dtype != q.dtype or values.dtype != q.dtype:
        return f"{q.dtype}, {keys.dtype} and {values.dtype}: one half precision is needed"
    if q.shape[-1] not in (16, 32, 64, 128) or values.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} and {values.shape[-1]} channels"
    if q.shape[2] // keys.shape[2] > 16:
        return "more than 16 query heads to a key head"
    return None


def block_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    slots: int,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """See `block_attention.block_attention`."""
    places = anchors.to(torch.int32).contiguous(), lengths.to(torch.int32).contiguous()
    out: Tensor = _BlockAttention.apply(
        q.contiguous(), keys.contiguous(), values.contiguous(), *places, slots, scale, window,
        causal,
    )  # fmt: skip
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, anchors: Tensor, lengths: Tensor,
        slots: int, scale: float, window: int | None, causal: bool,
    ) -> Tensor:  # fmt: skip
        batch, count, heads, _ = q.shape
        shared = heads // keys.shape[2]
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        shape = _shape(q, keys, slots, window, causal)
        grid = (triton.cdiv(count, ROWS // shared), batch * keys.shape[2])
        _forward[grid](
            q, keys, values, anchors, lengths, out, lse, count, keys.shape[1] - count,
            scale * LOG2E, **shape, ROWS=ROWS, KEYS=KEYS, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        ctx.save_for_backward(q, keys, values, anchors, lengths, out, lse)
        ctx.options = slots, scale, window, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, anchors, lengths, out, lse = ctx.saved_tensors
        slots, scale, window, causal = ctx.options
        batch, count, heads, _ = q.shape
        length, shared = keys.shape[1] - count, heads // keys.shape[2]
        gradient = gradient.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(keys), torch.empty_like(values)
        delta = torch.empty_like(lse)
        shape = _shape(q, keys, slots, window, causal)
        tensors = q, keys, values, anchors, lengths, gradient, lse, delta
        grid = (triton.cdiv(count, DQ_ROWS // shared), batch * keys.shape[2])
        d_queries[grid](
            *tensors, out, dq, count, length, scale, **shape,
            ROWS=DQ_ROWS, KEYS=DQ_KEYS, num_warps=DQ_WARPS, num_stages=DQ_STAGES,
        )  # fmt: skip
        for own, rows in ((False, length), (True, count)):
            grid = (triton.cdiv(rows, DK_KEYS), batch * keys.shape[2])
            d_keys[grid](
                *tensors, dk, dv, count, length, scale, **shape, OWN=own,
                ROWS=DK_ROWS, KEYS=DK_KEYS, num_warps=DK_WARPS, num_stages=DK_STAGES,
            )  # fmt: skip
        return dq, dk, dv, *[None] * 6


def _shape(q: Tensor, keys: Tensor, slots: int, window: int | None, causal: bool) -> dict[str, Any]:
    """Constants of all kernels."""
    heads, key_heads = q.shape[2], keys.shape[2]
    return {
        "H": heads, "J": key_heads, "SHARED": heads // key_heads, "G": slots, "D": q.shape[3],
        "W": window or 0, "CAUSAL": causal,
    }  # fmt: skip


@triton.jit
def _read(acc, top, total, q, k, v, seen, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of the running softmax."""
    scores = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        scores = tl.where(seen, scores, -1e38)
    higher = tl.maximum(top, tl.max(scores, 1))
    p, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, higher, total * shrink + tl.sum(p, 1)


@triton.jit(do_not_specialize=["length"])
def _forward(  # type: ignore[no-untyped-def]
    q, keys, values, anchors, lengths, out, lse, count, length, scale, H: tl.constexpr,
    J: tl.constexpr, SHARED: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Late tiles see the most and go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // J, tl.program_id(1) % J
    there = tl.load(lengths + batch)
    slot, query_head, inside, anchor = tile_rows(tile, head, anchors, batch, count, SHARED, G, ROWS)
    q_tile = query_rows(q, batch, slot, query_head, count, H, D)
    start, bare, whole, end, first, last = tile_span(slot, inside, anchor, there, G, W, KEYS)
    acc, total = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), -1e30, tl.float32)
    lane, everything = tl.arange(0, KEYS), length + count
    if W > 0:
        for at in tl.range(start, bare, KEYS):
            key = at + lane
            k = key_rows(keys, batch, key, head, everything, J, D)
            v = key_rows(values, batch, key, head, everything, J, D)
            seen = seen_keys(
                key[None, :], slot[:, None], anchor[:, None], there, length, False, G, W, CAUSAL
            )
            acc, top, total = _read(acc, top, total, q_tile, k, v, seen, scale, True)
    for at in tl.range(bare, whole, KEYS):
        key = at + lane
        k = key_rows(keys, batch, key, head, everything, J, D)
        v = key_rows(values, batch, key, head, everything, J, D)
        acc, top, total = _read(acc, top, total, q_tile, k, v, True, scale, False)
    for at in tl.range(whole, end, KEYS):
        key = at + lane
        k = key_rows(keys, batch, key, head, everything, J, D)
        v = key_rows(values, batch, key, head, everything, J, D)
        seen = seen_keys(
            key[None, :], slot[:, None], anchor[:, None], there, length, False, G, W, CAUSAL
        )
        acc, top, total = _read(acc, top, total, q_tile, k, v, seen, scale, True)
    for at in tl.range(first, last, KEYS):
        key = length + at + lane
        k = key_rows(keys, batch, key, head, everything, J, D)
        v = key_rows(values, batch, key, head, everything, J, D)
        seen = seen_keys(
            key[None, :], slot[:, None], anchor[:, None], there, length, True, G, W, CAUSAL
        )
        acc, top, total = _read(acc, top, total, q_tile, k, v, seen, scale, True)
    at = (batch.to(tl.int64) * count + slot) * H + query_head
    d = tl.arange(0, D)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * D + d[None, :], result, mask=inside[:, None])
    tl.store(lse + at, top + tl.log2(total), mask=inside)
