"""Triton kernels of `block_attention`, forward and backward.

A tile of queries is a run of slots times the query heads that share a key head. The forward kernel
goes over the context up to the largest anchor of the tile, without a mask up to the smallest, then
over the tile's own blocks. Exponents are to base 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from dspark_kernels.block_attention_back_triton import d_blocks, d_keys, d_queries
from dspark_kernels.block_attention_tiles_triton import (
    query_rows,
    row_anchors,
    seen_context,
    seen_own,
    tile_rows,
    tile_span,
)

ROWS, KEYS, WARPS, STAGES = 64, 64, 4, 3
"""Forward: rows of a query tile, keys of a step. (Chosen on an H200, 512 anchors of 7 slots.)"""
OWN_ROWS, OWN_WARPS = 64, 4
"""Backward within blocks: rows of a tile at least."""
DK_ROWS, DK_KEYS, DK_WARPS, DK_STAGES = 32, 64, 4, 3
DQ_ROWS, DQ_KEYS, DQ_WARPS, DQ_STAGES = 64, 64, 4, 4
"""The other backward kernels; of DK, `KEYS` is the tile that stays and `ROWS` the step."""
DS_BYTES = 2**30
"""What d s takes at most, but for one key head of one row: `d_keys` and `d_queries` alternate."""
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
    del anchors, lengths, window, causal
    if max(x[0].numel() for x in (q, keys)) >= 2**31:
        return "more than 2^31 numbers in a row"
    half = (torch.bfloat16, torch.float16)
    if q.dtype not in half or keys.dtype != q.dtype or values.dtype != q.dtype:
        return f"{q.dtype}, {keys.dtype} and {values.dtype}: one half precision is needed"
    if q.shape[-1] not in (16, 32, 64, 128) or values.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} and {values.shape[-1]} channels"
    if q.shape[2] // keys.shape[2] > 16:
        return "more than 16 query heads to a key head"
    if (rows := slots * triton.next_power_of_2(q.shape[2] // keys.shape[2])) > 128:
        return f"blocks of {slots} slots: {rows} rows to a key head are more than 128"
    if scale <= 0:
        return f"a scale of {scale}: more than 0 is needed"
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
        batch, count = q.shape[:2]
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        shape = _shape(q, keys, slots)
        grid = batch * keys.shape[2], triton.cdiv(count * shape["P"], ROWS)
        _forward[grid](
            q, _key_tiles(keys, KEYS), _key_tiles(values, KEYS), anchors, lengths, out, lse, count,
            keys.shape[1] - count, scale * LOG2E, **shape, W=window or 0, CAUSAL=causal,
            ROWS=ROWS, KEYS=KEYS, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        ctx.save_for_backward(q, keys, values, anchors, lengths, out, lse)
        ctx.options = slots, scale, window or 0, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, anchors, lengths, out, lse = ctx.saved_tensors
        slots, scale, window, causal = ctx.options
        gradient = gradient.contiguous()
        count, length, groups = q.shape[1], keys.shape[1] - q.shape[1], len(q) * keys.shape[2]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(keys), torch.empty_like(values)
        shape = _shape(q, keys, slots)
        # Rows of a group end where tiles of all sizes do; a row of d s begins at 16 bytes.
        height = _up(count * shape["P"], max(DK_ROWS, DQ_ROWS))
        pitch = _up(length, DK_KEYS)
        norm, delta = lse.new_empty(2, groups * height).unbind()
        ds_own = q.new_empty(groups * height, slots)
        rows = max(OWN_ROWS, triton.next_power_of_2(slots * shape["P"]))
        taken = rows // (slots * shape["P"])
        d_blocks[(groups, triton.cdiv(height, taken * slots * shape["P"]))](
            q, keys, values, gradient, out, lse, norm, delta, dk, dv, ds_own, count, length, height,
            scale, **shape, CAUSAL=causal, TAKEN=taken, ROWS=rows,
            KEYS=max(16, triton.next_power_of_2(taken * slots)), num_warps=OWN_WARPS,
        )  # fmt: skip
        at_once = max(1, min(groups, DS_BYTES // (height * pitch * q.element_size())))
        ds_seen = q.new_empty(at_once * height, pitch)
        of_rows = [_row_tiles(x, shape["P"]) for x in (q, gradient)]
        of_sums = [_sum_tiles(x) for x in (norm, delta)]
        sizes = {**shape, "W": window}
        for start in range(0, groups, at_once):
            some = min(at_once, groups - start)
            d_keys[(some, triton.cdiv(length, DK_KEYS))](
                of_rows[0], keys, values, anchors, lengths, of_rows[1], *of_sums, dk, dv,
                TensorDescriptor.from_tensor(ds_seen, [DK_ROWS, DK_KEYS]), count, length, height,
                start, scale, **sizes,
                ROWS=DK_ROWS, KEYS=DK_KEYS, num_warps=DK_WARPS, num_stages=DK_STAGES,
            )  # fmt: skip
            d_queries[(some, triton.cdiv(count * shape["P"], DQ_ROWS))](
                _key_tiles(keys, DQ_KEYS), anchors, lengths,
                TensorDescriptor.from_tensor(ds_seen, [DQ_ROWS, DQ_KEYS]), ds_own, dq, count,
                length, height, start, scale, **sizes,
                ROWS=DQ_ROWS, KEYS=DQ_KEYS, num_warps=DQ_WARPS, num_stages=DQ_STAGES,
            )  # fmt: skip
        return dq, dk, dv, *[None] * 6


def _up(size: int, step: int) -> int:
    return triton.cdiv(size, step) * step


def _key_tiles(x: Tensor, size: int) -> TensorDescriptor:
    """Of keys or values: `size` rows of one key head."""
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[2] * x.shape[3]), [size, x.shape[3]])


def _row_tiles(x: Tensor, heads: int) -> TensorDescriptor:
    """Of queries or their gradients: slots, times `heads` from some head on."""
    block = [DK_ROWS // heads, heads, x.shape[3]]
    return TensorDescriptor.from_tensor(x.view(-1, *x.shape[2:]), block)


def _sum_tiles(x: Tensor) -> TensorDescriptor:
    """Of `norm` or `delta`: a number a row."""
    # Copies in flight lie one behind the other, and each has to begin at 128 bytes.
    if DK_ROWS % 32:
        raise ValueError(f"DK_ROWS of {DK_ROWS}: expected a multiple of 32, 128 bytes of sums")
    return TensorDescriptor.from_tensor(x, [DK_ROWS])


def _shape(q: Tensor, keys: Tensor, slots: int) -> dict[str, int]:
    """Constants of all kernels."""
    heads, key_heads = q.shape[2], keys.shape[2]
    shared = heads // key_heads
    return {
        "H": heads, "J": key_heads, "SHARED": shared, "P": triton.next_power_of_2(shared),
        "G": slots, "D": q.shape[3],
    }  # fmt: skip


@triton.jit
def _read(acc, top, total, q, keys, values, place, column, seen, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of the running softmax."""
    scores = tl.dot(q, tl.trans(keys.load([place, column])))
    if MASKED:
        scores = tl.where(seen, scores, -1e38)
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    p, shrink = tl.exp2(scores * scale - higher[:, None]), tl.exp2(top - higher)
    acc = tl.dot(p.to(q.dtype), values.load([place, column]), acc * shrink[:, None])
    return acc, higher, total * shrink + tl.sum(p, 1)


