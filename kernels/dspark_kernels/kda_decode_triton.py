"""A KDA layer of one round in one launch (Triton); `kda_decode` specifies it.

One program holds one head of one sequence. Its rows are a tile of parts, each of TP rows:

    0  k of the slots        1  q of the new rows        2  k of the new rows        3  none

and without slots 0 is the k of the new rows and there are no more than two. Only the first two are
read against the state, unless new rows are folded in on top of slots. The algebra is that of
`kda_rows_triton`. The state passes in tiles of BV columns; the norm over all of them ends it.

Raw rows go back into the window and the slots last of all, behind a barrier: no other program reads
or writes the channels of this head.

Letters: B batch, T new rows, R slots, H heads, K key width, V value width, C channels, W width of
the convolution, S rows of a tile, NX of them read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda_decode import check
from dspark_kernels.kda_round_triton import round_kernel
from dspark_kernels.kda_rows_triton import (
    MAX_EXPONENT,
    first,
    gram_by_difference,
    gram_by_factors,
    log_decay,
    product,
    read,
    sigmoid,
    substitute,
    touch,
    unit,
    write,
)
from dspark_kernels.overlap import begin, early, wait

exact_floats()

MAX_ROWS = 16
PROGRAMS = 396
"""Most programs of a launch: three for each processor of an H200."""
WIDTHS = (64, 128)


@triton.jit
def _convolved(
    rows_ptr, held_ptr, conv_ptr, taps_ptr, at, at_q, at_k, query, n, t, slot, real, s_rt, s_ht, C,
    TREE: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """silu of the convolution at channels ``at`` of every row, [S, X], zeros where not real; the
    weights stand at ``at_q`` for query rows and at ``at_k`` for others, [1, X]."""
    x = tl.zeros((t.shape[0], at_q.shape[1]), dtype=tl.float32)
    for w in tl.static_range(W):
        place = t + w
        if TREE:
            place = tl.load(taps_ptr + t * W + w, mask=real & ~slot, other=0)
        in_held = real & (slot | (place < W - 1))
        held, new = tl.where(slot, t + w, n + place)[:, None], (place - (W - 1))[:, None]
        u = tl.load(held_ptr + held * s_ht + at, mask=in_held[:, None], other=0.0).to(tl.float32)
        u += tl.load(rows_ptr + new * s_rt + at, mask=(real & ~in_held)[:, None], other=0.0)
        weight = tl.load(conv_ptr + w * C + at_k)
        weight = tl.where(query[:, None], tl.load(conv_ptr + w * C + at_q), weight)
        x += u * weight
    return x * sigmoid(x)


@triton.jit
def _raw(
    rows_ptr, held_ptr, at, n, s_rt, s_ht,
    T: tl.constexpr, W: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Channels ``at`` [1, X] of the rows that the next round shall find: [ROWS, X]."""
    i = tl.arange(0, ROWS)[:, None]
    if FOLD:
        in_held, new = i + T < W - 1, i + T - (W - 1)
        held = n + T + i
        in_new = ~in_held & (i < W - 1)
    else:
        in_held, new = i < W - 1, i - (W - 1)
        held = n + i
        in_new = ~in_held & (new < T)
    x = tl.load(held_ptr + held * s_ht + at, mask=in_held, other=0.0)
    return x + tl.load(rows_ptr + new * s_rt + at, mask=in_new, other=0.0)


@triton.jit
def _put(held_ptr, at, x, s_ht, T: tl.constexpr, W: tl.constexpr, FOLD: tl.constexpr):
    i = tl.arange(0, x.shape[0])[:, None]
    tl.store(held_ptr + i * s_ht + at, x, mask=i < (W - 1 if FOLD else W - 1 + T))


