"""KDA over a few rows in one pass over the state (Triton); `kda.step` specifies it.

One program holds a [K, BV] tile of one head's state: it is read once, and written once if any row
is kept, whatever the number of rows. A tile of rows is TP k rows over TP q rows; the algebra is
that of `kda_rows_triton`.

`gated_step` takes what the projections and the convolution give, and makes q, k, g and beta itself:

    q = K^-1/2 q / |q|;  k = k / |k|;  |x| = sqrt(sum x^2 + 1e-6);  beta = sigmoid(b)
    g = bound sigmoid(exp(A) (a + dt)), or without a bound -exp(A) softplus(a + dt)

Letters: B batch, T rows, H heads, K key width, V value width, BV columns of a tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda_pass_triton import places, read_rows
from dspark_kernels.kda_rows_triton import (
    LOG2E,
    MAX_EXPONENT,
    UNIT_EPS,
    gram_by_difference,
    gram_by_factors,
    log_decay,
    pick,
    product,
    read,
    sigmoid,
    substitute,
    touch,
    unit,
    write,
)
from dspark_kernels.overlap import begin, early, wait

allow_loops()
exact_floats()

MAX_ROWS = 16
WIDTHS = (64, 128, 256)


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, end_ptr,
    upto_ptr, rate_ptr, dt_ptr, scale, bound, keep, upto_stride,
    s_qb, s_qt, s_kb, s_kt, s_vb, s_vt, s_gb, s_gt, s_bb, s_bt,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    TP: tl.constexpr, TREE: tl.constexpr, GATED: tl.constexpr, BOUNDED: tl.constexpr,
    FACTORED: tl.constexpr, WRITE: tl.constexpr, PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % (V // BV)
    place = tl.program_id(0) // (V // BV)
    b, h = (place // H).to(tl.int64), place % H
    rows, cols, ks = tl.arange(0, 2 * TP), part * BV + tl.arange(0, BV), tl.arange(0, K)
    t = rows % TP
    key, real = rows < TP, t < T
    begin(EARLY)
    if PREFETCH > 0:
        touch(state_ptr + (b * H + h) * K * V + part * BV, K, BV, V, PREFETCH)
    wait(EARLY)
    at_t, at_k = t[:, None], h * K + ks[None, :]
    in_k, in_q = (real & key)[:, None], (real & ~key)[:, None]
    k = tl.load(k_ptr + b * s_kb + at_t * s_kt + at_k, mask=in_k, other=0.0)
    q = tl.load(q_ptr + b * s_qb + at_t * s_qt + at_k, mask=in_q, other=0.0)
    g = tl.load(g_ptr + b * s_gb + at_t * s_gt + at_k, mask=in_k, other=0.0)
    at_v = b * s_vb + at_t * s_vt + h * V + cols[None, :]
    v = tl.load(v_ptr + at_v, mask=in_k, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + b * s_bb + t * s_bt + h, mask=real & key, other=0.0).to(tl.float32)
    z, g = k.to(tl.float32) + q.to(tl.float32), g.to(tl.float32)
    tile = (b * H + h) * K * V + ks[:, None] * V + cols[None, :]
    if GATED:
        rate = tl.exp(tl.load(rate_ptr + h))
        g += tl.load(dt_ptr + h * K + ks).to(tl.float32)[None, :]
        g = tl.where(in_k, log_decay(g, rate, bound, BOUNDED), 0.0)
        z = unit(z) * tl.where(key, 1.0, scale)[:, None]
        beta = sigmoid(beta)
    else:
        g = LOG2E * g
    beta = tl.where(key, tl.where(real, beta, 0.0), 1.0)
    above = key[None, :] & (t[:, None] >= t[None, :])
    if TREE:
        at_upto = b * upto_stride + t[:, None] * T + t[None, :]
        upto = tl.load(upto_ptr + at_upto, mask=real[:, None] & real[None, :], other=0) != 0
        above = key[None, :] & (upto | (t[:, None] == t[None, :]))
    G = product(tl.where(above, 1.0, 0.0), g, PRECISION)
    if FACTORED:
        Z = gram_by_factors(z, G, PRECISION)
    else:
        Z = gram_by_difference(z, G, tl.zeros((2 * TP, 2 * TP), tl.float32), 0, T)
    own = rows[:, None] == rows[None, :]
    Z = tl.where(above & ~own, Z * beta[:, None], 0.0)
    N = substitute(tl.where(own, 1.0, 0.0), Z, 0, T) * beta[None, :]
    X, UV = product(N, z * tl.exp2(G), PRECISION), product(N, v, PRECISION)

    end = pick(G, keep - 1)
    decay = tl.exp2(end)
    state = tl.load(state_ptr + tile)
    R = UV - read(X, state, PRECISION)
    at_out = ((b * T + t[:, None]) * H + h) * V + cols[None, :]
    tl.store(out_ptr + at_out, -R, mask=in_q)
    if WRITE:
        kept = (rows < keep)[:, None]
        E = tl.where(kept, z * tl.exp2(tl.minimum(end[None, :] - G, 0.0)), 0.0)
        tl.store(end_ptr + tile, write(state, decay, E, R, PRECISION))


@triton.jit
def _chain(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, end_ptr, rate_ptr, dt_ptr, ready_ptr,
    scale, bound, keep,
    s_qb, s_qt, s_kb, s_kt, s_vb, s_vt, s_gb, s_gt, s_bb, s_bt,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    VV: tl.constexpr, TP: tl.constexpr, GATED: tl.constexpr, BOUNDED: tl.constexpr,
    WRITE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of a chain: all made ready at once, then one after another over a tile of state."""
    part, place = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    b, h = (place // H).to(tl.int64), place % H
    t, ks, vs = tl.arange(0, TP), tl.arange(0, K), part * BV + tl.arange(0, BV)
    tile = (b * H + h) * K * V + part * BV + places(K, V, BV // VV, VV)
    begin(EARLY)
    if EARLY:
        touch(state_ptr + (b * H + h) * K * V + part * BV, K, BV, V, 8)
    wait(EARLY)
    real, at = (t < T)[:, None], t[:, None]
    q = tl.load(q_ptr + b * s_qb + at * s_qt + h * K + ks, mask=real, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + b * s_kb + at * s_kt + h * K + ks, mask=real, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + b * s_gb + at * s_gt + h * K + ks, mask=real, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + b * s_vb + at * s_vt + h * V + vs, mask=real, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + b * s_bb + t * s_bt + h, mask=t < T, other=0.0).to(tl.float32)
    state = tl.load(state_ptr + tile)
    if GATED:
        rate = tl.exp(tl.load(rate_ptr + h))
        g = log_decay(g + tl.load(dt_ptr + h * K + ks), rate, bound, BOUNDED)
        q, k, beta = scale * unit(q), unit(k), sigmoid(beta)
    else:
        g = LOG2E * g
    q_ptr = ready_ptr + tl.program_id(0).to(tl.int64) * (T + 1) * (3 * K + BV + 16)
    k_ptr, d_ptr = q_ptr + (T + 1) * K, q_ptr + 2 * (T + 1) * K
    v_ptr = q_ptr + 3 * (T + 1) * K
    beta_ptr = v_ptr + (T + 1) * BV
    tl.store(q_ptr + at * K + ks, q, real)
    tl.store(k_ptr + at * K + ks, k, real)
    tl.store(d_ptr + at * K + ks, tl.exp2(g), real)
    tl.store(v_ptr + at * BV + tl.arange(0, BV), v, real)
    tl.store(beta_ptr + t, beta, t < T)
    tl.debug_barrier()
    out_ptr += (b * T * H + h) * V + part * BV
    read_rows(state, q_ptr, k_ptr, d_ptr, v_ptr, beta_ptr, out_ptr, end_ptr + tile, T, keep, H * V,
              K, BV, WRITE)  # fmt: skip


@triton.jit
def _one(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, end_ptr, rate_ptr, dt_ptr,
    scale, bound, s_qb, s_kb, s_vb, s_gb, s_bb,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, BOUNDED: tl.constexpr, WRITE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A single row, without tiles of rows: two sums over the state, and one product of vectors."""
    place, part = tl.program_id(0) // (V // BV), tl.program_id(0) % (V // BV)
    b, h = (place // H).to(tl.int64), place % H
    cols, ks = part * BV + tl.arange(0, BV), tl.arange(0, K)
    begin(EARLY)
    if EARLY:
        touch(state_ptr + (b * H + h) * K * V + part * BV, K, BV, V, 8)
    wait(EARLY)
    q = tl.load(q_ptr + b * s_qb + h * K + ks).to(tl.float32)
    k = tl.load(k_ptr + b * s_kb + h * K + ks).to(tl.float32)
    g = tl.load(g_ptr + b * s_gb + h * K + ks).to(tl.float32)
    v = tl.load(v_ptr + b * s_vb + h * V + cols).to(tl.float32)
    beta = tl.load(beta_ptr + b * s_bb + h).to(tl.float32)
    tile = (b * H + h) * K * V + ks[:, None] * V + cols[None, :]
    if GATED:
        rate = tl.exp(tl.load(rate_ptr + h))
        dt = tl.load(dt_ptr + h * K + ks).to(tl.float32)
    state = tl.load(state_ptr + tile)
    if GATED:
        decay = tl.exp2(log_decay(g + dt, rate, bound, BOUNDED))
        beta = sigmoid(beta)
        k *= tl.rsqrt(tl.sum(k * k, 0) + UNIT_EPS)
        q *= scale * tl.rsqrt(tl.sum(q * q, 0) + UNIT_EPS)
    else:
        decay = tl.exp2(LOG2E * g)
    state *= decay[:, None]
    sums = tl.sum(tl.join(k[:, None] * state, q[:, None] * state), 0)
    seen, read = tl.split(sums)
    u = beta * (v - seen)
    tl.store(out_ptr + (b * H + h) * V + cols, read + tl.sum(q * k, 0) * u)
    if WRITE:
        tl.store(end_ptr + tile, state + k[:, None] * u[None, :])


def padded(rows: int) -> int:
    """Rows of a tile."""
    return next(size for size in (8, 16) if rows <= size)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, keep: int,
    out: Tensor | None, upto: Tensor | None, gate: tuple[Tensor, Tensor] | None,
    lower_bound: float | None, shape: tuple[int, int] | None = None, factored: bool = True,
    prefetch: int = 8, vv: int = 16, maxnreg: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, T, H, K = q.shape
    V = v.shape[-1]
    new = state if keep == 0 else torch.empty_like(state) if out is None else out
    read = torch.empty((B, T, H, V), dtype=torch.float32, device=q.device)
    rate, dt = gate if gate is not None else (q, q)
    BV, warps = shape or (32, 4)
    bound, bounded = 0.0 if lower_bound is None else lower_bound, lower_bound is not None
    grid = (V // BV * B * H,)
    more = {} if maxnreg is None else dict(maxnreg=maxnreg)
    if T == 1:
        _one[grid](
            q, k, v, g, beta, state, read, new, rate, dt, K**-0.5, bound,
            q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0),
            H=H, K=K, V=V, BV=BV, GATED=gate is not None, BOUNDED=bounded, WRITE=keep > 0,
            num_warps=warps, **more, **early(),
        )  # fmt: skip
        return read, new
    if upto is None:
        size = (T + 1) * (3 * K + BV + 16)
        ready = torch.empty(grid[0] * size, dtype=torch.float32, device=q.device)
        _chain[grid](
            q, k, v, g, beta, state, read, new, rate, dt, ready, K**-0.5, bound, keep,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            g.stride(0), g.stride(1), beta.stride(0), beta.stride(1),
            T=T, H=H, K=K, V=V, BV=BV, VV=vv, TP=triton.next_power_of_2(T), GATED=gate is not None,
            BOUNDED=bounded, WRITE=keep > 0, num_warps=BV // vv, num_stages=1, **more, **early(),
        )  # fmt: skip
        return read, new
    factored = factored and lower_bound is not None and -lower_bound * T <= MAX_EXPONENT
    _kernel[grid](
        q, k, v, g, beta, state, read, new, q if upto is None else upto.to(torch.int8), rate, dt,
        K**-0.5, bound, keep, 0 if upto is None or upto.shape[0] == 1 else T * T,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        g.stride(0), g.stride(1), beta.stride(0), beta.stride(1),
        T=T, H=H, K=K, V=V, BV=BV, TP=padded(T), TREE=upto is not None, GATED=gate is not None,
        BOUNDED=bounded, FACTORED=factored, WRITE=keep > 0, PREFETCH=prefetch,
        PRECISION="tf32x3", num_warps=warps, **early(),
    )  # fmt: skip
    return read, new


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, keep: int,
    out: Tensor | None = None, upto: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kda.step`."""
    return _launch(q, k, v, g, beta, state, keep, out, upto, None, None)


def refuses(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, keep: int,
    out: Tensor | None = None, upto: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why `step` cannot take these."""
    rows = (q, k, v, g, beta)
    if not 1 <= q.shape[1] <= MAX_ROWS:
        return f"{q.shape[1]} rows, it takes 1 to {MAX_ROWS}"
    if q.shape[-1] not in WIDTHS or v.shape[-1] not in WIDTHS:
        return f"heads of {q.shape[-1]} x {v.shape[-1]}, it takes widths of {WIDTHS}"
    if q.shape[2] != k.shape[2] or k.shape[2] != v.shape[2]:
        return "another number of heads in q, k and v"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*rows, state)):
        return "it has no backward"
    if state.dtype != torch.float32 or any(x.dtype == torch.float64 for x in rows):
        return f"a {state.dtype} state, or rows in float64"
    if not state.is_contiguous() or not (out is None or out.is_contiguous()):
        return "a state that is not contiguous"
    if not all(_dense_inside(x) for x in rows):
        return "rows whose heads are not contiguous"
    return None


def _dense_inside(x: Tensor) -> bool:
    """One row of one sequence stands together."""
    return x[0, 0].is_contiguous()


def gated_step(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, keep: int, out: Tensor | None = None, upto: Tensor | None = None,
    lower_bound: float | None = None, shape: tuple[int, int] | None = None, factored: bool = True,
    prefetch: int = 8, vv: int = 16, maxnreg: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`step` of raw rows: q, k, v after the convolution, a [B, T, H, K] before dt and gate, b
    [B, T, H] before the sigmoid."""
    gate = (A_log, dt_bias)
    return _launch(
        q,
        k,
        v,
        a,
        b,
        state,
        keep,
        out,
        upto,
        gate,
        lower_bound,
        shape,
        factored,
        prefetch,
        vv,
        maxnreg,
    )
