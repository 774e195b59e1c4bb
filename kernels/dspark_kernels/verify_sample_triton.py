"""`verify_sample` in Triton: four launches for a batch, two where everything is greedy.

    _sums      every tile of every row that was sent: peak, argmax, mass
    (search)   top-k and top-p, see `law_triton`
    _accept    one program per request: laws of its rows, the accepted prefix, what the end needs
    _residual  every tile of the one row that decides: sums of max(p - q, 0)
    _finish    one program per request: draw from them, or from p

Letters as in `verify_sample`; N = B (G + 1) rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from dspark_kernels.verify_sample import Judged

BLOCK = 1024
"""Tokens of a tile."""


@triton.jit
def _sums(
    logits, lengths, temperature, peaks, bests, masses,
    width, tiles, row_stride, slot_stride,
    ROWS: tl.constexpr, WARM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request, slot = row // ROWS, row % ROWS
    x = tile * BLOCK + tl.arange(0, BLOCK)
    # A row behind the cut is not read: all of it counts as -inf.
    read = (x < width) & (slot <= tl.load(lengths + request))
    at = logits + request * row_stride + slot * slot_stride
    s = tl.load(at + x, mask=read, other=float("-inf")).to(tl.float32)
    peak = peak_of(s, 0)
    tl.store(peaks + row * tiles + tile, peak)
    tl.store(bests + row * tiles + tile, tl.min(tl.where(s == peak, x, NOWHERE), 0))
    if WARM:
        scale = scale_of(tl.load(temperature + request))
        w = weight(s, scale, whole(peak, scale), float("-inf"))
        tl.store(masses + row * tiles + tile, tl.sum(w, 0))


@triton.jit
def _drafted(
    scores, law_base, law_cut, law_mass, where, token, scale, at, mask, width,
    WHERE: tl.constexpr,
):  # fmt: skip
    """q of target ids `token` in drafted rows `at`, float64; 0 where not `mask`."""
    index = tl.load(where + token, mask=mask, other=-1).to(tl.int64) if WHERE else token
    mask = mask & (index >= 0)
    s = tl.load(scores + at * width + index, mask=mask, other=float("-inf"))
    base = tl.load(law_base + at)
    w = weight(s, scale, base, tl.load(law_cut + at))
    return tl.where(mask, w / tl.load(law_mass + at), 0.0)


@triton.jit
def _accept(
    logits, tokens, lengths, scores, law_base, law_cut, law_mass, coins, temperature, where,
    peaks, bests, masses, cuts, accepted, next_token, level, fault, end_base, end_mass,
    width, draft_width, tiles, row_stride, slot_stride,
    COUNT: tl.constexpr, WARM: tl.constexpr, CUT: tl.constexpr, POINT: tl.constexpr,
    WHERE: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + request)
    slot = tl.arange(0, SLOTS)
    row = request * (COUNT + 1) + slot
    sent, read = slot < length, slot <= length
    tile = tl.arange(0, TILES)[None, :]
    sums = row[:, None] * tiles + tile
    there = read[:, None] & (tile < tiles)
    each = tl.load(peaks + sums, mask=there, other=float("-inf"))
    peak = peak_of(each, 1)
    best = tl.load(bests + sums, mask=there & (each == peak[:, None]), other=NOWHERE)
    best = tl.minimum(tl.min(best, 1), width - 1).to(tl.int64)
    token = tl.load(tokens + request * COUNT + slot, mask=sent, other=0)
    taken = sent & (token == best)
    if WARM:
        warm = tl.load(temperature + request)
        scale = scale_of(warm)
        base = whole(peak, scale)
        mass = tl.load(masses + sums, mask=there, other=0.0)
        mass = tl.sum(rescaled(mass, whole(each, scale), base[:, None]), 1)
        cut = tl.load(cuts + row, mask=read, other=0.0) if CUT else float("-inf")
        at = logits + request * row_stride + slot * slot_stride + token
        s = tl.load(at, mask=sent, other=float("-inf")).to(tl.float32)
        p = weight(s, scale, base, cut) / mass
        q = 1.0
        if not POINT:
            drafts = tl.where(sent, request * COUNT + slot, 0)
            q = _drafted(scores, law_base, law_cut, law_mass, where, token, scale, drafts, sent,
                         draft_width, WHERE)  # fmt: skip
        u = tl.load(coins + row, mask=sent, other=1.0)
        taken = tl.where(warm == 0, taken, sent & (u * q < p))
    # The first position that was not taken is where the accepted prefix ends.
    prefix = tl.min(tl.where(taken, SLOTS, slot), 0).to(tl.int64)
    end = slot == prefix
    if WARM:
        tl.store(end_base + request, tl.sum(tl.where(end, base, 0.0), 0))
        tl.store(end_mass + request, tl.sum(tl.where(end, mass, 0.0), 0))
    tl.store(accepted + request, prefix)
    tl.store(next_token + request, tl.sum(tl.where(end, best, 0), 0))
    all_sent = tl.where(length < COUNT, 3, 0)
    tl.store(level + request, tl.where(prefix < length, 2, all_sent).to(tl.int64))
    nan, high = peak != peak, peak == float("inf")
    bad = read & (nan | high | (peak == float("-inf")))
    first = tl.min(tl.where(bad, slot, SLOTS), 0)
    kind = tl.where(nan, 0, tl.where(high, 1, 2))
    kind = tl.sum(tl.where(slot == first, kind, 0), 0)
    tl.store(fault + request, tl.where(first < SLOTS, 1 + 3 * first + kind, 0).to(tl.int64))


@triton.jit
def _difference(
    logits, lengths, scores, law_base, law_cut, law_mass, tokens, where,
    cuts, accepted, end_base, end_mass, request, x, scale,
    width, draft_width, row_stride, slot_stride,
    COUNT: tl.constexpr, CUT: tl.constexpr, POINT: tl.constexpr, WHERE: tl.constexpr,
):  # fmt: skip
    """At the row that decides: max(p - q, 0), or p at the cut; and p itself."""
    slot = tl.load(accepted + request)
    at = logits + request * row_stride + slot * slot_stride + x
    s = tl.load(at, mask=x < width, other=float("-inf")).to(tl.float32)
    cut = tl.load(cuts + request * (COUNT + 1) + slot) if CUT else float("-inf")
    w = weight(s, scale, tl.load(end_base + request), cut)
    p = w / tl.load(end_mass + request)
    rejected = slot < tl.load(lengths + request)
    draft = tl.where(rejected, request * COUNT + slot, 0)
    if COUNT == 0:
        q = tl.zeros_like(p)
    elif POINT:
        q = tl.where(rejected & (tl.load(tokens + draft) == x), 1.0, 0.0).to(tl.float64)
    else:
        q = _drafted(scores, law_base, law_cut, law_mass, where, x, scale, draft,
                     rejected & (x < width), draft_width, WHERE)  # fmt: skip
    return tl.maximum(p - q, 0.0), p


@triton.jit
def _residual(
    logits, lengths, scores, law_base, law_cut, law_mass, tokens, where, temperature,
    cuts, accepted, end_base, end_mass, left, whole_p,
    width, draft_width, tiles, row_stride, slot_stride,
    COUNT: tl.constexpr, CUT: tl.constexpr, POINT: tl.constexpr, WHERE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    warm = tl.load(temperature + request)
    if warm > 0:
        x = tile * BLOCK + tl.arange(0, BLOCK)
        r, p = _difference(
            logits, lengths, scores, law_base, law_cut, law_mass, tokens, where,
            cuts, accepted, end_base, end_mass, request, x, scale_of(warm),
            width, draft_width, row_stride, slot_stride, COUNT, CUT, POINT, WHERE,
        )  # fmt: skip
        tl.store(left + request * tiles + tile, tl.sum(r, 0))
        tl.store(whole_p + request * tiles + tile, tl.sum(p, 0))


@triton.jit
def _finish(
    logits, lengths, scores, law_base, law_cut, law_mass, tokens, where, temperature,
    cuts, accepted, end_base, end_mass, left, whole_p, coins, next_token,
    width, draft_width, tiles, row_stride, slot_stride,
    COUNT: tl.constexpr, CUT: tl.constexpr, POINT: tl.constexpr, WHERE: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    warm = tl.load(temperature + request)
    if warm > 0:
        tile = tl.arange(0, TILES)
        at = request * tiles + tile
        sums = tl.load(left + at, mask=tile < tiles, other=0.0)
        total = tl.sum(sums, 0)
        some = total > 0
        if total <= 0:
            sums = tl.load(whole_p + at, mask=tile < tiles, other=0.0)
            total = tl.sum(sums, 0)
        level = tl.load(coins + request * (COUNT + 1) + COUNT) * BELOW_ONE * total
        found, before = tile_of(sums, level, TILES)
        x = found * BLOCK + tl.arange(0, BLOCK)
        r, p = _difference(
            logits, lengths, scores, law_base, law_cut, law_mass, tokens, where,
            cuts, accepted, end_base, end_mass, request, x, scale_of(warm),
            width, draft_width, row_stride, slot_stride, COUNT, CUT, POINT, WHERE,
        )  # fmt: skip
        best = tl.load(next_token + request)
        drawn = token_of(tl.where(some, r, p), x, before, level, best)
        tl.store(next_token + request, drawn.to(tl.int64))


def verify_sample(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    scores: Tensor | None = None,
    law: Law | None = None,
    coins: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    where: Tensor | None = None,
    *,
    block: int = BLOCK,
    warps: int = 4,
) -> Judged:
    """See `verify_sample.verify_sample`. Keywords: what a sweep varies."""
    batch, count = tokens.shape
    tokens, lengths = tokens.contiguous(), lengths.contiguous()  # often columns of a wider tensor
    coins = None if coins is None else coins.contiguous()
    width, device = logits.shape[-1], logits.device
    rows, tiles = batch * (count + 1), triton.cdiv(width, block)
    floats, doubles = (
        torch.empty(rows, tiles, dtype=t, device=device) for t in (torch.float32, torch.float64)
    )
    sums = Tiles(floats, doubles, torch.empty(rows, device=device), block)
    bests = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    judged = Judged(*torch.empty(4, batch, dtype=torch.int64, device=device))
    end = torch.empty(2, batch, dtype=torch.float64, device=device)
    warm, cut = temperature is not None, top_k is not None or top_p is not None
    options = {"num_warps": warps, "enable_fp_fusion": False}
    strides = logits.stride(0), logits.stride(1)
    _sums[(tiles, rows)](
        logits, lengths, temperature, sums.peaks, bests, sums.masses, width, tiles, *strides,
        ROWS=count + 1, WARM=warm, BLOCK=block, **options,
    )  # fmt: skip
    if cut and temperature is not None:
        find_cuts(logits, sums, temperature, top_k, top_p, logits.stride(1), width)
    # Nothing drafted: no law of it is ever read.
    point = scores is None or count == 0
    drafted = (scores, *(law or (None, None, None)))
    draft_width = width if scores is None else scores.shape[-1]
    flags = {"COUNT": count, "CUT": cut, "POINT": point, "WHERE": where is not None}
    size = {"TILES": triton.next_power_of_2(tiles)}
    _accept[(batch,)](
        logits, tokens, lengths, *drafted, coins, temperature, where,
        sums.peaks, bests, sums.masses, sums.cuts, *judged, *end,
        width, draft_width, tiles, *strides,
        WARM=warm, SLOTS=triton.next_power_of_2(count + 1), **size, **flags, **options,
    )  # fmt: skip
    if temperature is None:
        return judged
    parts = torch.empty(2, batch, tiles, dtype=torch.float64, device=device)
    common = (
        logits, lengths, *drafted, tokens, where, temperature,
        sums.cuts, judged.accepted, *end, *parts,
    )  # fmt: skip
    sizes = width, draft_width, tiles, *strides
    _residual[(tiles, batch)](*common, *sizes, BLOCK=block, **flags, **options)
    _finish[(batch,)](
        *common, coins, judged.next_token, *sizes, BLOCK=block, **size, **flags, **options
    )
    return judged


def refuses(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    scores: Tensor | None = None,
    law: Law | None = None,
    coins: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    where: Tensor | None = None,
) -> str | None:
    """Why the kernel cannot take these; None: it can."""
    del lengths
    if logits.dtype == torch.float64:
        return "float64: logits are float32 here"
    if logits.stride(-1) != 1 or (scores is not None and not scores.is_contiguous()):
        return "rows that are not contiguous"
    if not all(
        x is None or x.is_contiguous() for x in (temperature, top_k, top_p, where, *(law or ()))
    ):
        return "settings, ids or a law that are not contiguous"
    evenly = len(tokens) == 1 or logits.stride(0) == logits.shape[1] * logits.stride(1)
    if (top_k is not None or top_p is not None) and not evenly:
        return "rows that are not evenly spaced"
    if (temperature is None) != (coins is None):
        return "coins without a temperature, or the other way round"
    return "no requests" if len(tokens) == 0 else None