@triton.jit(do_not_specialize=["length"])
def _forward(  # type: ignore[no-untyped-def]
    q, keys, values, anchors, lengths, out, lse, count, length, scale, H: tl.constexpr,
    J: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Late tiles see the most and go first. `keys` and `values` are descriptors of tiles.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    batch, head = tl.program_id(0) // J, tl.program_id(0) % J
    there = tl.load(lengths + batch)
    slot, query, inside = tile_rows(tile * (ROWS // P), head, count, SHARED, P, ROWS)
    anchor = row_anchors(anchors, batch, count, slot, inside, G)
    rows = query_rows(q, batch, slot, query, count, H, D)
    start, bare, whole, end, first, last = tile_span(slot, inside, anchor, there, G, W, KEYS)
    acc, total = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), -1e30, tl.float32)
    lane, place, column = tl.arange(0, KEYS), batch * (length + count), head * D
    if W > 0:
        for at in tl.range(start, bare, KEYS):
            seen = seen_context((at + lane)[None, :], anchor[:, None], there, W)
            acc, top, total = _read(
                acc, top, total, rows, keys, values, place + at, column, seen, scale, True
            )
    for at in tl.range(bare, whole, KEYS):
        acc, top, total = _read(
            acc, top, total, rows, keys, values, place + at, column, True, scale, False
        )
    for at in tl.range(whole, end, KEYS):
        seen = seen_context((at + lane)[None, :], anchor[:, None], there, W)
        acc, top, total = _read(
            acc, top, total, rows, keys, values, place + at, column, seen, scale, True
        )
    place += length
    for at in tl.range(first, last, KEYS):
        seen = seen_own((at + lane)[None, :], slot[:, None], G, CAUSAL)
        acc, top, total = _read(
            acc, top, total, rows, keys, values, place + at, column, seen, scale, True
        )
    at = (batch.to(tl.int64) * count + slot) * H + query
    d = tl.arange(0, D)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * D + d[None, :], result, mask=inside[:, None])
    tl.store(lse + at, top + tl.log2(total), mask=inside)
