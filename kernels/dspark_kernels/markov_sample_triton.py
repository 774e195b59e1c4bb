"""`markov_sample` in Triton: two launches per slot, and a search between them where rows are cut.

    (code)    where a coder makes the codes, one more before them, see `markov_code_triton`
    _scores   every tile of the vocabulary: W_2 once, scores out, sums of the tile
    (search)  top-k and top-p, see `law_triton`
    _choose   one program per row: merge the tiles, draw or take the argmax, law and entropy
    _trust    once, when all tokens are known: the confidence of all slots

The next slot's `_scores` reads the token that `_choose` wrote. Letters as in `markov_sample`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels import markov_code_triton
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.law import Law
from dspark_kernels.law_triton import (
    BELOW_ONE,
    NOWHERE,
    Tiles,
    find_cuts,
    peak_of,
    rescaled,
    scale_of,
    tile_of,
    token_of,
    weight,
    whole,
)
from dspark_kernels.markov_code import Coder
from dspark_kernels.markov_sample import Drafted

exact_floats()

BLOCK, ROWS_AT_ONCE = 128, 16
"""Tokens of a tile and, where there is more than one, rows of the batch per program."""


@triton.jit
def _table(w2, x, r, RANK: tl.constexpr, EVEN: tl.constexpr):
    """Columns r of rows x of W_2, which are there; 0 beyond the rank."""
    if EVEN:
        found = tl.load(w2 + (x[:, None] * RANK + r[None, :]))
    else:
        found = tl.load(w2 + (x[:, None] * RANK + r[None, :]), mask=r[None, :] < RANK, other=0.0)
    return found


@triton.jit
def _bias(
    w1, w2, anchor, tokens, rows, live, slot, x,
    SLOTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """W_2[x] . W_1[token before the slot], [BLOCK, ROWS] float32; every x is a row of w2.

    CODED: w1 holds the codes of this slot instead, a row each.
    """
    EVEN: tl.constexpr = RANK % CHUNK == 0
    # The table does not wait for the token: its first columns are on their way before that is read.
    w = _table(w2, x, tl.arange(0, CHUNK), RANK, EVEN)
    if CODED:
        prev = rows
    else:
        prev = tl.load(anchor + rows, mask=live & (slot == 0), other=0)
        prev += tl.load(tokens + rows * SLOTS + slot - 1, mask=live & (slot > 0), other=0)
    total = tl.zeros([BLOCK, CHUNK if ROWS == 1 else ROWS], tl.float32)
    for start in tl.static_range(0, RANK, CHUNK):
        r = start + tl.arange(0, CHUNK)
        if start > 0:
            w = _table(w2, x, r, RANK, EVEN)
        at = w1 + prev[:, None] * RANK + r[None, :]
        code = tl.load(at, mask=live[:, None] & (r[None, :] < RANK), other=0.0)
        if ROWS == 1:  # lane by lane; the lanes are added up once, behind the loop
            total += w.to(tl.float32) * code.to(tl.float32)
        else:
            total = tl.dot(w, tl.trans(code), total, input_precision="ieee")
    if ROWS == 1:
        total = tl.sum(total, 1)[:, None]
    return total


@triton.jit(do_not_specialize=["slot"])
def _scores(
    logits, anchor, tokens, w1, w2, temperature, scores, peaks, bests, masses, flats, slopes,
    slot, batch, width, tiles, row_stride, slot_stride,
    SLOTS: tl.constexpr, RANK: tl.constexpr, WARM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    tile = tl.program_id(1)
    local = tl.arange(0, BLOCK)
    x = tile * BLOCK + local
    live, inside = rows < batch, x < width
    both = inside[:, None] & live[None, :]
    at = logits + rows[None, :] * row_stride + slot * slot_stride + x[:, None]
    s = tl.load(at, mask=both, other=0.0).to(tl.float32)
    table = w2 + tile.to(tl.int64) * (BLOCK * RANK)
    local = tl.minimum(local, width - 1 - tile * BLOCK)
    s += _bias(
        w1, table, anchor, tokens, rows, live, slot, local, SLOTS, RANK, ROWS, BLOCK, CHUNK, CODED
    )
    out = rows * SLOTS + slot
    tl.store(scores + out[None, :] * width + x[:, None], s, mask=both)
    s = tl.where(both, s, float("-inf"))
    peak = peak_of(s, 0)
    to = rows * tiles + tile
    tl.store(peaks + to, peak, mask=live)
    first = tl.min(tl.where(s == peak[None, :], x[:, None], NOWHERE), 0)
    tl.store(bests + to, first, mask=live)
    gap = tl.where(s > float("-inf"), s - peak[None, :], 0.0)
    e = tl.where(s > float("-inf"), tl.exp(gap), 0.0)
    tl.store(flats + to, tl.sum(e, 0), mask=live)
    tl.store(slopes + to, tl.sum(e * gap, 0), mask=live)
    if WARM:
        scale = scale_of(tl.load(temperature + rows, mask=live, other=0.0))
        base = whole(peak, scale)
        w = weight(s, scale[None, :], base[None, :], float("-inf"))
        tl.store(masses + to, tl.sum(w, 0), mask=live)


@triton.jit
def _entropy(peak, peaks, flats, slopes):
    """ln Z - sum e^(s - peak) (s - peak) / Z from the tiles' Z and slopes about their own peaks."""
    gap = tl.where(peaks > float("-inf"), peaks - peak, 0.0)
    factor = tl.where(peaks > float("-inf"), tl.exp(gap), 0.0)
    z = tl.sum(factor * flats, 0)
    return tl.log(z) - tl.sum(factor * (slopes + gap * flats), 0) / z


