"""A KDA state in matrix registers, and its products with rows of a block (Gluon, NVIDIA).

The state of a head [K, V] is held as four tensors of K / 4 keys, transposed: [V, K / 4] as a matrix
unit leaves sums. See `kda_block_gluon`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from dspark_kernels.kda_block_places import (
    right_places,
    state_places,
    units_of,
    update_places,
)


@gluon.jit
def parts(x):
    """x as a tf32 number and the rest."""
    high = (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit
def left(x, units: gl.constexpr):
    """Sums [V, n] as a left factor: numbered anew, nothing moves."""
    n: gl.constexpr = x.shape[1]
    x = x.reshape(x.shape[0], n // 8, 4, 2).permute(0, 1, 3, 2).reshape(x.shape[0], n)
    return gl.convert_layout(x, gl.DotOperandLayout(0, units, 1), assert_trivial=True)


@gluon.jit
def right(shared, units: gl.constexpr, warps: gl.constexpr):
    """Shared [8, n] as a right factor [n, 8], numbered as `left` does."""
    n: gl.constexpr = shared.shape[1]
    x = shared.load(right_places(8, n, warps))
    x = x.reshape(8, n // 8, 4, 2).permute(1, 3, 2, 0).reshape(n, 8)
    return gl.convert_layout(x, gl.DotOperandLayout(1, units, 1), assert_trivial=True)


@gluon.jit
def twice_left(x, units: gl.constexpr):
    """Both parts of sums [V, 8] side by side, as a left factor [V, 16]."""
    high, low = parts(x)
    both = gl.join(high, low).permute(0, 2, 1).reshape(x.shape[0], 16)
    return left(both, units)


@gluon.jit
def _twice_right(x, units: gl.constexpr):
    """A right factor [8, n] of rows numbered anew, twice: [16, n]."""
    n: gl.constexpr = x.shape[1]
    both = gl.join(x, x).permute(2, 0, 1).reshape(16, n)
    return gl.convert_layout(both, gl.DotOperandLayout(1, units, 1), assert_trivial=True)


@gluon.jit
def times_small(twice, shared, total, units: gl.constexpr, warps: gl.constexpr):
    """total [V, 8] + (both parts of x [V, 8]) times the transpose of shared [8, 8]."""
    x = shared.load(right_places(8, 8, warps)).reshape(8, 4, 2).permute(2, 1, 0).reshape(8, 8)
    high, low = parts(x)
    total = mma_v2(twice, _twice_right(high, units), total, input_precision="tf32")
    return mma_v2(twice, _twice_right(low, units), total, input_precision="tf32")


@gluon.jit
def seen(state, X, at: gl.constexpr, totals, units: gl.constexpr, warps: gl.constexpr):
    """totals + state [V, n] times X[:, at : at + n]^T: [V, 8] of each pair of parts apart, so that
    no product waits for another's."""
    high, low = parts(state)
    high, low = left(high, units), left(low, units)
    x_high, x_low = parts(right(X.slice(at, state.shape[1], 1), units, warps))
    return (
        mma_v2(high, x_high, totals[0], input_precision="tf32"),
        mma_v2(low, x_high, totals[1], input_precision="tf32"),
        mma_v2(high, x_low, totals[2], input_precision="tf32"),
    )


@gluon.jit
def write(state, decay, Y, at: gl.constexpr, twice, units: gl.constexpr, warps: gl.constexpr):
    """decay (state [V, n] + (both parts of U^T [V, 8]) times Y[:, at : at + n])."""
    n: gl.constexpr = state.shape[1]
    x = Y.slice(at, n, 1).load(update_places(n, warps))
    x = x.reshape(4, 2, n).permute(1, 0, 2).reshape(8, n)
    high, low = parts(x)
    state = mma_v2(twice, _twice_right(high, units), state, input_precision="tf32")
    state = mma_v2(twice, _twice_right(low, units), state, input_precision="tf32")
    return state * decay.slice(at, n).load(gl.SliceLayout(0, units))[None, :]


