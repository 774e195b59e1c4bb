"""`kda.step` in one pass over the state: rows of a chain by `kda_step_chain_triton`, of a tree by
`kda_step_tree_triton`, a chain under a bounded gate on NVIDIA by `kda_step_block_gluon`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dspark_kernels.kda_blocks import block_kernel, copied, in_blocks
from dspark_kernels.kda_rows_triton import MAX_EXPONENT, PRODUCTS
from dspark_kernels.kda_step_chain_triton import chain_kernel, row_kernel
from dspark_kernels.kda_step_tree_triton import tree_kernel
from dspark_kernels.overlap import early

MAX_ROWS = 16
WIDTHS = (64, 128, 256)
FEW = 512
"""Heads of a batch up to which a launch is a matter of latency; beyond, of throughput."""
ROW_SHAPES = ((16, 1), (64, 4))
"""Columns and warps of a program on one row: for few heads, for many."""
CHAIN_SHAPES = ((64, 16), (128, 16))
"""Columns of a program on several rows, and of each of its warps: for few heads, for many."""
BLOCK_WARPS = 4
"""Warps of a program on a block of rows, 16 columns each."""
REGISTERS: int | None = 128
"""Of a thread where a program has 128 columns, so that two programs fit on a processor."""


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    keep: int,
    out: Tensor | None = None,
    upto: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`kda.step`."""
    if upto is None:
        return _chain(q, k, v, g, beta, state, keep, out, None, None)
    B, T, H, K = q.shape
    V = v.shape[-1]
    read, new = _results(q, v, state, keep, out)
    BV = min(V, 64)
    tree_kernel[(V // BV * B * H,)](
        q, k, v, g, beta, state, read, new, upto.to(torch.int8), keep,
        upto.stride(0) if len(upto) > 1 else 0, *_strides(q, k, v, g, beta),
        T=T, H=H, K=K, V=V, BV=BV, TP=8 if T <= 8 else 16, WRITE=keep > 0, PRECISION=PRODUCTS,
        num_warps=4, **early(),
    )  # fmt: skip
    return read, new


def gated_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    keep: int,
    out: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`step` of a chain of raw rows: q, k, v after the convolution, a [B, T, H, K] before dt and
    gate, b [B, T, H] before the sigmoid. Makes the rest itself:

    q = K^-1/2 q / |q|;  k = k / |k|;  |x| = sqrt(sum x^2 + 1e-6);  beta = sigmoid(b)
    g = bound sigmoid(exp(A) (a + dt)), or without a bound -exp(A) softplus(a + dt)
    """
    return _chain(q, k, v, a, b, state, keep, out, (A_log, dt_bias), lower_bound)


def _chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    keep: int,
    out: Tensor | None,
    gate: tuple[Tensor, Tensor] | None,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    B, T, H, K = q.shape
    V = v.shape[-1]
    read, new = _results(q, v, state, keep, out)
    tensors = (q, k, v, g, beta, state, read, new, *(gate or (q, q)))
    numbers = (K**-0.5, 0.0 if lower_bound is None else lower_bound)
    sizes: dict[str, Any] = {
        "H": H, "K": K, "V": V, "GATED": gate is not None, "BOUNDED": lower_bound is not None,
        "WRITE": keep > 0, **_launch(B * H),
    }  # fmt: skip
    if T == 1:
        BV, warps = ROW_SHAPES[B * H > FEW]
        row_kernel[(V // BV * B * H,)](
            *tensors, *numbers, *(x.stride(0) for x in (q, k, v, g, beta)),
            BV=BV, num_warps=warps, **sizes,
        )  # fmt: skip
        return read, new
    if gate is not None and in_blocks(T, K, numbers[1]):
        warps = min(BLOCK_WARPS, V // 16, K // 16)
        block_kernel("step")[(V // (16 * warps) * B * H,)](
            *tensors, *numbers, keep, *_strides(q, k, v, g, beta),
            T=T, H=H, K=K, V=V, WRITE=keep > 0, COPIED=B * H <= FEW and copied(state),
            WARPS=warps, num_warps=warps, **_launch(B * H),
        )  # fmt: skip
        return read, new
    BV, VV = CHAIN_SHAPES[B * H > FEW]
    BV = min(V, BV)
    programs = V // BV * B * H
    if REGISTERS is not None and K <= 128 <= BV and torch.version.hip is None:
        sizes["maxnreg"] = REGISTERS
    scaled = 0.0 < -numbers[1] * T <= MAX_EXPONENT
    ready = torch.empty(programs * (T + 1) * (4 * K + BV + 16), dtype=read.dtype, device=q.device)
    chain_kernel[(programs,)](
        *tensors, ready, *numbers, keep, *_strides(q, k, v, g, beta),
        T=T, BV=BV, VV=VV, TP=triton.next_power_of_2(T), SCALED=scaled, num_warps=BV // VV,
        num_stages=1, **sizes,
    )  # fmt: skip
    return read, new


def _launch(heads: int) -> dict[str, bool]:
    """Early where there are many programs, whose last ones leave processors idle. For few it took
    longer than it saved."""
    return early() if heads > FEW else {"EARLY": False}


def _strides(*rows: Tensor) -> list[int]:
    return [s for x in rows for s in x.stride()[:2]]


def _results(
    q: Tensor, v: Tensor, state: Tensor, keep: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs, and where the new state goes."""
    read = torch.empty((*q.shape[:3], v.shape[-1]), dtype=torch.float32, device=q.device)
    if keep == 0:
        return read, state
    return read, torch.empty_like(state) if out is None else out


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
