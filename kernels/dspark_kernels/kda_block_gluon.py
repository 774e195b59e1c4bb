"""Up to eight rows of a KDA chain as one block over a state in matrix registers (Gluon, NVIDIA).

With G the decay since the block's first row, rows of k and q against each other and the state S:

    X_k = k exp(G), X_q = q exp(G), Y = k exp(-G)     exponents up to 80: the gate must be bounded
    Z   = X Y^T                                       [16, 8]; strictly below the diagonal for k
    M   = (I + diag(beta) Z_k)^-1 diag(beta)          by forward substitution, eight steps
    W   = V - X_k S ;  U = M W ;  O = X_q S + Z_q M W
    S'  = exp(G_end) (S + Y^T U)                      over the kept rows, whose end is G_end

The state is read once and written once, transposed: S^T [V, K] is what a matrix unit leaves and, by
another numbering of the keys, what it takes as a left factor, so it never crosses between threads
(`kda_block_places`). A warp has 16 columns of all K keys. Products are of tf32 numbers in two parts
each, which leaves errors of some 1e-6. Other cards go row by row (`kda_pass_triton`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dspark_kernels.kda_block_places import (
    chunk_places,
    row_places,
    solve_places,
    sum_places,
    units_of,
)
from dspark_kernels.kda_block_state_gluon import parts, times_small, twice_left, write

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
UNIT_EPS: gl.constexpr = gl.constexpr(1e-6)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(-LOG2E * x))


@gluon.jit
def unit(x):
    """x [8, K] / sqrt(sum x^2 + eps)."""
    return x * gl.rsqrt(gl.sum(x * x, 1) + UNIT_EPS)[:, None]


@gluon.jit
def begin(start, count, AHEAD: gl.constexpr, EARLY: gl.constexpr):
    """`overlap`: the next kernel may come; AHEAD: ``count`` float32 are asked for, so that a state
    waits in the L2 cache and not in registers; the kernel before has ended."""
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    if AHEAD:
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
            "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [start, count * 4], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def room_for(K: gl.constexpr, warps: gl.constexpr):
    """Shared memory of a block: X_k, X_q, Y, decay, g, Z in parts, Z, M."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    paired: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return (
        gl.allocate_shared_memory(gl.float32, [8, K], swizzled),
        gl.allocate_shared_memory(gl.float32, [8, K], swizzled),
        gl.allocate_shared_memory(gl.float32, [8, K], paired),
        gl.allocate_shared_memory(gl.float32, [8, K], plain),
        gl.allocate_shared_memory(gl.float32, [8, K], plain),
        gl.allocate_shared_memory(
            gl.float32, [warps, 16, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0])
        ),
        gl.allocate_shared_memory(gl.float32, [8, 16], plain),
        gl.allocate_shared_memory(gl.float32, [16, 8], plain),
    )


@gluon.jit
def _prefix_sums(shared, warps: gl.constexpr, keep):
    """Of rows [8, K] in shared memory: sums up to each row, and up to row ``keep``."""
    K: gl.constexpr = shared.shape[1]
    places: gl.constexpr = gl.BlockedLayout([1, 8, K // 32], [1, 1, 32], [warps, 1, 1], [2, 1, 0])
    g = shared.load(gl.SliceLayout(0, places))
    r = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, places)))[:, None, None]
    i = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, places)))[None, :, None]
    rows: gl.constexpr = row_places(K, warps)
    G = gl.sum(gl.where(i <= r, 1.0, 0.0) * g[None, :, :], 1)
    end = gl.sum(gl.where((i < keep) & (r < 8), 1.0, 0.0) * g[None, :, :], 1)
    return (
        gl.convert_layout(G, rows, assert_trivial=True),
        gl.convert_layout(end, rows, assert_trivial=True),
    )


