"""`kda_decode` by one launch: which kernel takes which rows.

    one row that counts at once, no slots          `kda_row_triton`
    two to eight rows of a chain or held ones,
    on NVIDIA under a bounded gate                 `kda_round_block_gluon`
    any other chain                                `kda_round_triton`
    a tree                                         `kda_round_tree_triton`

Second factors of decay and gate are expanded by a launch before it; the first expands its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dspark_kernels.kda_blocks import block_kernel, in_blocks
from dspark_kernels.kda_decode import check, expand
from dspark_kernels.kda_round_tree_triton import tree_kernel
from dspark_kernels.kda_round_triton import round_kernel
from dspark_kernels.kda_row_triton import row_kernel
from dspark_kernels.kda_rows_triton import MAX_EXPONENT, PRODUCTS
from dspark_kernels.low_rank_rows_triton import low_rank_rows
from dspark_kernels.overlap import early

MAX_ROWS = 16
WIDTHS = (64, 128)
WARPS = 8
"""Of a program that takes a single row."""
PROGRAMS = 264
"""Most programs of a launch on chains: two for each processor of an H200."""
COLUMNS = 16
"""Columns of the state that a warp holds."""
REGISTERS: int | None = 128
"""Of a thread of a head 128 wide, so that two programs fit on a processor where there are two."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights and settings of a layer between its projections; see `kda_decode.kda_decode`."""

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    lower_bound: float | None
    second: Tensor | None


def kda_decode(
    rows: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    held_rows: Tensor,
    held_decay: Tensor,
    held_beta: Tensor,
    accepted: Tensor,
    state: Tensor,
    conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    lower_bound: float | None,
    upto: Tensor | None = None,
    taps: Tensor | None = None,
    fold: bool = False,
    second: Tensor | None = None,
) -> Tensor:
    """`kda_decode.kda_decode`."""
    B, T, _ = rows.shape
    _, H, K, V = state.shape
    R, W = held_decay.shape[1], len(conv)
    check(R, T, upto, taps, fold)
    out = torch.empty((B, T, H * V), dtype=rows.dtype, device=rows.device)
    if T == 1 and R == 0 and fold:
        layer = Layer(conv, A_log, dt_bias, norm, eps, lower_bound, second)
        one_row(rows, decay, beta, gate, held_rows, state, layer, out, WARPS)
        return out
    if second is not None:
        decay, gate = expand(decay, gate, second, low_rank_rows)
    tensors = (
        rows, decay, beta, gate, held_rows, held_decay, held_beta, accepted, state, conv, A_log,
        dt_bias, norm,
    )  # fmt: skip
    bound = 0.0 if lower_bound is None else lower_bound
    strides = [s for x in tensors[:7] for s in x.stride()[:2]] + [state.stride(0)]
    sizes = {
        "T": T, "R": R, "H": H, "K": K, "V": V, "W": W, "TQ": triton.next_power_of_2(T),
        "HELD": triton.next_power_of_2(W - 1 if fold else W - 1 + T),
        "BOUNDED": lower_bound is not None, **early(),
    }  # fmt: skip
    if upto is None and V <= K and in_blocks(max(R, T), K, bound):
        del sizes["TQ"], sizes["BOUNDED"]
        block_kernel("round")[(B * H,)](
            *tensors, out, K**-0.5, eps, bound, *strides, FOLD=fold, WARPS=V // COLUMNS,
            AHEAD=ahead_of(B * H), num_warps=V // COLUMNS,
            **_limited(V, B * H), **sizes,
        )  # fmt: skip
        return out
    if upto is None or taps is None:
        programs = min(B * H, PROGRAMS)
        ready = (R + T + 1) * (2 * K + V + 16) + (T + 1) * (K + V)
        round_kernel[(programs,)](
            *tensors, out, _scratch(programs * ready, state), B * H, K**-0.5, eps, bound, *strides,
            NR=triton.next_power_of_2(R + T), VV=COLUMNS, FOLD=fold, num_warps=V // COLUMNS,
            num_stages=1, **_limited(V, programs), **sizes,
        )  # fmt: skip
        return out
    apart = [x.stride(0) if len(x) > 1 else 0 for x in (upto, taps)]
    tree_kernel[(B * H,)](
        *tensors, upto.to(torch.int8), taps, out, _scratch(B * H * T * V, state),
        K**-0.5, eps, bound, *apart, *strides, BV=V, TP=8 if R <= 8 else 16,
        FACTORED=0.0 < -bound * (R + T) <= MAX_EXPONENT, PRECISION=PRODUCTS, num_warps=8, **sizes,
    )  # fmt: skip
    return out


