"""`calibrate` in Triton: a lane per block, slot after slot.

log(1 + e) and 1 - exp(x) are taken so that they keep their digits near 0 (Kahan): what rounding
does to 1 + e is divided out again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.calibrate import LOG_SMALLEST, SMALLEST
from dspark_kernels.interpreted_floats import exact_floats

exact_floats()

LOWEST, HIGHEST = tl.constexpr(LOG_SMALLEST), tl.constexpr(-SMALLEST)
LANES = 32
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _log_sigmoid(x):
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    off = u - 1.0
    return tl.minimum(x, 0.0) - tl.where(
        off == 0.0, e, tl.log(u) * (e / tl.where(off == 0.0, 1.0, off))
    )


@triton.jit
def _one_minus_exp(x):
    """Of x < 0."""
    u = tl.exp(x)
    log = tl.log(u)
    return tl.where(u == 1.0, -x, (1.0 - u) * (x / tl.where(u == 1.0, 1.0, log)))


@triton.jit
def _calibrate(logits, columns, out, n, G, SLOTS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = row < n
    total = tl.zeros([LANES], tl.float32)
    before = tl.zeros([LANES], tl.float32)
    for slot in tl.static_range(SLOTS):
        x = tl.load(logits + row * SLOTS + slot, mask=live, other=0.0).to(tl.float32)
        total += _log_sigmoid(x / tl.load(columns + slot))
        product = tl.minimum(tl.maximum(total, LOWEST), HIGHEST)
        product = tl.where(total == total, product, total)  # NaN, which bounds would hide
        a, b = tl.load(columns + G + slot), tl.load(columns + 2 * G + slot)
        bent = a * product - b * tl.log(_one_minus_exp(product)) + tl.load(columns + 3 * G + slot)
        survival = _log_sigmoid(bent)
        if slot > 0:
            survival = tl.where(before < survival, before, survival)
        tl.store(out + row * SLOTS + slot, tl.exp(survival - before), mask=live)
        before = survival


def calibrate(logits: Tensor, columns: Tensor) -> Tensor:
    """See `calibrate.calibrate`."""
    slots = logits.shape[-1]
    n = logits.numel() // slots
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _calibrate[(triton.cdiv(n, LANES),)](
        logits, columns, out, n, columns.shape[1], SLOTS=slots, LANES=LANES, num_warps=1
    )
    return out


def refuses(logits: Tensor, columns: Tensor) -> str | None:
    """Why the kernel cannot take these; None: it can."""
    if logits.dtype not in FLOATS or columns.dtype != torch.float32:
        return f"logits of {logits.dtype} with columns of {columns.dtype}"
    if not logits.numel():
        return "no logits"
    if not logits.is_contiguous() or not columns.is_contiguous():
        return "a tensor is not contiguous"
    if torch.is_grad_enabled() and logits.requires_grad:
        return "gradients are wanted, and the kernel has no backward"
    return None
