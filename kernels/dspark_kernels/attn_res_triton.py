"""One program per row, twice over its entries: scores first, then the mixture and its norm.

Tiles are [entries, BLOCK_D] with products summed over tiles before they are summed over a tile, so
that all scores cost one reduction. The second pass finds the row in the L1 or L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted_floats import exact_floats

exact_floats()


@triton.jit
def _prefix_of(
    prefix, added, bank, count, d, mask, stride, ADDED: tl.constexpr, APPEND: tl.constexpr
):
    """The prefix, with what joins it, stored where it changed or where it is wanted."""
    p = tl.load(prefix + d, mask=mask, other=0.0)
    if ADDED:
        more = tl.load(added + d, mask=mask, other=0.0)
        p = (p.to(tl.float32) + more.to(tl.float32)).to(p.dtype)
        tl.store(prefix + d, p, mask=mask)
    if APPEND:
        tl.store(bank + count * stride + d, p, mask=mask)
    return p.to(tl.float32)


@triton.jit
def _weights(
    prefix, added, bank, key, stride, eps,
    COUNT: tl.constexpr, C_PAD: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ADDED: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    """softmax of the scores: [C_PAD] of the bank's entries, and the prefix's."""
    j = tl.arange(0, C_PAD)
    dots = tl.zeros((C_PAD, BLOCK_D), tl.float32)
    squares = tl.zeros((C_PAD, BLOCK_D), tl.float32)
    own_dots = tl.zeros((BLOCK_D,), tl.float32)
    own_squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        w = tl.load(key + d, mask=d < D, other=0.0).to(tl.float32)
        p = _prefix_of(prefix, added, bank, COUNT, d, d < D, stride, ADDED, APPEND)
        mask = (j < COUNT)[:, None] & (d < D)[None, :]
        v = tl.load(bank + j[:, None] * stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dots += v * w[None, :]
        squares += v * v
        own_dots += p * w
        own_squares += p * p
    scores = tl.sum(dots, axis=1) * tl.rsqrt(tl.sum(squares, axis=1) / D + eps)
    scores = tl.where(j < COUNT, scores, float("-inf"))
    own = tl.sum(own_dots, axis=0) * tl.rsqrt(tl.sum(own_squares, axis=0) / D + eps)
    most = tl.maximum(tl.max(scores, axis=0), own)
    weights, own_weight = tl.exp(scores - most), tl.exp(own - most)
    mass = tl.sum(weights, axis=0) + own_weight
    return weights / mass, own_weight / mass


@triton.jit
def _mix_kernel(
    prefix, added, bank, key, weight, mixed, normed, stride, eps, norm_eps,
    COUNT: tl.constexpr, C_PAD: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ADDED: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * D
    prefix += row
    added += row
    bank += row
    mixed += row
    normed += row
    j = tl.arange(0, C_PAD)
    weights, own = _weights(
        prefix, added, bank, key, stride, eps, COUNT, C_PAD, D, BLOCK_D, ADDED, APPEND
    )
    if ADDED:
        tl.debug_barrier()  # the prefix is read again, by whichever thread
    squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = (j < COUNT)[:, None] & (d < D)[None, :]
        v = tl.load(bank + j[:, None] * stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        p = tl.load(prefix + d, mask=d < D, other=0.0).to(tl.float32)
        m = (tl.sum(v * weights[:, None], axis=0) + p * own).to(mixed.dtype.element_ty)
        tl.store(mixed + d, m, mask=d < D)
        squares += m.to(tl.float32) * m.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + norm_eps)
    tl.debug_barrier()
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        m = tl.load(mixed + d, mask=d < D, other=0.0)
        w = tl.load(weight + d, mask=d < D, other=0.0)
        n = (m.to(tl.float32) * scale).to(m.dtype).to(tl.float32) * w.to(tl.float32)
        tl.store(normed + d, n.to(m.dtype), mask=d < D)


def refuses(
    prefix: Tensor,
    bank: Tensor,
    count: int,
    key_weight: Tensor,
    eps: float,
    weight: Tensor,
    norm_eps: float,
    added: Tensor | None = None,
    append: bool = False,
) -> str | None:
    """Why the kernel does not take these, or None."""
    given = [x for x in (prefix, bank, added) if x is not None]
    if prefix.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the prefix is {prefix.dtype}"
    if any(x.dtype != prefix.dtype for x in (*given, weight)):
        return "prefix, bank, addend and norm weight are of different dtypes"
    if not all(x.is_contiguous() for x in given) or bank[0].shape != prefix.shape:
        return "prefix, bank or addend is not contiguous, or the bank holds other rows"
    if count > 64 or prefix.shape[-1] > 32768:
        return f"{count} entries of width {prefix.shape[-1]}; at most 64 and 32768"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*given, key_weight, weight)):
        return "there is no backward"
    return None


def attn_res_mix(
    prefix: Tensor,
    bank: Tensor,
    count: int,
    key_weight: Tensor,
    eps: float,
    weight: Tensor,
    norm_eps: float,
    added: Tensor | None = None,
    append: bool = False,
) -> tuple[Tensor, Tensor]:
    """See ``dspark_kernels.attn_res.attn_res_mix``."""
    return mix(prefix, bank, count, key_weight, eps, weight, norm_eps, added, append, 8192, 8)


def mix(
    prefix: Tensor,
    bank: Tensor,
    count: int,
    key_weight: Tensor,
    eps: float,
    weight: Tensor,
    norm_eps: float,
    added: Tensor | None,
    append: bool,
    tile: int,
    warps: int,
) -> tuple[Tensor, Tensor]:
    """``attn_res_mix`` with tiles of ``tile`` numbers."""
    mixed, normed = torch.empty_like(prefix), torch.empty_like(prefix)
    width = prefix.shape[-1]
    entries = triton.next_power_of_2(max(1, count))
    block = max(16, min(triton.next_power_of_2(width), tile // entries))
    _mix_kernel[(prefix.numel() // width,)](
        prefix, prefix if added is None else added, bank, key_weight, weight, mixed, normed,
        bank.stride(0), eps, norm_eps,
        COUNT=count, C_PAD=entries, D=width, BLOCK_D=block, ADDED=added is not None, APPEND=append,
        num_warps=warps,
    )  # fmt: skip
    return mixed, normed