@triton.jit
def _kernel(
    rows_ptr, decay_ptr, beta_ptr, gate_ptr, held_ptr, held_decay_ptr, held_beta_ptr, accepted_ptr,
    state_ptr, conv_ptr, rate_ptr, dt_ptr, norm_ptr, upto_ptr, taps_ptr, out_ptr,
    scale, eps, bound, upto_stride, taps_stride,
    s_rb, s_rt, s_db, s_dt, s_bb, s_bt, s_gb, s_gt, s_hb, s_ht, s_hdb, s_hdt, s_hbb, s_hbt, s_sb,
    T: tl.constexpr, R: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, BV: tl.constexpr, TP: tl.constexpr, HELD: tl.constexpr, TREE: tl.constexpr,
    FOLD: tl.constexpr, BOUNDED: tl.constexpr, FACTORED: tl.constexpr, PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = 4 * TP if R > 0 else 2 * TP
    NX: tl.constexpr = S if FOLD else 2 * TP
    NEW: tl.constexpr = 2 if R > 0 else 0
    C: tl.constexpr = H * (2 * K + V)
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    ks, s = tl.arange(0, K), tl.arange(0, S)
    rows_ptr += b * s_rb
    held_ptr += b * s_hb
    taps_ptr += b * taps_stride
    state_ptr += b * s_sb + h * K * V
    begin(EARLY)
    if PREFETCH > 0:
        touch(state_ptr, K, V, V, PREFETCH)
    wait(EARLY)
    n = tl.load(accepted_ptr + b).to(tl.int32)
    t, slot, query = s % TP, (s // TP == 0) & (R > 0), s // TP == 1
    new_key = s // TP == NEW
    key = slot | new_key
    real = (slot & (t < n)) | ((query | new_key) & (t < T))
    live = (key & real)[:, None]

    at_q, at_k = (h * K + ks)[None, :], ((H + h) * K + ks)[None, :]
    at = tl.where(query[:, None], at_q, at_k)
    z = _convolved(rows_ptr, held_ptr, conv_ptr, taps_ptr, at, at_q, at_k, query, n, t, slot, real,
                   s_rt, s_ht, C, TREE, W)  # fmt: skip
    in_slot, in_new = (slot & real)[:, None], (new_key & real)[:, None]
    at_a = h * K + ks[None, :]
    held_decay_ptr += b * s_hdb
    held_beta_ptr += b * s_hbb
    decay_ptr += b * s_db
    beta_ptr += b * s_bb
    at_t = t[:, None]
    a = tl.load(held_decay_ptr + at_t * s_hdt + at_a, mask=in_slot, other=0.0).to(tl.float32)
    a += tl.load(decay_ptr + at_t * s_dt + at_a, mask=in_new, other=0.0)
    beta = tl.load(held_beta_ptr + t * s_hbt + h, mask=slot & real, other=0.0).to(tl.float32)
    beta += tl.load(beta_ptr + t * s_bt + h, mask=new_key & real, other=0.0)
    beta = tl.where(key, tl.where(real, sigmoid(beta), 0.0), 1.0)
    rate = tl.exp(tl.load(rate_ptr + h))
    g = tl.where(live, log_decay(a + tl.load(dt_ptr + at_a), rate, bound, BOUNDED), 0.0)
    z = unit(z) * tl.where(query, scale, 1.0)[:, None]

    upto = t[:, None] >= t[None, :]
    if TREE:
        both = (~slot & real)[:, None] & (new_key & real)[None, :]
        upto_ptr += b * upto_stride
        upto = tl.load(upto_ptr + t[:, None] * T + t[None, :], mask=both, other=0) != 0
    chain = ~slot[:, None] | (t[:, None] >= t[None, :])
    above = (key & real)[None, :] & tl.where(slot[None, :], chain, ~slot[:, None] & upto)
    own = s[:, None] == s[None, :]
    G = product(tl.where(above, 1.0, 0.0), g, PRECISION)
    if FACTORED:
        Z = gram_by_factors(z, G, PRECISION)
    else:
        Z = gram_by_difference(z, G, tl.zeros((S, S), tl.float32), 0, R)
        Z = gram_by_difference(z, G, Z, NEW * TP, T)
    Z = tl.where(above & ~own, Z * beta[:, None], 0.0)
    N = substitute(tl.where(own, 1.0, 0.0), Z, 0, R)
    N = first(substitute(N, Z, NEW * TP, T) * beta[None, :], NX)
    X = product(N, z * tl.exp2(G), PRECISION)
    kept = live if FOLD else in_slot
    end = tl.sum(tl.where(kept, g, 0.0), 0)
    E = first(tl.where(kept, z * tl.exp2(tl.minimum(end[None, :] - G, 0.0)), 0.0), NX)
    decay = tl.exp2(end)

    whole = tl.zeros((NX, V // BV, BV), dtype=tl.float32)
    for j in tl.static_range(V // BV):
        cols = j * BV + tl.arange(0, BV)
        at_v = (2 * H * K + h * V + cols)[None, :]
        v = _convolved(rows_ptr, held_ptr, conv_ptr, taps_ptr, at_v, at_v, at_v, query, n, t, slot,
                       key & real, s_rt, s_ht, C, TREE, W)  # fmt: skip
        tile = state_ptr + ks[:, None] * V + cols[None, :]
        state = tl.load(tile)
        updates = product(N, v, PRECISION) - read(X, state, PRECISION)
        if FOLD or n > 0:
            tl.store(tile, write(state, decay, E, updates, PRECISION))
        part = tl.arange(0, V // BV)[None, :, None]
        whole -= tl.where(part == j, updates[:, None, :], 0.0)
    out = tl.reshape(whole, (NX, V))

    x, vs = tl.arange(0, NX), tl.arange(0, V)
    inside = ((x // TP == 1) & (x % TP < T))[:, None]
    row = (x % TP)[:, None]
    gate = tl.load(gate_ptr + b * s_gb + row * s_gt + h * V + vs[None, :], mask=inside, other=0.0)
    out *= tl.rsqrt(tl.sum(out * out, 1) / V + eps)[:, None]
    out *= tl.load(norm_ptr + vs)[None, :] * sigmoid(gate.to(tl.float32))
    tl.store(out_ptr + ((b * T + row) * H + h) * V + vs[None, :], out, mask=inside)

    at_v = (2 * H * K + h * V + vs)[None, :]
    raw_q = _raw(rows_ptr, held_ptr, at_q, n, s_rt, s_ht, T, W, FOLD, HELD)
    raw_k = _raw(rows_ptr, held_ptr, at_k, n, s_rt, s_ht, T, W, FOLD, HELD)
    raw_v = _raw(rows_ptr, held_ptr, at_v, n, s_rt, s_ht, T, W, FOLD, HELD)
    tl.debug_barrier()
    _put(held_ptr, at_q, raw_q, s_ht, T, W, FOLD)
    _put(held_ptr, at_k, raw_k, s_ht, T, W, FOLD)
    _put(held_ptr, at_v, raw_v, s_ht, T, W, FOLD)
    if not FOLD:
        i = tl.arange(0, TP)
        a = tl.load(decay_ptr + i[:, None] * s_dt + at_a, mask=i[:, None] < T)
        tl.store(held_decay_ptr + i[:, None] * s_hdt + at_a, a, mask=i[:, None] < T)
        logits = tl.load(beta_ptr + i * s_bt + h, mask=i < T)
        tl.store(held_beta_ptr + i * s_hbt + h, logits, mask=i < T)


def kda_decode(
    rows: Tensor, decay: Tensor, beta: Tensor, gate: Tensor, held_rows: Tensor,
    held_decay: Tensor, held_beta: Tensor, accepted: Tensor, state: Tensor, conv: Tensor,
    A_log: Tensor, dt_bias: Tensor, norm: Tensor, eps: float, lower_bound: float | None,
    upto: Tensor | None = None, taps: Tensor | None = None, fold: bool = False,
    shape: tuple[int, int] | None = None, prefetch: int = 8, factored: bool = True,
    vv: int = 16, maxnreg: int | None = None, most: int = PROGRAMS,
) -> Tensor:  # fmt: skip
    """`kda_decode.kda_decode`."""
    B, T, _ = rows.shape
    _, H, K, V = state.shape
    R, W = held_decay.shape[1], len(conv)
    check(R, T, upto, taps, fold)
    out = torch.empty((B, T, H * V), dtype=rows.dtype, device=rows.device)
    bound = 0.0 if lower_bound is None else lower_bound
    tensors = (
        rows, decay, beta, gate, held_rows, held_decay, held_beta, accepted, state, conv, A_log,
        dt_bias, norm,
    )  # fmt: skip
    strides = [s for x in tensors[:7] for s in x.stride()[:2]] + [state.stride(0)]
    HELD = triton.next_power_of_2(W - 1 if fold else W - 1 + T)
    if upto is None or taps is None:
        programs = min(B * H, most)
        size = (R + T + 1) * (2 * K + V + 16) + (T + 1) * (K + V)
        ready = torch.empty(programs * size, dtype=torch.float32, device=rows.device)
        round_kernel[(programs,)](
            *tensors, out, ready, B * H, K**-0.5, eps, bound, *strides,
            T=T, R=R, H=H, K=K, V=V, W=W, NR=triton.next_power_of_2(R + T),
            TQ=triton.next_power_of_2(T), HELD=HELD, VV=vv, FOLD=fold,
            BOUNDED=lower_bound is not None, num_warps=V // vv, num_stages=1, **({} if maxnreg is None else dict(maxnreg=maxnreg)), **early(),
        )  # fmt: skip
        return out
    TP = padded(max(R, T))
    factored = factored and lower_bound is not None and -lower_bound * (R + T) <= MAX_EXPONENT
    BV, warps = shape or (min(V, 128), 8)
    branches = (upto.to(torch.int8), taps)
    apart = tuple(x.stride(0) if len(x) > 1 else 0 for x in branches)
    _kernel[(B * H,)](
        *tensors, *branches, out, K**-0.5, eps, bound, *apart, *strides,
        T=T, R=R, H=H, K=K, V=V, W=W, BV=BV, TP=TP, HELD=HELD, TREE=True, FOLD=fold,
        BOUNDED=lower_bound is not None, FACTORED=factored, PREFETCH=prefetch,
        PRECISION="tf32x3", num_warps=warps, **early(),
    )  # fmt: skip
    return out


def refuses(
    rows: Tensor, decay: Tensor, beta: Tensor, gate: Tensor, held_rows: Tensor,
    held_decay: Tensor, held_beta: Tensor, accepted: Tensor, state: Tensor, conv: Tensor,
    A_log: Tensor, dt_bias: Tensor, norm: Tensor, eps: float, lower_bound: float | None,
    upto: Tensor | None = None, taps: Tensor | None = None, fold: bool = False,
) -> str | None:  # fmt: skip
    """Why `kda_decode` cannot take these."""
    K, V = state.shape[-2:]
    small, held = (conv, A_log, dt_bias, norm), (held_rows, held_decay, held_beta)
    if rows.shape[1] > MAX_ROWS or held_decay.shape[1] > MAX_ROWS:
        return f"{rows.shape[1]} rows on {held_decay.shape[1]} slots, it takes up to {MAX_ROWS}"
    if K not in WIDTHS or V not in WIDTHS:
        return f"heads of {K} x {V}, it takes widths of {WIDTHS}"
    if any(x.dtype != torch.float32 for x in (state, *small)):
        return "a state or parameters that are not float32"
    if rows.dtype == torch.float64 or any(x.dtype != rows.dtype for x in held):
        return "rows in float64, or held in another dtype"
    if not all(x[0].is_contiguous() for x in (state, *small[:1])):
        return "a state or weights that are not contiguous"
    if not all(x is None or x[0].is_contiguous() for x in (upto, taps)):
        return "a tree that is not contiguous"
    if any(x.stride(-1) != 1 for x in (rows, decay, beta, gate, *held) if x.numel()):
        return "rows whose channels are not contiguous"
    return None


def padded(rows: int) -> int:
    """Rows of a part of a tile."""
    return next(size for size in (1, 8, 16) if rows <= size)
