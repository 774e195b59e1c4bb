"""Where the numbers of a KDA block lie in lanes and registers; see `kda_block_gluon`.

A matrix unit takes 8 keys at a time. A lane l has of its sums columns 2 (l mod 4) + {0, 1}, of its
factors columns l mod 4 + {0, 4}. Numbering the keys of both factors anew makes them the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _doubled(first, last, place, rank=2):
    """Bases first, 2 first, .. last of one dimension."""
    found = []
    while first <= last:
        found.append([first if d == place else 0 for d in range(rank)])
        first *= 2
    return found


@gluon.constexpr_function
def units_of(warps):
    """Of sums [V, n]: a warp has 16 columns of the state."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def state_places(keys, warps):
    """A state [keys, V] as `units_of` has its transpose, neighbouring columns side by side."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], *_doubled(8, keys // 2, 0)],
        lane_bases=[[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=_doubled(16, 8 * warps, 1),
        block_bases=[],
        shape=[keys, 16 * warps],
    )


@gluon.constexpr_function
def row_places(keys, warps):
    """Rows [8, keys], a row to a warp."""
    return gl.BlockedLayout([1, keys // 32], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def right_places(n, keys, warps):
    """[n = 8, keys] as a right factor over keys; all warps have the same."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *_doubled(8, keys // 2, 1)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0]] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[n, keys],
    )


@gluon.constexpr_function
def chunk_places(keys, warps):
    """[8, keys] as factors over keys; a warp has keys / warps of them."""
    chunk = keys // warps
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *_doubled(8, chunk // 2, 1)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=_doubled(chunk, keys // 2, 1),
        block_bases=[],
        shape=[8, keys],
    )


@gluon.constexpr_function
def update_places(keys, warps):
    """[8 rows, keys] as a right factor over rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], *_doubled(8, keys // 2, 1)],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 0]] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[8, keys],
    )


@gluon.constexpr_function
def solve_places(warps):
    """[16, 8]: a column to a lane, the same in every warp."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [8, 0]],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 0], [0, 0]],
        warp_bases=[[0, 0]] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[16, 8],
    )


@gluon.constexpr_function
def sum_places(warps):
    """[warps, 8, 16]: all terms of a sum to a lane, the same in every warp."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *_doubled(1, warps // 2, 0, 3)],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 0, 0]] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[warps, 8, 16],
    )
