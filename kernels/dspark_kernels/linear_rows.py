"""Projections of 1 to 16 rows, whose time is the time to read the weight once.

    linear_rows:  out = norm(x) W^T + residual
    gated_rows:   out = act(norm(x) W_gate^T, norm(x) W_up^T),  W = [W_gate; W_up]

    norm(x) = x / sqrt(mean x^2 + eps) * w, or x as it is
    act     = silu(g) u, or SiTU: b tanh(g / b) sigmoid(g) * l tanh(u / l)

Plain torch: the specification, and what runs where the kernel does not (there the product is the
library's). Letters: n rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ROWS = 16
"""Rows of one call of the kernels: what one matrix instruction holds anyway."""

Situ = tuple[float, float] | None
"""(beta, linear beta) of SiTU; None: SiLU."""


def linear_rows(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    soon: Tensor | None = None,
) -> Tensor:
    """norm(x) W^T + residual.

    Args:
        x: [n, I] in the weight's dtype.
        weight: [O, I].
        norm: [I]; None: no norm.
        eps: Of the norm.
        residual: [n, O]; never written.
        soon: A contiguous weight that is read after what follows: a kernel may fetch its beginning
            while memory has nothing else to do. It changes no result.

    Returns:
        [n, O] in the weight's dtype; sums are float32 or wider.
    """
    out = F.linear(normed(x, norm, eps), weight)
    return out if residual is None else out + residual


def gated_rows(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    situ: Situ = None,
) -> Tensor:
    """act(gate, up) of a packed weight: the first half of a gated MLP.

    Args:
        x: [n, I] in the weight's dtype.
        weight: [2 S, I]: all gate rows, then all up rows.
        norm: [I]; None: no norm.
        eps: Of the norm.
        situ: Betas of SiTU; None: SiLU.

    Returns:
        [n, S] in the weight's dtype.
    """
    gate, up = F.linear(normed(x, norm, eps), weight).chunk(2, dim=-1)
    return activate(gate, up, situ).to(weight.dtype)


def normed(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """The root-mean-square norm over the last dimension, statistics in float32 or wider."""
    if norm is None:
        return x
    wide = x.to(wider(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * norm


def activate(gate: Tensor, up: Tensor, situ: Situ) -> Tensor:
    """SiLU- or SiTU-gated ``up`` in float32 or wider."""
    g, u = gate.to(wider(gate.dtype)), up.to(wider(up.dtype))
    if situ is None:
        return F.silu(g) * u
    beta, linear_beta = situ
    return (
        beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
    )


def wider(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where that is what comes in."""
    return torch.promote_types(dtype, torch.float32)


def moved_bytes(n: int, inputs: int, outputs: int, itemsize: int, residual: bool) -> int:
    """Bytes of one call if everything is read or written once."""
    return itemsize * (outputs * inputs + n * (inputs + outputs * (2 if residual else 1)))


def flops(n: int, inputs: int, outputs: int) -> int:
    """A multiply and an add count as two."""
    return 2 * n * inputs * outputs
