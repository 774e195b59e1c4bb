"""`settle.settle` in one launch, a program per seat."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.settle import HEADS, Seats

MOST = 64
"""Tokens that a program holds."""


@triton.jit
def _settle_kernel(  # type: ignore[no-untyped-def]
    tokens, accepted, next_token, level, fault, ends, entropy, confidence, peak,
    anchor, left, sent, lengths, pending, count_out, letter,
    tokens_step, entropy_step, confidence_step, peak_step, width, vocabulary,
    L: tl.constexpr, LP: tl.constexpr,
    PENDING: tl.constexpr, ENTROPY: tl.constexpr, CONFIDENCE: tl.constexpr,
    PEAK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    taken, token = tl.load(accepted + row), tl.load(next_token + row)
    was, sent_now = tl.load(left + row), tl.load(sent + row)
    step = tl.arange(0, LP)
    primaries = tl.load(tokens + row * tokens_step + step, mask=step < L, other=0)
    said = tl.where(step < taken, primaries, token)
    over = tl.load(ends + row * vocabulary + said, mask=step <= taken, other=0)
    first = tl.min(tl.where(over != 0, step, LP), axis=0)
    ended = first < LP
    count = tl.where(ended, first + 1, taken + 1).to(tl.int64)
    count = tl.where(was > 0, count, 0)
    now = tl.where((was > 0) & (first == LP), was - count, 0)
    at = letter + row * width
    tl.store(at, taken.to(tl.float64))
    tl.store(at + 1, token.to(tl.float64))
    tl.store(at + 2, tl.load(level + row).to(tl.float64))
    none = tl.full([], -1.0, tl.float64)
    tl.store(at + 3, none)
    tl.store(at + 4, none)
    wrong = tl.load(fault + row).to(tl.int32)
    if PEAK:
        value = tl.load(peak + row * peak_step + step, mask=step < L, other=0.0)
        bad = (value != value) | (tl.abs(value) == float("inf"))
        slot = tl.min(tl.where(bad, step, LP), axis=0)
        kind = tl.where(value != value, 0, tl.where(value > 0, 1, 2))
        kind = tl.sum(tl.where(step == slot, kind, 0), axis=0)
        wrong = tl.where(slot < LP, -(1 + 3 * slot + kind), wrong)
    tl.store(at + 5, wrong.to(tl.float64))
    tl.store(at + 6, sent_now.to(tl.float64))
    at += 7
    tl.store(at + step, primaries.to(tl.float64), mask=step < L)
    at += L
    if ENTROPY:
        value = tl.load(entropy + row * entropy_step + step, mask=step < L, other=0.0)
        tl.store(at + step, value.to(tl.float64), mask=step < L)
        at += L
    if CONFIDENCE:
        value = tl.load(confidence + row * confidence_step + step, mask=step < L, other=0.0)
        tl.store(at + step, value.to(tl.float64), mask=step < L)
    tl.store(count_out + row, count)
    tl.store(left + row, now)
    tl.store(sent + row, tl.minimum(tl.maximum(now - 1, 0), L))
    tl.store(anchor + row, token)
    tl.store(lengths + row, tl.load(lengths + row) + count)
    if PENDING:
        tl.store(pending + row, count)


def settle(
    tokens: Tensor,
    accepted: Tensor,
    next_token: Tensor,
    level: Tensor,
    fault: Tensor,
    ends: Tensor,
    seats: Seats,
    entropy: Tensor | None = None,
    confidence: Tensor | None = None,
    peak: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `settle.settle`."""
    batch, most = tokens.shape
    extra = [x for x in (entropy, confidence) if x is not None]
    width = HEADS + most * (1 + len(extra))
    letter = torch.empty(batch, width, dtype=torch.float64, device=tokens.device)
    count = torch.empty_like(accepted)
    spare = accepted  # stands where nothing is given; never read
    _settle_kernel[(batch,)](
        tokens,
        accepted,
        next_token,
        level,
        fault,
        ends.view(torch.uint8),
        spare if entropy is None else entropy,
        spare if confidence is None else confidence,
        spare if peak is None else peak,
        seats.anchor,
        seats.left,
        seats.sent,
        seats.lengths,
        spare if seats.accepted is None else seats.accepted,
        count,
        letter,
        tokens.stride(0),
        0 if entropy is None else entropy.stride(0),
        0 if confidence is None else confidence.stride(0),
        0 if peak is None else peak.stride(0),
        width,
        ends.shape[1],
        L=most,
        LP=triton.next_power_of_2(most + 1),
        PENDING=seats.accepted is not None,
        ENTROPY=entropy is not None,
        CONFIDENCE=confidence is not None,
        PEAK=peak is not None,
        num_warps=1,
    )
    return count, letter


def refuses(
    tokens: Tensor,
    accepted: Tensor,
    next_token: Tensor,
    level: Tensor,
    fault: Tensor,
    ends: Tensor,
    seats: Seats,
    entropy: Tensor | None = None,
    confidence: Tensor | None = None,
    peak: Tensor | None = None,
) -> str | None:
    """Why the kernel cannot take these; None: it can."""
    rows = [accepted, next_token, level, fault, *(x for x in seats if x is not None)]
    if any(x.dtype != torch.int64 or not x.is_contiguous() for x in rows):
        return "counts and ids are contiguous int64"
    if ends.dtype != torch.bool or not ends.is_contiguous():
        return "end tokens are a contiguous mask"
    if tokens.dtype != torch.int64:
        return f"tokens are {tokens.dtype}, not int64"
    if tokens.shape[1] + 1 > MOST:
        return f"more than {MOST} tokens a seat"
    for x in (tokens, entropy, confidence, peak):
        if x is not None and x.shape[1] > 1 and x.stride(1) != 1:
            return "a row of tokens, entropy or confidence is not contiguous"
    return None
