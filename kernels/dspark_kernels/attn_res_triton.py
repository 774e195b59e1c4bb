"""One program per row: all entries into registers at once, then scores, mixture and norm.

Every load is under way before the first sum needs one, and nothing is read twice.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.overlap import begin, early, wait

exact_floats()

MOST_NUMBERS = 11 * 8192
"""Of one row, entries and prefix: what the registers of a processor hold."""


@triton.jit
def _score(v, key, eps, D: tl.constexpr):
    return tl.sum(v * key, axis=0) * tl.rsqrt(tl.sum(v * v, axis=0) / D + eps)


@triton.jit
def _mix_kernel(
    prefix, added, bank, key, weight, mixed, normed, stride, eps, norm_eps,
    COUNT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ADDED: tl.constexpr,
    APPEND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    d = tl.arange(0, D_PAD)
    mask = d < D
    at = tl.program_id(0).to(tl.int64) * D + d
    k = tl.load(key + d, mask=mask, other=0.0).to(tl.float32)
    wait(EARLY)
    entries = ()
    for i in tl.static_range(COUNT):
        entries = entries + (tl.load(bank + i * stride + at, mask=mask, other=0.0),)  # noqa: RUF005
    own = tl.load(prefix + at, mask=mask, other=0.0)
    if ADDED:
        more = tl.load(added + at, mask=mask, other=0.0)
        own = (own.to(tl.float32) + more.to(tl.float32)).to(own.dtype)
        tl.store(prefix + at, own, mask=mask)
    if APPEND:
        tl.store(bank + COUNT * stride + at, own, mask=mask)

    scores = (_score(own.to(tl.float32), k, eps, D),)
    most = scores[0]
    for i in tl.static_range(COUNT):
        score = _score(entries[i].to(tl.float32), k, eps, D)
        scores = scores + (score,)  # noqa: RUF005
        most = tl.maximum(most, score)
    mass = tl.exp(scores[0] - most)
    total = own.to(tl.float32) * mass
    for i in tl.static_range(COUNT):
        share = tl.exp(scores[i + 1] - most)
        total += entries[i].to(tl.float32) * share
        mass += share
    out = (total / mass).to(mixed.dtype.element_ty)
    tl.store(mixed + at, out, mask=mask)
    total = out.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / D + norm_eps)
    scaled = (total * scale).to(out.dtype).to(tl.float32)
    w = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + at, (scaled * w).to(out.dtype), mask=mask)


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
    if (
        not all(x.is_contiguous() for x in (*given, key_weight, weight))
        or bank[0].shape != prefix.shape
    ):
        return "prefix, bank, addend or a weight is not contiguous, or the bank holds other rows"
    numbers = (count + 1) * triton.next_power_of_2(prefix.shape[-1])
    if numbers > MOST_NUMBERS:
        return f"a row and its entries are {numbers} numbers; at most {MOST_NUMBERS}"
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
    return mix(prefix, bank, count, key_weight, eps, weight, norm_eps, added, append, 8)


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
    warps: int,
) -> tuple[Tensor, Tensor]:
    """``attn_res_mix`` with programs of ``warps`` warps."""
    mixed, normed = torch.empty_like(prefix), torch.empty_like(prefix)
    width = prefix.shape[-1]
    _mix_kernel[(prefix.numel() // width,)](
        prefix, prefix if added is None else added, bank, key_weight, weight, mixed, normed,
        bank.stride(0), eps, norm_eps, COUNT=count, D=width, D_PAD=triton.next_power_of_2(width),
        ADDED=added is not None, APPEND=append, num_warps=warps, **early(),
    )  # fmt: skip
    return mixed, normed
