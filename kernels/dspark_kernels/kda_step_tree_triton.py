"""Rows of a tree over one state (Triton); see `kda.step`.

A program holds BV columns of one head's state; it reads them once, and writes them once if any row
is kept. A tile of rows is TP k rows over TP q rows; the algebra is that of `kda_rows_triton`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda_rows_triton import (
    LOG2E,
    gram_by_difference,
    pick,
    product,
    read,
    substitute,
    write,
)
from dspark_kernels.overlap import begin, wait

exact_floats()


@triton.jit
def tree_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, end_ptr,
    upto_ptr, keep, upto_stride,
    s_qb, s_qt, s_kb, s_kt, s_vb, s_vt, s_gb, s_gt, s_bb, s_bt,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    TP: tl.constexpr, WRITE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows TP: k of all rows; behind them q of all rows."""
    part = tl.program_id(0) % (V // BV)
    place = tl.program_id(0) // (V // BV)
    b, h = (place // H).to(tl.int64), place % H
    rows, cols, ks = tl.arange(0, 2 * TP), part * BV + tl.arange(0, BV), tl.arange(0, K)
    t = rows % TP
    key, real = rows < TP, t < T
    begin(EARLY)
    wait(EARLY)
    at_t, at_k = t[:, None], h * K + ks[None, :]
    in_k, in_q = (real & key)[:, None], (real & ~key)[:, None]
    k = tl.load(k_ptr + b * s_kb + at_t * s_kt + at_k, mask=in_k, other=0.0)
    q = tl.load(q_ptr + b * s_qb + at_t * s_qt + at_k, mask=in_q, other=0.0)
    g = tl.load(g_ptr + b * s_gb + at_t * s_gt + at_k, mask=in_k, other=0.0)
    at_v = b * s_vb + at_t * s_vt + h * V + cols[None, :]
    v = tl.load(v_ptr + at_v, mask=in_k, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + b * s_bb + t * s_bt + h, mask=real & key, other=0.0).to(tl.float32)
    z, g = k.to(tl.float32) + q.to(tl.float32), g.to(tl.float32) * LOG2E
    tile = (b * H + h) * K * V + ks[:, None] * V + cols[None, :]
    beta = tl.where(key, tl.where(real, beta, 0.0), 1.0)
    at_upto = b * upto_stride + t[:, None] * T + t[None, :]
    upto = tl.load(upto_ptr + at_upto, mask=real[:, None] & real[None, :], other=0) != 0
    above = key[None, :] & (upto | (t[:, None] == t[None, :]))
    G = product(tl.where(above, 1.0, 0.0), g, PRECISION)
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
