"""MXFP4 weight rows times 1 to 16 rows of x, unpacked on the way from memory to the sum.

A word of 32 bits holds eight codes of 4 bits, input 8j + i in bits 4i. Two codes that lie 16 bits
apart become two bfloat16 numbers in the halves of one word: sign to bit 15, the three other bits
to the low exponent and the top of the mantissa. That is the code's value times 2^-126, subnormals
included, without a table. For i = 0, and with the other six codes out of the way, one product puts
one copy of each code where its sign belongs and another where the rest does:

    ((word & 0x000F000F) * (2^12 + 2^6)) & 0x81C081C0

x arrives times 2^100, which keeps products away from the smallest floats, and the factor 2^26 that
is missing goes into the exponent of the group's scale. For eight codes to meet their inputs without
a shuffle, x lies in eight planes: input c at (c mod 8) I/8 + c div 8.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

LIFT = tl.constexpr(2.0**100)
"""Factor of x as these kernels read it; a power of two, exact in bfloat16."""


@triton.jit
def plane(c, I: tl.constexpr):  # noqa: E741
    """Where input c lies."""
    return (c % 8) * (I // 8) + c // 8


@triton.jit
def codes(word, AT: tl.constexpr):
    """Codes AT and AT + 4 of words uint32, as float32 times 2^-126."""
    if AT < 2:  # noqa: SIM108
        near = word
    else:
        near = word >> 8
    DOWN: tl.constexpr = 4 * (AT % 2)
    both = (near & (0x000F000F << DOWN)) * (0x1040 >> DOWN) & 0x81C081C0
    low = (both << 16).to(tl.float32, bitcast=True)
    high = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def power(scale):
    """2^(scale - 127 + 26) of bytes; infinite where float32 cannot hold it, and for 255 (NaN)."""
    return (tl.minimum(scale.to(tl.int32) + 26, 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _one(word, scale, x, at, I: tl.constexpr, BO: tl.constexpr, BW: tl.constexpr):  # noqa: E741
    """Sums of groups [BO, BW / 4] of one step."""
    sums = tl.zeros([BO, BW], tl.float32)
    for i in tl.static_range(4):
        low, high = codes(word, i)
        sums += low * tl.load(x + i * (I // 8) + at).to(tl.float32)[None, :]
        sums += high * tl.load(x + (i + 4) * (I // 8) + at).to(tl.float32)[None, :]
    return tl.sum(tl.reshape(sums, [BO, BW // 4, 4]), 2) * power(scale)


@triton.jit
def gemv(
    x, a, b, scale_a, scale_b,
    I: tl.constexpr, BO: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr,  # noqa: E741
    DUAL: tl.constexpr,
):  # fmt: skip
    """One row. a, b: pointers [BO] to rows of words; scale_a, scale_b: to their bytes. [BO] each.

    BW words a step, which divide the row.
    """
    words = tl.arange(0, BW)
    groups = tl.arange(0, BW // 4)
    acc_a = tl.zeros([BO, BW // 4], tl.float32)
    acc_b = tl.zeros([BO, BW // 4], tl.float32)
    for k in tl.range(0, I // 8, BW, num_stages=STAGES):
        at = k + words
        group = k // 4 + groups
        word_a = tl.load(a[:, None] + at[None, :]).to(tl.uint32, bitcast=True)
        byte_a = tl.load(scale_a[:, None] + group[None, :])
        if DUAL:
            word_b = tl.load(b[:, None] + at[None, :]).to(tl.uint32, bitcast=True)
            byte_b = tl.load(scale_b[:, None] + group[None, :])
        acc_a += _one(word_a, byte_a, x, at, I, BO, BW)
        if DUAL:
            acc_b += _one(word_b, byte_b, x, at, I, BO, BW)
    return tl.sum(acc_a, 1), tl.sum(acc_b, 1)


@triton.jit
def _several(
    acc, word, scale, x, rows, live, at,
    I: tl.constexpr, BO: tl.constexpr, BW: tl.constexpr,  # noqa: E741
):  # fmt: skip
    factor = power(scale)[:, :, None] + tl.zeros([BO, BW // 4, 4], tl.float32)
    factor = tl.reshape(factor, [BO, BW])
    for i in tl.static_range(4):
        low, high = codes(word, i)
        from_x = x + rows[None, :] * I + i * (I // 8) + at[:, None]
        x_low = tl.load(from_x, mask=live[None, :], other=0.0)
        x_high = tl.load(from_x + 4 * (I // 8), mask=live[None, :], other=0.0)
        acc = tl.dot((low * factor).to(x_low.dtype), x_low, acc)
        acc = tl.dot((high * factor).to(x_low.dtype), x_high, acc)
    return acc


@triton.jit
def gemm(
    x, a, b, scale_a, scale_b, rows, live,
    I: tl.constexpr, BO: tl.constexpr, BW: tl.constexpr, N: tl.constexpr,  # noqa: E741
    STAGES: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """Rows [N] of x, where ``live``: [BO, N] each."""
    words = tl.arange(0, BW)
    groups = tl.arange(0, BW // 4)
    acc_a = tl.zeros([BO, N], tl.float32)
    acc_b = tl.zeros([BO, N], tl.float32)
    for k in tl.range(0, I // 8, BW, num_stages=STAGES):
        at = k + words
        group = k // 4 + groups
        word_a = tl.load(a[:, None] + at[None, :]).to(tl.uint32, bitcast=True)
        byte_a = tl.load(scale_a[:, None] + group[None, :])
        acc_a = _several(acc_a, word_a, byte_a, x, rows, live, at, I, BO, BW)
        if DUAL:
            word_b = tl.load(b[:, None] + at[None, :]).to(tl.uint32, bitcast=True)
            byte_b = tl.load(scale_b[:, None] + group[None, :])
            acc_b = _several(acc_b, word_b, byte_b, x, rows, live, at, I, BO, BW)
    return acc_a, acc_b
