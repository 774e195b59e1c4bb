"""Up to eight raw rows of a chain over one state by `kda_block_gluon`; see `kda_step_triton`.

A program holds 16 columns of a head's state for each of its warps.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dspark_kernels.kda_block_gluon import (
    LOG2E,
    begin,
    behind,
    put_grams,
    put_rows,
    put_solution,
    put_sums,
    room_for,
    settled,
    sigmoid,
    unit,
    unsettled,
)
from dspark_kernels.kda_block_places import row_places, solve_places, state_places, sum_places
from dspark_kernels.kda_block_state_gluon import (
    arrived,
    ask_state,
    load_state,
    places_in,
    rows_across,
    rows_back,
    seen_by_both,
    state_across,
    store_state,
)


@gluon.jit
def step_block_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, end_ptr, rate_ptr, dt_ptr,
    scale, bound, keep,
    s_qb, s_qt, s_kb, s_kt, s_vb, s_vt, s_gb, s_gt, s_bb, s_bt,
    T: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr,
    WRITE: gl.constexpr, COPIED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The first ``keep`` rows enter the state at ``end_ptr``, all are read.

    COPIED: the state begins on 16 bytes and comes by copies, behind which no load waits.
    """
    BV: gl.constexpr = 16 * WARPS
    rows: gl.constexpr = row_places(K, WARPS)
    room = room_for(K, WARPS)
    part, place = gl.program_id(0) % (V // BV), gl.program_id(0) // (V // BV)
    b, h = (place // H).to(gl.int64), place % H
    begin(state_ptr, 0, False, EARLY)
    t = gl.arange(0, 8, gl.SliceLayout(1, rows))[:, None]
    ks = gl.arange(0, K, gl.SliceLayout(0, rows))[None, :]
    real = (t < T) & (ks < K)
    a = gl.load(g_ptr + b * s_gb + t * s_gt + h * K + ks, mask=real, other=0.0).to(gl.float32)
    k = gl.load(k_ptr + b * s_kb + t * s_kt + h * K + ks, mask=real, other=0.0).to(gl.float32)
    q = gl.load(q_ptr + b * s_qb + t * s_qt + h * K + ks, mask=real, other=0.0).to(gl.float32)
    a += gl.load(dt_ptr + h * K + ks)
    rate = gl.exp2(LOG2E * gl.load(rate_ptr + h))
    tile = (b * H + h) * K * V + part * BV + places_in(K, V, WARPS)
    if not COPIED:
        state = load_state(state_ptr + tile, K // 4 * V)
    v_places: gl.constexpr = state_places(8, WARPS)
    tv = gl.arange(0, 8, gl.SliceLayout(1, v_places))[:, None]
    cols = part * BV + gl.arange(0, BV, gl.SliceLayout(0, v_places))[None, :]
    here = (tv < T) & (cols < V)
    v = gl.load(v_ptr + b * s_vb + tv * s_vt + h * V + cols, mask=here, other=0.0).to(gl.float32)
    j = gl.arange(0, 8, gl.SliceLayout(0, solve_places(WARPS)))
    s = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, sum_places(WARPS))))
    beta_ptr += b * s_bb + h
    beta = gl.load(beta_ptr + j * s_bt, mask=j < T, other=-float("inf")).to(gl.float32)
    factor = gl.load(beta_ptr + s * s_bt, mask=s < T, other=-float("inf")).to(gl.float32)
    if COPIED:
        asked = ask_state(state_ptr + (b * H + h) * K * V + part * BV, K, V, WARPS)

    room[4].store(gl.where(real, (LOG2E * bound) * sigmoid(rate * a), 0.0))
    put_rows(room, unit(k), scale * unit(q), keep, True, WRITE, WARPS)
    put_grams(room, True, WARPS)
    put_sums(room, gl.where(s < 8, sigmoid(factor), -1.0), WARPS)
    if COPIED:
        state = arrived(asked, WARPS)
    state = state_across(state, WARPS)
    found, read = seen_by_both(state, room[0], room[1], WARPS)
    put_solution(room, sigmoid(beta), WARPS)
    W = unsettled(rows_across(v, WARPS), found, WARPS)
    out = rows_back(settled(room, W, read, 8, WARPS), WARPS)
    gl.store(out_ptr + ((b * T + tv) * H + h) * V + cols, out, mask=here)
    if WRITE:
        store_state(end_ptr + tile, K // 4 * V, behind(state, room, W, keep, WARPS), WARPS)
