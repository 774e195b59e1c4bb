"""The only switch between plain torch and Triton.

``DSPARK_OPS`` is ``auto`` (default), ``torch`` or ``triton``. Every op has a plain-torch
reference. Asking for ``triton`` is an error where an op has no Triton kernel or no GPU can run one
(``TRITON_INTERPRET=1`` counts as a GPU): a run that was asked to measure a kernel must never
measure another one in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark_kernels import kda, kda_states, linear_kda

LinearOrder = linear_kda.Order
MODES = ("auto", "torch", "triton")
KDA_CHUNK = kda.CHUNK
"""Rows up to which `kda_step` is the better form."""


@dataclass(frozen=True)
class Op:
    """One operation and its implementations; ``triton`` is None where no such kernel exists."""

    torch: Callable[..., Any]
    triton: Callable[..., Any] | None = None


_OPS = {
    "kda_chunk": Op(torch=kda.chunk),
    "kda_step": Op(torch=kda.step),
    "kda_states_at": Op(torch=kda_states.states_at),
    "linear_kda_block": Op(torch=linear_kda.block),
}


def triton_usable() -> tuple[bool, str]:
    """Whether Triton kernels can run here, and why not."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "interpreter"
    if not torch.cuda.is_available():
        return False, "no CUDA or ROCm GPU, and TRITON_INTERPRET is not 1"
    return True, torch.cuda.get_device_name()


def _mode() -> str:
    return os.environ.get("DSPARK_OPS", "auto")


@cache
def _choose(name: str, mode: str) -> str:
    if mode not in MODES:
        raise UserError(f"DSPARK_OPS is {mode!r}; expected one of {', '.join(MODES)}")
    usable, why = triton_usable()
    if mode == "triton":
        if _OPS[name].triton is None:
            raise UserError(
                f"DSPARK_OPS=triton, but {name} has no Triton kernel; use DSPARK_OPS=auto or torch"
            )
        if not usable:
            raise UserError(f"DSPARK_OPS=triton, but Triton cannot run here: {why}")
    if mode == "torch" or _OPS[name].triton is None or not usable:
        return "torch"
    return "triton"


def backends() -> dict[str, str]:
    """The implementation that each op runs with now: op name -> ``torch`` or ``triton``."""
    return {name: _choose(name, _mode()) for name in _OPS}


def _implementation(name: str) -> Callable[..., Any]:
    op = _OPS[name]
    return op.triton if op.triton is not None and _choose(name, _mode()) == "triton" else op.torch


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """Chunked KDA over many rows; see ``dspark_kernels.kda.chunk``."""
    return _implementation("kda_chunk")(q, k, v, g, beta, state, lower_bound)


def kda_step(
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
    """KDA over a few rows, a chain or a tree, keeping the state of the first ``keep``; see
    ``dspark_kernels.kda.step``."""
    return _implementation("kda_step")(q, k, v, g, beta, state, keep, out, upto)


def kda_states_at(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    positions: Tensor,
    lower_bound: float | None,
) -> Tensor:
    """The KDA state of a text at chosen positions; see ``dspark_kernels.kda_states.states_at``."""
    return _implementation("kda_states_at")(k, v, g, beta, state, positions, lower_bound)


def linear_kda_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    order: LinearOrder,
    parents: Tensor | None,
    lower_bound: float | None,
) -> Tensor:
    """Linearised KDA over one block; see ``dspark_kernels.linear_kda.block``."""
    return _implementation("linear_kda_block")(q, k, v, g, beta, state, order, parents, lower_bound)


def linear_kda_norm(k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """|A| of every block and head, for reports; see ``dspark_kernels.linear_kda.norm_of_A``."""
    return linear_kda.norm_of_A(k, g, beta)