@gluon.jit
def _grams(Xk, Xq, Y, warps: gl.constexpr):
    """X [16, K] Y^T, X of k rows over q rows and Y [8, K]: of each warp's keys, [warps, 16, 8]."""
    K: gl.constexpr = Y.shape[1]
    N: gl.constexpr = K // warps
    units: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8]
    )
    places: gl.constexpr = chunk_places(K, warps)
    x = gl.join(Xk.load(places), Xq.load(places)).permute(2, 0, 1)
    x = x.reshape(16, warps, N // 8, 4, 2).permute(1, 0, 2, 4, 3).reshape(warps, 16, N)
    high, low = parts(gl.convert_layout(x, gl.DotOperandLayout(0, units, 1), assert_trivial=True))
    y = Y.load(places).reshape(8, warps, N // 8, 4, 2).permute(1, 2, 4, 3, 0).reshape(warps, N, 8)
    y = gl.convert_layout(y, gl.DotOperandLayout(1, units, 1), assert_trivial=True)
    y_high, y_low = parts(y)
    none = gl.zeros([warps, 16, 8], gl.float32, units)
    a = mma_v2(high, y_high, none, input_precision="tf32")
    b = mma_v2(low, y_high, none, input_precision="tf32")
    c = mma_v2(high, y_low, none, input_precision="tf32")
    return a + (b + c)


@gluon.jit
def _pick(x, i, r: gl.constexpr):
    """Row r of x [16, 8], without an addition."""
    bits = gl.where(i == r, x.to(gl.int32, bitcast=True), 0)
    return gl.xor_sum(bits, 0).to(gl.float32, bitcast=True)


@gluon.jit
def _solve(Z, beta, warps: gl.constexpr):
    """M over Z_q M, [16, 8], from shared Z [8, 16]: transposed, k rows times beta, q rows -1."""
    places: gl.constexpr = solve_places(warps)
    i = gl.arange(0, 16, gl.SliceLayout(1, places))[:, None]
    j = gl.arange(0, 8, gl.SliceLayout(0, places))[None, :]
    columns = Z._reinterpret(gl.float32, [8, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x = gl.where(i == j, beta[None, :], 0.0)
    for c in gl.static_range(8):
        z = columns.index(c).load(gl.SliceLayout(1, places))[:, None]
        below = ((i > c) & (i < 8)) | (i >= 8 + c)
        x -= gl.where(below, z * _pick(x, i, c)[None, :], 0.0)
    return x


@gluon.jit
def put_rows(room, k, q, keep, READS: gl.constexpr, WRITES: gl.constexpr, warps: gl.constexpr):
    """Rows [8, K] of unit k and scaled q, whose log-decays lie in the room, made ready."""
    G, end = _prefix_sums(room[4], warps, keep)
    grown = gl.exp2(G)
    room[0].store(k * grown)
    if READS:
        room[1].store(q * grown)
    room[2].store(k * gl.exp2(-G))
    if WRITES:
        room[3].store(gl.exp2(end))


@gluon.jit
def put_grams(room, READS: gl.constexpr, warps: gl.constexpr):
    q = room[1 if READS else 0]
    room[5].store(_grams(room[0], q, room[2], warps))


@gluon.jit
def put_sums(room, factor, warps: gl.constexpr):
    """factor [16]: beta of k rows and -1."""
    turned = room[5].permute((0, 2, 1)).load(sum_places(warps))
    room[6].store(gl.sum(turned, 0) * factor[None, :])


@gluon.jit
def put_solution(room, beta, warps: gl.constexpr):
    """beta [8]."""
    room[7].store(_solve(room[6], beta, warps))


@gluon.jit
def unsettled(v, found, warps: gl.constexpr):
    """W^T from v and what k rows saw, [V, 8], as `settled` takes it."""
    return twice_left(v - found, units_of(warps))


@gluon.jit
def settled(room, W, total, at: gl.constexpr, warps: gl.constexpr):
    """total [V, 8] + M W or Z_q M W (at = 0, 8)."""
    return times_small(W, room[7].slice(at, 8), total, units_of(warps), warps)


@gluon.jit
def behind(s, room, W, keep, warps: gl.constexpr):
    """The state after the block's first ``keep`` rows."""
    units: gl.constexpr = units_of(warps)
    K: gl.constexpr = room[0].shape[1]
    N: gl.constexpr = K // 4
    none = gl.zeros([s[0].shape[0], 8], gl.float32, units)
    kept = gl.arange(0, 8, gl.SliceLayout(0, units))[None, :] < keep
    U = twice_left(gl.where(kept, settled(room, W, none, 0, warps), 0.0), units)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decay = room[3]._reinterpret(gl.float32, [8 * K], line)
    return (
        write(s[0], decay, room[2], 0, U, units, warps),
        write(s[1], decay, room[2], N, U, units, warps),
        write(s[2], decay, room[2], 2 * N, U, units, warps),
        write(s[3], decay, room[2], 3 * N, U, units, warps),
    )