@triton.jit(do_not_specialize=["slot"])
def _choose(
    scores, temperature, coins, ids, peaks, bests, masses, cuts, flats, slopes,
    tokens, law_base, law_cut, law_mass, entropy, top,
    slot, width, tiles,
    SLOTS: tl.constexpr, WARM: tl.constexpr, CUT: tl.constexpr, IDS: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = row * SLOTS + slot
    tile = tl.arange(0, TILES)
    there, sums = tile < tiles, row * tiles + tile
    each = tl.load(peaks + sums, mask=there, other=float("-inf"))
    peak = peak_of(each, 0)
    best = tl.load(bests + sums, mask=there & (each == peak), other=NOWHERE)
    token = tl.minimum(tl.min(best, 0), width - 1).to(tl.int64)
    flat = tl.load(flats + sums, mask=there, other=0.0)
    slope = tl.load(slopes + sums, mask=there, other=0.0)
    tl.store(entropy + at, _entropy(peak, each, flat, slope))
    tl.store(top + at, peak)
    if WARM:
        warm = tl.load(temperature + row)
        scale = scale_of(warm)
        base = whole(peak, scale)
        cut = tl.load(cuts + row) if CUT else float("-inf")
        mass = tl.load(masses + sums, mask=there, other=0.0)
        mass = rescaled(mass, whole(each, scale), base)
        total = tl.sum(mass, 0)
        tl.store(law_base + at, base)
        tl.store(law_cut + at, cut)
        tl.store(law_mass + at, total)
        level = tl.load(coins + at) * BELOW_ONE * total
        found, before = tile_of(mass, level, TILES)
        x = found * BLOCK + tl.arange(0, BLOCK)
        s = tl.load(scores + at * width + x, mask=x < width, other=float("-inf"))
        drawn = token_of(weight(s, scale, base, cut), x, before, level, token)
        token = tl.where(warm == 0, token, drawn.to(tl.int64))
    if IDS:
        token = tl.load(ids + token)
    tl.store(tokens + at, token)


@triton.jit
def _trust(
    hidden, anchor, tokens, w1, w, bias, out, row_stride, slot_stride,
    SLOTS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, EMBED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        d = start + tl.arange(0, BLOCK)
        h = tl.load(hidden + row * row_stride + slot * slot_stride + d, mask=d < WIDTH, other=0.0)
        total += h.to(tl.float32) * tl.load(w + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    logit = tl.sum(total, 0) + tl.load(bias).to(tl.float32)
    if EMBED:
        prev = tl.load(anchor + row, mask=slot == 0, other=0)
        prev += tl.load(tokens + row * SLOTS + slot - 1, mask=slot > 0, other=0)
        r = tl.arange(0, CHUNK)
        code = tl.load(w1 + prev * RANK + r, mask=r < RANK, other=0.0).to(tl.float32)
        weights = tl.load(w + WIDTH + r, mask=r < RANK, other=0.0).to(tl.float32)
        logit += tl.sum(code * weights, 0)
    tl.store(out + row * SLOTS + slot, logit)


def markov_sample(
    base: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    coins: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    ids: Tensor | None = None,
    hidden: Tensor | None = None,
    confidence: tuple[Tensor, Tensor] | None = None,
    coder: Coder | None = None,
    *,
    block: int = BLOCK,
    chunk: int = 64,
    warps: int = 8,
    rows: int | None = None,
) -> Drafted:
    """See `markov_sample.markov_sample`. Keywords: what a sweep varies."""
    batch, slots, width = base.shape
    coins = None if coins is None else coins.contiguous()  # often the first columns of a block's
    tiles, device = triton.cdiv(width, block), base.device
    out = _outputs(batch, slots, width, device)
    rows = rows or (1 if batch == 1 else ROWS_AT_ONCE)
    sums = Tiles(
        torch.empty(batch, tiles, device=device),
        torch.empty(batch, tiles, dtype=torch.float64, device=device),
        torch.empty(batch, device=device),
        block,
    )
    bests = torch.empty(batch, tiles, dtype=torch.int64, device=device)
    flats, slopes = torch.empty(2, batch, tiles, device=device)
    warm, cut = temperature is not None, top_k is not None or top_p is not None
    rank = w1.shape[1]
    chunk = min(chunk, max(16, triton.next_power_of_2(rank)))
    codes = None
    if coder is not None:
        codes = markov_code_triton.Codes(coder, w1, anchor, out.tokens)
    for slot in range(slots):
        if codes is not None:
            codes.make(slot)
        _scores[(triton.cdiv(batch, rows), tiles)](
            base, anchor, out.tokens, w1 if codes is None else codes.table, w2, temperature,
            out.scores, sums.peaks, bests, sums.masses, flats, slopes,
            slot, batch, width, tiles, base.stride(0), base.stride(1),
            SLOTS=slots, RANK=rank, WARM=warm, ROWS=rows, BLOCK=block, CHUNK=chunk,
            CODED=codes is not None, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
        if cut and temperature is not None:
            find_cuts(out.scores[:, slot], sums, temperature, top_k, top_p, slots * width, width)
        _choose[(batch,)](
            out.scores, temperature, coins, ids, sums.peaks, bests, sums.masses, sums.cuts,
            flats, slopes, out.tokens, *out.law, out.entropy, out.peak, slot, width, tiles,
            SLOTS=slots, WARM=warm, CUT=cut, IDS=ids is not None,
            TILES=triton.next_power_of_2(tiles), BLOCK=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if confidence is None:
        return out
    assert hidden is not None
    trust, (weight_, bias) = torch.empty(batch, slots, device=device), confidence
    _trust[(batch, slots)](
        hidden, anchor, out.tokens, w1, weight_, bias, trust, hidden.stride(0), hidden.stride(1),
        SLOTS=slots, RANK=rank, WIDTH=hidden.shape[-1],
        EMBED=weight_.shape[-1] > hidden.shape[-1], BLOCK=1024,
        CHUNK=triton.next_power_of_2(rank), num_warps=4,
    )  # fmt: skip
    return out._replace(confidence=trust)


def _outputs(batch: int, slots: int, width: int, device: torch.device) -> Drafted:
    def empty(*more: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, slots, *more, dtype=dtype, device=device)

    law = Law(empty(dtype=torch.float64), empty(), empty(dtype=torch.float64))
    return Drafted(empty(dtype=torch.int64), empty(width), law, empty(), None, empty())


def refuses(
    base: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    coins: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    ids: Tensor | None = None,
    hidden: Tensor | None = None,
    confidence: tuple[Tensor, Tensor] | None = None,
    coder: Coder | None = None,
) -> str | None:
    """Why the kernel cannot take these; None: it can."""
    if base.dtype == torch.float64 or w1.dtype == torch.float64:
        return "float64: scores are float32 here"
    if w1.dtype != w2.dtype:
        return f"tables of {w1.dtype} and {w2.dtype}"
    if base.stride(-1) != 1 or not (w1.is_contiguous() and w2.is_contiguous()):
        return "rows that are not contiguous"
    if not all(x is None or x.is_contiguous() for x in (anchor, temperature, top_k, top_p, ids)):
        return "anchors, settings or ids that are not contiguous"
    if (temperature is None) != (coins is None):
        return "coins without a temperature, or the other way round"
    if 0 in base.shape:
        return "nothing to draft"
    if confidence is not None and (hidden is None or hidden.stride(-1) != 1):
        return "a confidence head without contiguous states to read"
    if confidence is not None and confidence[0].stride(-1) != 1:
        return "a confidence head whose weight is not contiguous"
    return None if coder is None else markov_code_triton.refuses(coder, w1)
