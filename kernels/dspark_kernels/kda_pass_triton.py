"""Ready rows over a state that stays in registers from its load to its store (Triton).

    S <- d S ;  u = beta (v - k S) ;  S <- S + k u^T ;  o = q S

The state is a tile [KK, P, KC, VV]: every warp holds VV columns of all K = KK KC keys, so that a
sum over keys needs no other warp. Rows are ready in memory, float32: while one passes, the next is
on its way.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places(K: tl.constexpr, V: tl.constexpr, P: tl.constexpr, VV: tl.constexpr):
    """Where the numbers of a tile stand in a state [K, V], from its first column on.

    The order of the dimensions is what gives warps to P, lanes to KK and registers to KC.
    """
    KK: tl.constexpr = 128 // VV
    kk, p = tl.arange(0, KK)[:, None, None, None], tl.arange(0, P)[None, :, None, None]
    kc = tl.arange(0, K // KK)[None, None, :, None]
    vv = tl.arange(0, VV)[None, None, None, :]
    return _key(kk, kc, KK, K // KK) * V + p * VV + vv


@triton.jit
def _key(kk, kc, KK: tl.constexpr, KC: tl.constexpr):
    """The key at place kk, kc: four neighbours to a lane, and lanes beside each other."""
    if KC >= 4:  # noqa: SIM108
        key = kc // 4 * (4 * KK) + kk * 4 + kc % 4
    else:
        key = kk * KC + kc
    return key


@triton.jit
def _vector(ptr, KK: tl.constexpr, KC: tl.constexpr):
    """K numbers as the tile wants them, [KK, KC]."""
    return tl.load(ptr + _key(tl.arange(0, KK)[:, None], tl.arange(0, KC)[None, :], KK, KC))


@triton.jit
def _seen(state, k):
    """k [KK, KC] times the state: [P, VV]."""
    return tl.sum(tl.sum(k[:, None, :, None] * state, 2), 0)


@triton.jit
def fold_rows(state, k_ptr, d_ptr, v_ptr, b_ptr, n, K: tl.constexpr, V: tl.constexpr):
    """The state after n rows; the row behind them is read, too, and not used."""
    KK: tl.constexpr = state.shape[0]
    KC: tl.constexpr = state.shape[2]
    VV: tl.constexpr = state.shape[3]
    at = tl.arange(0, state.shape[1])[:, None] * VV + tl.arange(0, VV)[None, :]
    k, d = _vector(k_ptr, KK, KC), _vector(d_ptr, KK, KC)
    v, beta = tl.load(v_ptr + at), tl.load(b_ptr)
    for i in range(1, n + 1):
        state *= d[:, None, :, None]
        u = beta * (v - _seen(state, k))
        state += k[:, None, :, None] * u[None, :, None, :]
        k, d = _vector(k_ptr + i * K, KK, KC), _vector(d_ptr + i * K, KK, KC)
        v, beta = tl.load(v_ptr + i * V + at), tl.load(b_ptr + i)
    return state


@triton.jit
def read_rows(
    state, q_ptr, k_ptr, d_ptr, v_ptr, b_ptr, o_ptr, tile, n, keep, s_o,
    K: tl.constexpr, V: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Outputs of n rows; the state after ``keep`` of them goes to ``tile``. See `fold_rows`."""
    KK: tl.constexpr = state.shape[0]
    KC: tl.constexpr = state.shape[2]
    VV: tl.constexpr = state.shape[3]
    at = tl.arange(0, state.shape[1])[:, None] * VV + tl.arange(0, VV)[None, :]
    q, k, d = _vector(q_ptr, KK, KC), _vector(k_ptr, KK, KC), _vector(d_ptr, KK, KC)
    v, beta = tl.load(v_ptr + at), tl.load(b_ptr)
    for i in range(1, n + 1):
        state *= d[:, None, :, None]
        u = beta * (v - _seen(state, k))
        state += k[:, None, :, None] * u[None, :, None, :]
        tl.store(o_ptr + (i - 1) * s_o + at, _seen(state, q))
        if WRITE and i == keep:
            tl.store(tile, state)
        q, k = _vector(q_ptr + i * K, KK, KC), _vector(k_ptr + i * K, KK, KC)
        d = _vector(d_ptr + i * K, KK, KC)
        v, beta = tl.load(v_ptr + i * V + at), tl.load(b_ptr + i)


@triton.jit
def read_scaled_rows(
    state, q_ptr, k_ptr, w_ptr, D_ptr, v_ptr, b_ptr, o_ptr, tile, n, keep, s_o,
    K: tl.constexpr, V: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """`read_rows` on S / D, where D is the decay since the first row: one product less a row.

    Ready are q D, k D and w = k / D, which the gate's bound must keep in range.
    """
    KK: tl.constexpr = state.shape[0]
    KC: tl.constexpr = state.shape[2]
    VV: tl.constexpr = state.shape[3]
    at = tl.arange(0, state.shape[1])[:, None] * VV + tl.arange(0, VV)[None, :]
    q, k, w = _vector(q_ptr, KK, KC), _vector(k_ptr, KK, KC), _vector(w_ptr, KK, KC)
    v, beta = tl.load(v_ptr + at), tl.load(b_ptr)
    for i in range(1, n + 1):
        u = beta * (v - _seen(state, k))
        state += w[:, None, :, None] * u[None, :, None, :]
        tl.store(o_ptr + (i - 1) * s_o + at, _seen(state, q))
        if WRITE and i == keep:
            tl.store(tile, _vector(D_ptr + (i - 1) * K, KK, KC)[:, None, :, None] * state)
        q, k = _vector(q_ptr + i * K, KK, KC), _vector(k_ptr + i * K, KK, KC)
        w = _vector(w_ptr + i * K, KK, KC)
        v, beta = tl.load(v_ptr + i * V + at), tl.load(b_ptr + i)