@gluon.jit
def _across(x, units: gl.constexpr):
    """A state [n, V] transposed, as sums lie."""
    n: gl.constexpr = x.shape[0]
    V: gl.constexpr = x.shape[1]
    x = x.reshape(n, V // 16, 8, 2).permute(1, 3, 2, 0).reshape(V, n)
    return gl.convert_layout(x, units, assert_trivial=True)


@gluon.jit
def _back(x, places: gl.constexpr):
    """`_across`, undone."""
    n: gl.constexpr = x.shape[1]
    V: gl.constexpr = x.shape[0]
    x = x.reshape(V // 16, 2, 8, n).permute(3, 0, 2, 1).reshape(n, V)
    return gl.convert_layout(x, places, assert_trivial=True)


@gluon.jit
def rows_across(x, warps: gl.constexpr):
    """Rows [8, V] that lie as a state does, as sums [V, 8] lie."""
    return _across(x, units_of(warps))


@gluon.jit
def rows_back(x, warps: gl.constexpr):
    """`rows_across`, undone."""
    return _back(x, state_places(8, warps))


@gluon.jit
def places_in(K: gl.constexpr, V: gl.constexpr, warps: gl.constexpr):
    """Of K / 4 keys and 16 columns a warp in a state [K, V]."""
    places: gl.constexpr = state_places(K // 4, warps)
    n = gl.arange(0, K // 4, gl.SliceLayout(1, places))[:, None]
    return n * V + gl.arange(0, 16 * warps, gl.SliceLayout(0, places))[None, :]


@gluon.jit
def load_state(tile, STEP: gl.constexpr):
    """From places `places_in` and STEP, 2 STEP, 3 STEP behind them."""
    return gl.load(tile), gl.load(tile + STEP), gl.load(tile + 2 * STEP), gl.load(tile + 3 * STEP)


@gluon.jit
def ask_state(start, K: gl.constexpr, V: gl.constexpr, warps: gl.constexpr):
    """16 columns a warp of a state [K, V] set out for shared memory, where `arrived` finds them.

    The compiler leaves copies where they stand. Loads of a state it puts off until other loads have
    brought what is computed first, and so they begin when those have ended.
    """
    columns: gl.constexpr = 16 * warps
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // columns, columns // 4], [warps, 1], [1, 0]
    )
    key = gl.arange(0, K, gl.SliceLayout(1, wide))[:, None]
    column = gl.arange(0, columns, gl.SliceLayout(0, wide))[None, :]
    asked = gl.allocate_shared_memory(
        gl.float32, [K, columns], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    )
    async_copy.async_copy_global_to_shared(asked, start + key * V + column, cache_modifier=".cg")
    async_copy.commit_group()
    return asked


@gluon.jit
def arrived(asked, warps: gl.constexpr):
    """What `ask_state` has brought, as `load_state` leaves it."""
    N: gl.constexpr = asked.shape[0] // 4
    places: gl.constexpr = state_places(N, warps)
    async_copy.wait_group(0)
    return (
        asked.slice(0, N).load(places),
        asked.slice(N, N).load(places),
        asked.slice(2 * N, N).load(places),
        asked.slice(3 * N, N).load(places),
    )


@gluon.jit
def state_across(s, warps: gl.constexpr):
    """What was loaded, ready for products."""
    units: gl.constexpr = units_of(warps)
    return _across(s[0], units), _across(s[1], units), _across(s[2], units), _across(s[3], units)


@gluon.jit
def store_state(tile, STEP: gl.constexpr, s, warps: gl.constexpr):
    """`load_state` and `state_across`, undone."""
    places: gl.constexpr = state_places(s[0].shape[1], warps)
    gl.store(tile, _back(s[0], places))
    gl.store(tile + STEP, _back(s[1], places))
    gl.store(tile + 2 * STEP, _back(s[2], places))
    gl.store(tile + 3 * STEP, _back(s[3], places))


@gluon.jit
def seen_by(s, X, warps: gl.constexpr):
    """X S for X [8, K]: [V, 8]."""
    units: gl.constexpr = units_of(warps)
    N: gl.constexpr = s[0].shape[1]
    none = gl.zeros([s[0].shape[0], 8], gl.float32, units)
    a = seen(s[0], X, 0, (none, none, none), units, warps)
    a = seen(s[1], X, N, a, units, warps)
    a = seen(s[2], X, 2 * N, a, units, warps)
    a = seen(s[3], X, 3 * N, a, units, warps)
    return a[0] + (a[1] + a[2])


@gluon.jit
def seen_by_both(s, X, Y, warps: gl.constexpr):
    """`seen_by` of two, from one reading of the state's parts."""
    units: gl.constexpr = units_of(warps)
    N: gl.constexpr = s[0].shape[1]
    none = gl.zeros([s[0].shape[0], 8], gl.float32, units)
    a, b = (none, none, none), (none, none, none)
    a, b = seen(s[0], X, 0, a, units, warps), seen(s[0], Y, 0, b, units, warps)
    a, b = seen(s[1], X, N, a, units, warps), seen(s[1], Y, N, b, units, warps)
    a, b = seen(s[2], X, 2 * N, a, units, warps), seen(s[2], Y, 2 * N, b, units, warps)
    a, b = seen(s[3], X, 3 * N, a, units, warps), seen(s[3], Y, 3 * N, b, units, warps)
    return a[0] + (a[1] + a[2]), b[0] + (b[1] + b[2])
