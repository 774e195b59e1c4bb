"""What lies between the products of a layer in training, forward and backward, one pass each.

    norm    h = hidden + added        n = h / rms(h) * w         (the sum in float32, n in half)
    turn    n = half(x / rms(x)) * w of every head, then rotary: y = n cos + partner(n) sin
    gate    silu(gate) * up

A pass reads each of its inputs once and writes each result once; statistics and products are in
float32. Norms are recomputed from their input in the backward pass, of `norm` the root is kept.

Letters: n rows, D width, H heads, K channels of a head, F inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm_rows(
    hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, half: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Add and norm.

    Args:
        hidden: [n, D] float32; without `added` also in half precision.
        added: [n, D] in half precision, or None.
        weight: [D] float32.
        eps: Of the norm.
        half: Dtype of the normed rows.

    Returns:
        The sum [n, D] float32 (`hidden` itself without `added`), the normed rows [n, D], and
        1 / rms of every row, [n] float32.
    """
    if added is not None:
        hidden = hidden + added
    wide = hidden.to(weight.dtype)
    root = (wide.square().mean(-1) + eps).rsqrt()
    return hidden, (wide * root[:, None] * weight).to(half), root


def norm_rows_back(
    hidden: Tensor, weight: Tensor, root: Tensor, gradient: Tensor, through: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `norm_rows`.

    Args:
        hidden: The sum it returned. weight, root: as given and returned.
        gradient: [n, D], of the normed rows, in half precision.
        through: [n, D] float32, of the sum.

    Returns:
        Gradient of the sum [n, D] in float32, the same in the dtype of `gradient`, and that of the
        weight, [D] float32.
    """
    pulled, of_weight = _norm_back(hidden, weight, root, gradient)
    total = through + pulled
    return total, total.to(gradient.dtype), of_weight


def norm_half_back(
    x: Tensor, weight: Tensor, root: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward of `norm_rows` of rows x [n, D] in half precision, for a gradient of any dtype.

    Returns those of x, in its dtype, and of the weight, [D] float32.
    """
    pulled, of_weight = _norm_back(x, weight, root, gradient)
    return pulled.to(x.dtype), of_weight


def _norm_back(x: Tensor, weight: Tensor, root: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    unit, wide = x.to(weight.dtype) * root[:, None], gradient.to(weight.dtype)
    scaled = wide * weight
    inner = (scaled * unit).mean(-1, keepdim=True)
    return root[:, None] * (scaled - unit * inner), (wide * unit).sum(0)


def turn_heads(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, start: int, eps: float
) -> Tensor:
    """Normed and turned heads.

    Args:
        x: [B, n, H, K] in half precision; row r stands at position `start` + r of the tables.
        weight: [K] float32.
        cos, sin: [B, at least start + n, K] float32, sines with their sign; halves are pairs.
        start: First row of the tables.
        eps: Of the norm.

    Returns:
        [B, n, H, K] in the dtype of x.
    """
    wide = x.to(weight.dtype)
    unit = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    return _turned(unit * weight, *_rows(x, cos, sin, start)).to(x.dtype)


def turn_heads_back(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, start: int, eps: float, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward of `turn_heads`: gradients of x [B, n, H, K] and of the weight [K] float32."""
    cos, sin = _rows(x, cos, sin, start)
    gradient = gradient.to(weight.dtype)
    normed = gradient * cos + (gradient * sin).roll(x.shape[-1] // 2, -1)
    wide = x.to(weight.dtype)
    root = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit, scaled = wide * root, normed * weight
    inner = (scaled * unit).mean(-1, keepdim=True)
    of_weight = (normed * unit).flatten(0, -2).sum(0)
    return (root * (scaled - unit * inner)).to(x.dtype), of_weight


def gate_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [n, F] in half precision."""
    return (torch.nn.functional.silu(_wide(gate)) * up).to(gate.dtype)


def gate_silu_back(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `gate_silu`: gradients of gate and up, and its result once more, [n, F]."""
    wide, pulled = _wide(gate), _wide(gradient)
    chance = wide.sigmoid()
    silu = wide * chance
    of_gate = pulled * up * (chance + silu * (1 - chance))
    half = gate.dtype
    return of_gate.to(half), (pulled * silu).to(half), (silu * up).to(half)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(x: Tensor, cos: Tensor, sin: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The tables of the rows of x, [B, n, 1, K]."""
    rows = slice(start, start + x.shape[1])
    return cos[:, rows, None], sin[:, rows, None]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def cost(rows: int, width: int, heads: int, head_dim: int, inner: int) -> dict[str, int]:
    """Bytes that each pass must move, of `rows` rows, with 2 bytes for half precision."""
    hidden, projected, ffn = rows * width, rows * heads * head_dim, rows * inner
    return {
        "norm_rows": 12 * hidden, "norm_rows_back": 16 * hidden, "turn_heads": 4 * projected,
        "turn_heads_back": 6 * projected, "gate_silu": 6 * ffn, "gate_silu_back": 12 * ffn,
    }  # fmt: skip
