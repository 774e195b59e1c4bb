"""Launches of the chunked KDA kernels: where chunks lie, how numbers are multiplied, tile sizes.

`ops` of chunked KDA are put together from four steps: `within` (each chunk by itself), `carry` (the
state over the chunks), `carry_back` and `gradients`, their reverse. Each makes its outputs and
launches one or two kernels; none waits for the device.

Letters: B batch, T rows, H heads, K key width, V value width, C = 32 rows of a chunk, N chunks of
all sequences together, S sequences.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from dspark_kernels.interpreted import allow_loops
from dspark_kernels.interpreted_floats import exact_floats
from dspark_kernels.kda import MAX_EXPONENT
from dspark_kernels.kda_carry_triton import pass_kernel
from dspark_kernels.kda_near_triton import near_kernel
from dspark_kernels.kda_within_triton import within_kernel

allow_loops()
exact_floats()

C = 32
SUB = 16
"""Rows of a block whose decays a bounded gate lets the kernels factor."""
MOST_WIDTH = 256
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NARROWEST = 16


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel multiplies: its ``products``, those of its solve, and the parts of g.

    Numbers that pass from kernel to kernel have ``dtype``. float32 inputs are multiplied in
    bfloat16 parts, three products for one, which agrees with float64 to some 1e-5.
    """

    dtype: torch.dtype
    products: str
    solve: str
    parts: int


IN_PARTS = "ieee" if INTERPRETED else "bf16x3"  # the interpreter knows no parts
SOLVE = "tf32" if not INTERPRETED and torch.version.hip is None else IN_PARTS
WIDE = Arithmetic(torch.float32, IN_PARTS, IN_PARTS, 3)
NARROW = Arithmetic(torch.bfloat16, "bf16", SOLVE, 2)


def arithmetic_for(*tensors: Tensor) -> Arithmetic:
    """bfloat16 where all of the rows are, else float32."""
    return NARROW if all(x.dtype == torch.bfloat16 for x in tensors) else WIDE


@dataclass(frozen=True)
class Launch:
    """Columns of a tile of keys and of values, warps of a program, stages of its loop, and the
    registers a thread is held to so that more programs are resident (0: as many as it likes)."""

    keys: int = 64
    values: int = 64
    warps: int = 4
    stages: int = 2
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """What Triton calls them."""
        held = self.registers > 0 and torch.version.hip is None
        limit = {"maxnreg": self.registers} if held else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


TUNED: dict[tuple[str, torch.dtype], Launch] = {
    ("near", torch.bfloat16): Launch(0, 128, 4, 1, 168),
    ("within", torch.bfloat16): Launch(32, 32, 1, 1),
    ("within", torch.float32): Launch(64, 64, 4, 1),
    ("carry", torch.bfloat16): Launch(0, 32, 2, 3),
    ("carry", torch.float32): Launch(0, 32, 4, 1),
    ("carry_back", torch.bfloat16): Launch(0, 32, 4, 2),
    ("carry_back", torch.float32): Launch(0, 32, 4, 1),
    ("couplings", torch.bfloat16): Launch(0, 64, 4),
    ("couplings", torch.float32): Launch(0, 64, 4),
    ("rows", torch.bfloat16): Launch(64, 64, 4),
    ("rows", torch.float32): Launch(64, 64, 4),
    ("anchors", torch.bfloat16): Launch(32, 64, 4),
    ("anchors", torch.float32): Launch(32, 64, 4),
    ("anchors_back", torch.bfloat16): Launch(64, 64, 4),
    ("anchors_back", torch.float32): Launch(64, 64, 4),
}
"""By step and dtype of the numbers that pass between kernels."""


def launch_of(step: str, how: Arithmetic, K: int, V: int) -> Launch:
    """The tuned launch, with tiles no wider than the tensors."""
    found = TUNED[step, how.dtype]
    return replace(found, keys=at_most(found.keys, K), values=at_most(found.values, V))


def at_most(tile: int, width: int) -> int:
    """A tile no wider than need be, nor narrower than what matrix units take."""
    return max(NARROWEST, min(tile, triton.next_power_of_2(width)))


@dataclass(frozen=True)
class Chunks:
    """Where chunks lie: ``per_row`` of each batch row, or of packed sequences by tables.

    Attributes:
        N: Chunks that tiles are made for; of packed sequences an upper bound.
        where: [N, 2] int64, a packed chunk's first row and rows.
        firsts: [S + 1] int64, the first chunk of every packed sequence.
        bounds: [S + 1] int64, its first row.
    """

    sequences: int
    per_row: int
    N: int
    where: Tensor | None = None
    firsts: Tensor | None = None
    bounds: Tensor | None = None


def chunks_of_rows(B: int, per_row: int) -> Chunks:
    return Chunks(B, per_row, B * per_row)


