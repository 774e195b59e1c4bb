"""`law` in Triton: weights, sums by tile, draws from such sums, and the search for the cut.

A row is cut into tiles that are summed side by side. Whoever needs the row merges the sums of its
tiles, always in the same order. The cut is found without sorting, by narrowing an interval of
*keys*: the bits of a float32, ordered as the floats are. A pass looks at 2^bits evenly spaced keys
at once and finds how many tokens, or how much mass, stand at or above each; the next pass goes on
between the last that has enough and its successor. After 32 / bits passes one key is left, exact
to the bit whatever the row holds.

Letters: N rows, V vocabulary, t tiles of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels import law as reference

LOG2E = tl.constexpr(reference.LOG2E)
BELOW_ONE = tl.constexpr(reference.BELOW_ONE)
LEAST = tl.constexpr(reference.LEAST)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
LOWEST = tl.constexpr(-2139095041)
"""Key of -inf."""
NOWHERE = tl.constexpr(2**31 - 1)
BITS = 4
"""Bits of a key that one pass of the search settles."""


@triton.jit
def scale_of(temperature):
    """log2(e) / T."""
    return LOG2E / tl.maximum(temperature, TINY).to(tl.float64)


@triton.jit
def whole(s, scale):
    """floor(s log2(e) / T): `base`, where s is the peak."""
    return tl.floor(s.to(tl.float64) * scale)


@triton.jit
def weight(s, scale, base, cut):
    """w of scores, float64. Launch with enable_fp_fusion=False: every kernel must round alike."""
    y = s.to(tl.float64) * scale
    floor = tl.floor(y)
    kept = (s >= cut) & (floor - base >= LEAST)
    fraction = tl.exp2((y - floor).to(tl.float32)).to(tl.float64)
    return tl.where(kept, fraction * power(tl.where(kept, floor - base, 0.0)), 0.0)


@triton.jit
def power(exponent):
    """2^exponent, exact, for whole float64 exponents in -1022..1023; 0 below."""
    e = tl.maximum(exponent, -1023.0).to(tl.int64)
    return ((e + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def rescaled(mass, base, to):
    """A tile's mass, counted in 2^base, counted in 2^to instead; 0 if the tile has none."""
    some = mass > 0
    return tl.where(some, mass * power(tl.where(some, base - to, 0.0)), 0.0)


@triton.jit
def peak_of(s, axis: tl.constexpr):
    """The largest score, NaN if there is any NaN."""
    nan = tl.max((s != s).to(tl.int32), axis) > 0
    peak = tl.max(tl.where(s == s, s, float("-inf")), axis)
    return tl.where(nan, float("nan"), peak)


