"""Rows of a KDA block against each other and against the state (Triton), for several kernels.

A tile holds S rows: k rows, which update the state, and q rows, which read it. With G the decay
accumulated along a row's ancestors, every row is affine in the entering state S0:

    Z[s,c] = z_s z_c exp(G_s - G_c), c a k row at or above s; times beta_s where s is a k row
    N      = I, then N -= Z[:,c] N[c,:] for every k row c from the root: forward substitution of all
             rows at once, k rows into (I + A)^-1 and q rows into minus their reads of updates
    X, UV  = N beta (z exp G), N beta v                       beta = 1 for q rows
    UV - X S0 = the updates U of k rows, and minus the outputs of q rows
    S'     = diag(exp G_end) S0 + (k exp(G_end - G))^T U      over the kept k rows

X and UV need no state: they are made while it is on its way, and then it takes one product to read
it and one to write it. exp(G_s - G_c) is split into factors where the gate's bound allows it
(exponents to 80), else it is taken by difference, row by row.

Everything is float32. Products run on matrix units with split factors (`PRODUCTS`; AMD's compiler
has none of that kind and multiplies in full), or as sums where there are too few rows for those.
Decays are to base 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
UNIT_EPS: tl.constexpr = tl.constexpr(1e-6)
MAX_EXPONENT = 80.0
PRODUCTS = "tf32x3" if torch.version.hip is None else "ieee"
"""PRECISION of the kernels that are made of these."""


@triton.jit
def unit(x):
    """x [S, K] / sqrt(sum x^2 + eps)."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + UNIT_EPS)[:, None]


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-LOG2E * x))


@triton.jit
def log_decay(a, rate, bound, BOUNDED: tl.constexpr):
    """Base-2 log-decay of a = pre-activation + dt."""
    if BOUNDED:
        g = (LOG2E * bound) * sigmoid(rate * a)
    else:
        # no log1p: where exp(-|a|) vanishes beside 1, its log vanishes beside what counts
        g = -rate * (LOG2E * tl.maximum(a, 0.0) + tl.log2(1.0 + tl.exp2(-LOG2E * tl.abs(a))))
    return g


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a [m, n] times b [n, l] in float32."""
    if a.shape[0] < 8 or a.shape[1] < 16:
        c = tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def pick(x, row):
    """Row ``row`` of x [S, X], [X]."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0])[:, None] == row, x, 0.0), 0)


@triton.jit
def gram_by_factors(z, G, PRECISION: tl.constexpr):
    """z_s z_c exp2(G_s - G_c), [S, S], without a mask."""
    return product(z * tl.exp2(G), tl.trans(z * tl.exp2(-G)), PRECISION)


@triton.jit
def gram_by_difference(z, G, Z, FROM: tl.constexpr, COUNT: tl.constexpr):
    """The columns c = FROM .. FROM + COUNT - 1 of it, added to Z; right where c is above s."""
    cols = tl.arange(0, z.shape[0])[None, :]
    for c in tl.static_range(FROM, FROM + COUNT):
        reach = pick(z, c)[None, :] * tl.exp2(tl.minimum(G - pick(G, c)[None, :], 0.0))
        Z += tl.where(cols == c, tl.sum(z * reach, 1)[:, None], 0.0)
    return Z


@triton.jit
def substitute(N, Z, FROM: tl.constexpr, COUNT: tl.constexpr):
    """N -= Z[:, c] N[c, :] for c = FROM .. FROM + COUNT - 1, in this order."""
    rows, cols = tl.arange(0, N.shape[0])[:, None], tl.arange(0, N.shape[0])[None, :]
    for c in tl.static_range(FROM, FROM + COUNT):
        column = tl.sum(tl.where(cols == c, Z, 0.0), 1)[:, None]
        N -= column * tl.sum(tl.where(rows == c, N, 0.0), 0)[None, :]
    return N


@triton.jit
def first(x, ROWS: tl.constexpr):
    """The first ROWS rows of x [S, X]."""
    if x.shape[0] == ROWS:
        part = x
    else:
        halves = tl.reshape(x, (x.shape[0] // ROWS, ROWS, x.shape[1]))
        at = tl.arange(0, x.shape[0] // ROWS)[:, None, None]
        part = tl.sum(tl.where(at == 0, halves, 0.0), 0)
    return part


@triton.jit
def read(X, state, PRECISION: tl.constexpr):
    """X [n, K] times state [K, V]. Few rows are sums, no matrix product."""
    n: tl.constexpr = X.shape[0]
    if n >= 16:
        seen = tl.dot(X, state, input_precision=PRECISION)
    else:
        at = tl.arange(0, n)[:, None]
        seen = tl.zeros((n, state.shape[1]), dtype=tl.float32)
        for r in tl.static_range(n):
            seen += tl.where(at == r, tl.sum(pick(X, r)[:, None] * state, 0)[None, :], 0.0)
    return seen


@triton.jit
def write(state, decay, E, U, PRECISION: tl.constexpr):
    """diag(decay) state + E^T U for E [n, K], U [n, V]."""
    n: tl.constexpr = E.shape[0]
    if n >= 16:
        new = tl.dot(tl.trans(E), U, input_precision=PRECISION)
        new = tl.fma(tl.broadcast_to(decay[:, None], state.shape), state, new)
    else:
        new = decay[:, None] * state
        for r in tl.static_range(n):
            new += pick(E, r)[:, None] * pick(U, r)[None, :]
    return new
