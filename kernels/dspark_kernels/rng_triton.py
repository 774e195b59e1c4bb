"""Triton's Philox as `rng.uniform`: the same bits, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _uniform(seed, position, out, count, STREAM: tl.constexpr, PAIRS: tl.constexpr):
    row = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    place = tl.load(position + row)
    zero = tl.zeros([PAIRS], tl.uint32)
    c2 = zero + (place & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((place >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c1 = tl.full([PAIRS], STREAM, tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed + row), pair.to(tl.uint32), c1, c2, c3)
    first, second = _fraction(w0, w1), _fraction(w2, w3)
    at = out + row.to(tl.int64) * count + 2 * pair
    tl.store(at, first, mask=2 * pair < count)
    tl.store(at + 1, second, mask=2 * pair + 1 < count)


@triton.jit
def _fraction(high, low):
    bits = (high.to(tl.uint64) << 21) | (low.to(tl.uint64) >> 11)
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


def uniform(seed: Tensor, position: Tensor, stream: int, count: int) -> Tensor:
    """See `rng.uniform`."""
    out = torch.empty(len(seed), count, dtype=torch.float64, device=seed.device)
    pairs = triton.next_power_of_2(max(1, (count + 1) // 2))
    where = seed.contiguous(), position.contiguous()
    _uniform[(len(seed),)](*where, out, count, STREAM=stream, PAIRS=pairs, num_warps=1)
    return out


def refuses(seed: Tensor, position: Tensor, stream: int, count: int) -> str | None:
    """Why the kernel cannot take these; None: it can."""
    del position, stream
    if count < 1 or len(seed) == 0:
        return "nothing to draw"
    return "more than 4096 uniforms a row" if count > 4096 else None