def packed_chunks(cu_seqlens: Tensor, T: int) -> Chunks:
    """Of sequences that lie one behind the other in T rows; computed on the device."""
    bounds = cu_seqlens.long()
    S = len(bounds) - 1
    N = T // C + S
    firsts = F.pad((bounds.diff() + C - 1).div(C, rounding_mode="floor").cumsum(0), (1, 0))
    chunk = torch.arange(N, device=bounds.device)
    sequence = torch.searchsorted(firsts[1:], chunk, right=True)
    real, sequence = sequence < S, sequence.clamp(max=S - 1)
    first = bounds[sequence] + (chunk - firsts[sequence]) * C
    rows = torch.where(real, (bounds[sequence + 1] - first).clamp(max=C), 0)
    return Chunks(S, 0, N, torch.stack((first, rows), 1).contiguous(), firsts, bounds)


def bounded(lower_bound: float | None) -> bool:
    return lower_bound is not None and -lower_bound * SUB <= MAX_EXPONENT


def dense_rows(x: Tensor) -> Tensor:
    """x with its last dimension in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@dataclass(frozen=True)
class Rows:
    """Inputs of an op: [B, T, H, *] and beta [B, T, H]; q may be missing."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    bounded: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        return (*self.k.shape, self.v.shape[-1])

    def strides(self) -> tuple[int, ...]:
        q = self.k if self.q is None else self.q
        return tuple(n for x in (q, self.k, self.v, self.g, self.beta) for n in x.stride()[:3])


@dataclass(frozen=True)
class Within:
    """What `within` leaves of every chunk and head, [N, H, C, *]; ``end`` is [N, H, K] float32."""

    w: Tensor
    u: Tensor
    Qd: Tensor
    Ke: Tensor
    P: Tensor
    M: Tensor
    end: Tensor


def within(rows: Rows, chunks: Chunks, how: Arithmetic, keeps: bool) -> Within:
    """Each chunk by itself; ``keeps`` the inverse M for the gradients."""
    _, T, H, K, V = rows.sizes
    reads, packed = rows.q is not None, chunks.where is not None
    near = rows.bounded and how.dtype == torch.bfloat16
    launch = launch_of("near" if near else "within", how, K, V)

    def tile(width: int, wanted: bool = True) -> Tensor:
        shape = (chunks.N, H, C, width) if wanted else (1,)
        return rows.k.new_empty(shape, dtype=how.dtype)

    made = Within(tile(K), tile(V), tile(K, reads), tile(K), tile(C, reads), tile(C, keeps),
                  rows.k.new_empty(chunks.N, H, K, dtype=torch.float32))  # fmt: skip
    tensors = (
        rows.k if rows.q is None else rows.q, rows.k, rows.v, rows.g, rows.beta,
        chunks.where if chunks.where is not None else made.end,
        made.w, made.u, made.Qd, made.Ke, made.P, made.M, made.end,
    )  # fmt: skip
    sizes = (T, chunks.per_row, H, *rows.strides())
    if near:
        near_kernel[(chunks.N * H,)](
            *tensors, *sizes, K=K, V=V, BK=at_most(MOST_WIDTH, K), BV=launch.values, C=C,
            READS=reads, KEEPS=keeps, PACKED=packed, SOLVE=how.solve, PARTS=how.parts,
            **launch.options,
        )  # fmt: skip
        return made
    within_kernel[(chunks.N * H,)](
        *tensors, *sizes, K=K, V=V, BK=launch.keys, BV=launch.values, C=C,
        BOUNDED=rows.bounded, READS=reads, KEEPS=keeps, PACKED=packed,
        PRECISION=how.products, SOLVE=how.solve, PARTS=how.parts, **launch.options,
    )  # fmt: skip
    return made


@dataclass(frozen=True)
class Carried:
    """Outputs [B, T, H, V], the last states [S, H, K, V], and, if kept, the entering states
    [N, H, K, V] and updates [N, H, C, V] of all chunks."""

    out: Tensor
    last: Tensor
    states: Tensor
    U: Tensor


def carry(
    rows: Rows,
    made: Within,
    chunks: Chunks,
    state: Tensor,
    how: Arithmetic,
    *,
    reads: bool,
    keeps: torch.dtype | None,
    ends: bool = True,
) -> Carried:
    """The state over the chunks.

    Args:
        reads: Outputs are wanted.
        keeps: Entering states are kept in this dtype, and updates; None: they are not.
        ends: The last state is wanted.
    """
    B, T, H, K, V = rows.sizes
    launch = launch_of("carry", how, K, V)
    new = rows.v.new_empty
    kept = (chunks.N, H, K, V) if keeps is not None else (1,)
    updates = (chunks.N, H, C, V) if keeps is not None else (1,)
    result = Carried(
        new((B, T, H, V) if reads else (1,)),
        torch.empty_like(state) if ends else state.new_empty(1),
        new(kept, dtype=keeps or how.dtype),
        new(updates, dtype=how.dtype),
    )
    packed = chunks.where is not None
    pass_kernel[(chunks.sequences * H * triton.cdiv(V, launch.values),)](
        made.w, made.u, made.Qd, made.Ke, made.P, made.end, state,
        result.out, result.last, result.states, result.U,
        chunks.bounds if packed else made.end, chunks.firsts if packed else made.end,
        T, chunks.per_row, H,
        K=K, V=V, BK=at_most(MOST_WIDTH, K), BV=launch.values, C=C,
        READS=reads, KEEPS=keeps is not None, LAST=ends, PACKED=packed,
        PRECISION=how.products, STAGES=launch.stages, **launch.options,
    )  # fmt: skip
    return result
