"""What the weights-bound Triton kernels share: a tile of weight rows times 1 to 16 rows of x.

    acc[o, r] = sum_c W[o, c] x[r, c] w[c],   sq[r] = sum_c x[r, c]^2

The root-mean-square norm is a factor of each row, so it is applied to the finished sum: the weights
are never waited for by a pass over x. Products are of the weight's dtype, sums are float32. One row
is multiplied lane by lane (``gemv``); several are padded to the 16 of a matrix instruction
(``gemm``). Either can run two matrices at once, gate and up.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, var-annotated, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.overlap import ahead, wait

exact_floats()


@triton.jit
def once(at):
    """Load what nobody reads again before it has left the caches: it goes first."""
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _tile(a, at, I: tl.constexpr, EVEN: tl.constexpr):  # noqa: E741
    """Columns ``at`` of weight rows; beyond the last one 0."""
    if EVEN:
        tile = once(a[:, None] + at[None, :])
    else:
        tile = tl.load(a[:, None] + at[None, :], mask=(at < I)[None, :], other=0.0)
    return tile


@triton.jit
def _row(x, norm, at, like: tl.constexpr, I: tl.constexpr, NORM: tl.constexpr):  # noqa: E741
    """x times the norm's weight, rounded like ``like``, and x squared; float32."""
    row = tl.load(x + at, mask=at < I, other=0.0).to(tl.float32)
    square = tl.sum(tl.reshape(row * row, [row.shape[0] // 8, 8]), 1)
    if NORM:
        scale = tl.load(norm + at, mask=at < I, other=0.0).to(tl.float32)
        row = (row * scale).to(like).to(tl.float32)
    return row, square


@triton.jit
def fold(product, BO: tl.constexpr, BK: tl.constexpr):
    """[BO, BK] -> [BO, BK / 8]: the sums of what one load of 16 bytes brought, in registers."""
    return tl.sum(tl.reshape(product, [BO, BK // 8, 8]), 2)


@triton.jit
def gemv(
    x, norm, a, b, start,
    I: tl.constexpr, SPAN: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,  # noqa: E741
    STAGES: tl.constexpr, NORM: tl.constexpr, DUAL: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row. x, norm: pointers; a, b: pointers [BO] to weight rows. Sums [BO, BK / 8] of both,
    and of the squares [1, BK / 8], which are still to be added up along their last dimension.

    Inputs start .. start + SPAN; EVEN: all of them are inside I. EARLY: the first tile is on its
    way before x need be there.
    """
    acc_a = tl.zeros([BO, BK // 8], tl.float32)
    acc_b = tl.zeros([BO, BK // 8], tl.float32)
    square = tl.zeros([BK // 8], tl.float32)
    like: tl.constexpr = a.dtype.element_ty
    if EARLY:
        at = start + tl.arange(0, BK)
        tile_a = _tile(a, at, I, EVEN)
        if DUAL:
            tile_b = _tile(b, at, I, EVEN)
        wait(EARLY)
        row, square = _row(x, norm, at, like, I, NORM)
        acc_a = fold(tile_a.to(tl.float32) * row[None, :], BO, BK)
        if DUAL:
            acc_b = fold(tile_b.to(tl.float32) * row[None, :], BO, BK)
    FIRST: tl.constexpr = BK if EARLY else 0
    for k in tl.range(FIRST, SPAN, BK, num_stages=STAGES):
        at = start + k + tl.arange(0, BK)
        tile_a = _tile(a, at, I, EVEN)
        if DUAL:
            tile_b = _tile(b, at, I, EVEN)
        row, more = _row(x, norm, at, like, I, NORM)
        square += more
        acc_a += fold(tile_a.to(tl.float32) * row[None, :], BO, BK)
        if DUAL:
            acc_b += fold(tile_b.to(tl.float32) * row[None, :], BO, BK)
    return acc_a, acc_b, square[None, :]


@triton.jit
def gemv_held(
    x, norm, a, b, soon,
    I: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, HELD: tl.constexpr,  # noqa: E741
    NORM: tl.constexpr, DUAL: tl.constexpr, SOON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`gemv` of short rows, I a multiple of BK: HELD tiles are in registers before x is there.

    Every thread loads the numbers of x that its own weights meet: no thread waits for another
    before the last sum. Sums [BO, BK / 8] of both and of the squares, as of `gemv`. SOON: numbers
    from ``soon`` on that are asked for when x is there.
    """
    like: tl.constexpr = a.dtype.element_ty
    at = tl.arange(0, BK)[None, :] + tl.zeros([BO, 1], tl.int32)
    acc_a = tl.zeros([BO, BK // 8], tl.float32)
    acc_b = tl.zeros([BO, BK // 8], tl.float32)
    square = tl.zeros([BO, BK // 8], tl.float32)
    tiles_a = ()
    tiles_b = ()
    for k in tl.static_range(0, min(HELD * BK, I), BK):
        tiles_a = tiles_a + (once(a[:, None] + (k + at)),)  # noqa: RUF005
        if DUAL:
            tiles_b = tiles_b + (once(b[:, None] + (k + at)),)  # noqa: RUF005
    wait(EARLY)
    if SOON > 0:
        ahead(soon, SOON, EARLY, True)
    for k in tl.static_range(0, I, BK):
        if k < HELD * BK:
            tile_a = tiles_a[k // BK]
            if DUAL:
                tile_b = tiles_b[k // BK]
        else:
            tile_a = once(a[:, None] + (k + at))
            if DUAL:
                tile_b = once(b[:, None] + (k + at))
        row = tl.load(x + k + at).to(tl.float32)
        if NORM:
            square += fold(row * row, BO, BK)
            row = (row * tl.load(norm + k + at).to(tl.float32)).to(like).to(tl.float32)
        acc_a += fold(tile_a.to(tl.float32) * row, BO, BK)
        if DUAL:
            acc_b += fold(tile_b.to(tl.float32) * row, BO, BK)
    return acc_a, acc_b, square


@triton.jit
def gemm(
    x,
    norm,
    a,
    b,
    rows,
    live,
    start,
    I: tl.constexpr,  # noqa: E741
    SPAN: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    DUAL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Rows [N] of x, where ``live``; a, b: pointers [BO]. Sums [BO, N], [BO, N], [N]."""
    cols = tl.arange(0, BK)
    acc_a = tl.zeros([BO, N], tl.float32)
    acc_b = tl.zeros([BO, N], tl.float32)
    square = tl.zeros([N], tl.float32)
    for k in tl.range(0, SPAN, BK, num_stages=STAGES):
        at = start + k + cols
        seen = live[None, :] & (at < I)[:, None]
        if EVEN:
            w_a = tl.load(a[:, None] + at[None, :])
            if DUAL:
                w_b = tl.load(b[:, None] + at[None, :])
        else:
            w_a = tl.load(a[:, None] + at[None, :], mask=(at < I)[None, :], other=0.0)
            if DUAL:
                w_b = tl.load(b[:, None] + at[None, :], mask=(at < I)[None, :], other=0.0)
        tile = tl.load(x + rows[None, :] * I + at[:, None], mask=seen, other=0.0)
        if NORM:
            wide = tile.to(tl.float32)
            square += tl.sum(wide * wide, 0)
            scale = tl.load(norm + at, mask=at < I, other=0.0).to(tl.float32)
            tile = (wide * scale[:, None]).to(w_a.dtype)
        acc_a = tl.dot(w_a, tile, acc_a)
        if DUAL:
            acc_b = tl.dot(w_b, tile, acc_b)
    return acc_a, acc_b, square


@triton.jit
def tanh(x):
    """From exponentials, and from its series near zero, where they would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0, -far, far)
    return tl.where(tl.abs(x) < 0.01, x - x * x * x * 0.3333333333, far)


@triton.jit
def activate(gate, up, beta, linear_beta, SITU: tl.constexpr):
    """SiLU- or SiTU-gated ``up``; float32."""
    if SITU:
        bounded = beta * tanh(gate / beta) * tl.sigmoid(gate)
        return bounded * linear_beta * tanh(up / linear_beta)
    return gate * tl.sigmoid(gate) * up