@triton.jit
def key_of(s):
    """A float32's place among the floats, int64."""
    bits = s.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def value_of(key):
    """The float32 at a place; NaN beyond the infinities."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def tile_of(sums, level, TILES: tl.constexpr):
    """The first tile at which the cumulated sums exceed `level`, and what stands before it."""
    tile = tl.arange(0, TILES)
    upto = tl.cumsum(sums, 0)
    found = tl.min(tl.where((upto > level) & (sums > 0), tile, TILES - 1), 0)
    return found, tl.sum(tl.where(tile == found - 1, upto, 0.0), 0)


@triton.jit
def token_of(w, x, before, level, otherwise):
    """The first token x of a tile whose cumulated weight exceeds `level`.

    Rounding may leave none: then the tile's last token with a weight, or else `otherwise`.
    """
    upto = before + tl.cumsum(w, 0)
    first = tl.min(tl.where((upto > level) & (w > 0), x, NOWHERE), 0)
    last = tl.max(tl.where(w > 0, x, -1), 0)
    return tl.where(first < NOWHERE, first, tl.where(last >= 0, last, otherwise))


@triton.jit
def _narrowed(state, sums, row, tiles, BINS: tl.constexpr, TILES: tl.constexpr):
    """The interval of keys (first, how many) and the target after a pass; see `_search`."""
    low = tl.load(state + 3 * row)
    span = tl.load(state + 3 * row + 1)
    target = tl.load(state + 3 * row + 2)
    if span > 1:
        step = tl.ceil(span / BINS)
        bin_ = tl.arange(0, BINS)
        tile = tl.arange(0, TILES)[:, None]
        at = sums + (row * tiles + tile) * BINS + bin_[None, :]
        above = tl.sum(tl.load(at, mask=tile < tiles, other=0.0), 0)
        all_ = tl.sum(tl.where(bin_ == 0, above, 0.0), 0)
        target = tl.where(target < 0, -target * all_, target)
        enough = (above >= target) & (bin_ * step < span)
        last = tl.max(tl.where(enough, bin_, 0), 0) * step
        low += last
        span = tl.minimum(step, span - last)
    return low, span, target


@triton.jit
def _search(
    scores, temperature, wanted, peaks, before, after, sums_in, sums_out,
    tiles, width, row_stride, group,
    FIRST: tl.constexpr, START: tl.constexpr, MASS: tl.constexpr,
    BINS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One pass: narrow the interval by what the pass before found, then look between its ends.

    FIRST: of all; there was no pass before.
    START: of a search for a new cut, above the one already found.
    MASS: look for mass >= wanted * all mass (a target < 0 says: not yet multiplied), not for a
        count >= wanted.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    peak = _row_peak(peaks, row, tiles, TILES)
    if FIRST:
        low, span, target = tl.full([], LOWEST, tl.float64), tl.full([], 1.0, tl.float64), 0.0
    else:
        low, span, target = _narrowed(before, sums_in, row, tiles, BINS, TILES)
    warm = tl.load(temperature + row // group)
    if START:
        want = tl.load(wanted + row // group).to(tl.float64)
        if MASS:
            on, target = want < 1, -want
        else:
            on, target = (want > 0) & (want < width), want
        top = key_of(peak).to(tl.float64)
        span = tl.where(on & (warm > 0), tl.maximum(top - low + 1, 1.0), 1.0)
    if tile == 0:
        tl.store(after + 3 * row, low)
        tl.store(after + 3 * row + 1, span)
        tl.store(after + 3 * row + 2, target)
    if span > 1:
        step = tl.ceil(span / BINS)
        bin_ = tl.arange(0, BINS)
        least = value_of((low + bin_ * step).to(tl.int64))
        scale = scale_of(warm)
        base = whole(peak, scale)
        found = tl.zeros([BINS], tl.float64)
        for part in tl.static_range(0, BLOCK, PART):
            x = tile * BLOCK + part + tl.arange(0, PART)
            s = tl.load(scores + row * row_stride + x, mask=x < width, other=float("-inf"))
            s = s.to(tl.float32)
            if MASS:
                value = weight(s, scale, base, float("-inf"))
            else:
                value = tl.where(x < width, 1.0, 0.0).to(tl.float64)
            above = tl.where(s[:, None] >= least[None, :], value[:, None], 0.0)
            found += tl.sum(above, 0)
        tl.store(sums_out + (row * tiles + tile) * BINS + bin_, found)


@triton.jit
def _row_peak(peaks, row, tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return peak_of(tl.load(peaks + row * tiles + tile, tile < tiles, float("-inf")), 0)


@triton.jit
def _settle(
    scores, temperature, peaks, state, sums, cuts, masses,
    tiles, width, row_stride, group,
    BINS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """After the last pass: the cut, and the mass of each tile above it in 2^(the tile's base)."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    low, _span, _target = _narrowed(state, sums, row, tiles, BINS, TILES)
    cut = value_of(low.to(tl.int64))
    x = tile * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(scores + row * row_stride + x, mask=x < width, other=float("-inf"))
    scale = scale_of(tl.load(temperature + row // group))
    base = whole(tl.load(peaks + row * tiles + tile), scale)
    tl.store(masses + row * tiles + tile, tl.sum(weight(s.to(tl.float32), scale, base, cut), 0))
    if tile == 0:
        tl.store(cuts + row, cut)


class Tiles(NamedTuple):
    """Sums of the tiles of N rows.

    peaks   [N, t] float32
    masses  [N, t] float64, in 2^(base of the tile)
    cuts    [N] float32
    block   tokens of a tile
    """

    peaks: Tensor
    masses: Tensor
    cuts: Tensor
    block: int


def find_cuts(
    scores: Tensor,
    tiles: Tiles,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    row_stride: int,
    width: int,
    warps: int = 4,
) -> None:
    """Writes the cuts of N rows of `scores`, and the masses above them, into `tiles`.

    Args:
        scores: Its first element is that of the first row; rows lie `row_stride` apart.
        temperature, top_k, top_p: [N / n]: n rows in a row share each.
        width: V.
    """
    rows, count = tiles.peaks.shape
    device, bits, passes = scores.device, BITS, -(-32 // BITS)
    searches = [(x, mass) for x, mass in ((top_k, False), (top_p, True)) if x is not None]
    state = torch.empty(len(searches) * passes, rows, 3, dtype=torch.float64, device=device)
    sums = torch.empty(2, rows, count, 2**bits, dtype=torch.float64, device=device)
    sizes = (count, width, row_stride, rows // len(temperature))
    shape = {"BINS": 2**bits, "TILES": triton.next_power_of_2(count), "BLOCK": tiles.block}
    options = {"num_warps": warps, "enable_fp_fusion": False}
    done = 0
    for wanted, mass in searches:
        for number in range(passes):
            last = max(done - 1, 0)
            _search[(count, rows)](
                scores, temperature, wanted, tiles.peaks, state[last], state[done],
                sums[last % 2], sums[done % 2], *sizes,
                FIRST=done == 0, START=number == 0, MASS=mass,
                PART=min(tiles.block, 4096 >> bits), **shape, **options,
            )  # fmt: skip
            done += 1
    last = done - 1
    _settle[(count, rows)](
        scores, temperature, tiles.peaks, state[last], sums[last % 2], tiles.cuts, tiles.masses,
        *sizes, **shape, **options,
    )  # fmt: skip