def ahead_of(programs: int) -> bool:
    """Whether states are asked for ahead: where programs share a processor, whose registers a
    waiting state would take."""
    return programs > PROGRAMS // 2 and early()["EARLY"]


def one_row(
    rows: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    held_rows: Tensor,
    state: Tensor,
    layer: Layer,
    out: Tensor,
    warps: int,
    parts: int = 1,
    squares: Tensor | None = None,
) -> None:
    """Rows that count at once, a program of so many warps for each of ``parts`` of a head.

    Args:
        rows, decay, beta, gate, held_rows, state: As of `kda_decode.kda_decode`, T = 1 and R = 0.
        layer: What they go through.
        out: [B, ..] of H V numbers a sequence, written; of several parts not yet normed.
        warps: Of a program.
        parts: Programs of a head.
        squares: [B, H, parts] float32, written where there are several; see `row_kernel`.
    """
    B, H, K, V = state.shape
    given, second = (rows, decay, beta, gate, held_rows, state), layer.second
    row_kernel[(B * H * parts,)](
        *given, decay if second is None else second, layer.conv, layer.A_log, layer.dt_bias,
        layer.norm, out, out if squares is None else squares,
        K**-0.5, layer.eps, 0.0 if layer.lower_bound is None else layer.lower_bound,
        *(x.stride(0) for x in given[:5]), held_rows.stride(1), state.stride(0),
        H=H, K=K, V=V, W=len(layer.conv), R=16 if second is None else second.shape[2], PARTS=parts,
        FACTORS=0 if second is None else len(second), BOUNDED=layer.lower_bound is not None,
        AHEAD=_on_16_bytes(held_rows, H * K), num_warps=warps, **early(),
    )  # fmt: skip


def _on_16_bytes(held: Tensor, count: int) -> bool:
    """Whether every head's rows begin where a copy may."""
    steps = (*held.stride()[:2], count)
    return all(x * held.element_size() % 16 == 0 for x in steps) and held.data_ptr() % 16 == 0


def _limited(width: int, programs: int) -> dict[str, int]:
    two = width >= 128 and programs > PROGRAMS // 2
    if REGISTERS is None or not two or torch.version.hip is not None:
        return {}
    return {"maxnreg": REGISTERS}


def _scratch(numbers: int, like: Tensor) -> Tensor:
    return torch.empty(numbers, dtype=torch.float32, device=like.device)


def refuses(
    rows: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    held_rows: Tensor,
    held_decay: Tensor,
    held_beta: Tensor,
    accepted: Tensor,
    state: Tensor,
    conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    lower_bound: float | None,
    upto: Tensor | None = None,
    taps: Tensor | None = None,
    fold: bool = False,
    second: Tensor | None = None,
) -> str | None:
    """Why `kda_decode` cannot take these."""
    K, V = state.shape[-2:]
    held = (held_rows, held_decay, held_beta)
    if rows.shape[1] > MAX_ROWS or held_decay.shape[1] > MAX_ROWS:
        return f"{rows.shape[1]} rows on {held_decay.shape[1]} slots, it takes up to {MAX_ROWS}"
    if K not in WIDTHS or V not in WIDTHS:
        return f"heads of {K} x {V}, it takes widths of {WIDTHS}"
    if any(x.dtype != torch.float32 for x in (state, conv, A_log, dt_bias, norm)):
        return "a state or parameters that are not float32"
    if rows.dtype == torch.float64 or any(x.dtype != rows.dtype for x in held):
        return "rows in float64, or held in another dtype"
    if not (
        state[0].is_contiguous() and all(x.is_contiguous() for x in (conv, A_log, dt_bias, norm))
    ):
        return "a state or weights that are not contiguous"
    if not accepted.is_contiguous():
        return "counts that are not contiguous"
    if not all(x is None or x[0].is_contiguous() for x in (upto, taps)):
        return "a tree that is not contiguous"
    if any(x.stride(-1) != 1 for x in (rows, decay, beta, gate, *held) if x.numel()):
        return "rows whose channels are not contiguous"
    return None if second is None else _refuses_second(second, rows, K, V)


def _refuses_second(second: Tensor, rows: Tensor, K: int, V: int) -> str | None:
    rank = second.shape[2]
    if second.dtype != rows.dtype or not second.is_contiguous():
        return "second factors in another dtype than rows, or not contiguous"
    if rank & (rank - 1) or not 16 <= rank <= 512:
        return f"second factors of rank {rank}; it takes powers of two from 16 to 512"
    return (
        "second factors of decay and gate with K unlike V" if len(second) > 1 and K != V else None
    )
