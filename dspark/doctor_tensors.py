"""Weights that no training has touched, and weights that are no numbers.

    non-finite   a NaN or an infinity
    norm of one  every weight of a norm is exactly 1, as all of them are before the first step
    zero bias    w2 of the sequential head is all zero, where it starts
    constant     all numbers of a tensor are one number
    fresh        a matrix whose mean, variance and fourth moment are those of a normal draw with a
                 standard deviation that fresh weights have: 0.02, n^-1/2 of its fan-in n, or half
                 of it into the residual stream (a table of the sequential head that started at 1
                 is a random code that may stay one, and is let be)

A drafter with such tensors loads, runs and accepts next to nothing. The last rule is a statistic:
within five standard errors of all three moments, and only for 32,768 numbers or more: there the
five are 4 % of the variance, which a matrix leaves in a short run. (150 steps left a key projection
of 64 x 128 at 6 %, within five errors of so few.) One tensor is in memory at a time.

Letters: n fan-in or count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.draft.model import INIT_STD
from dspark.draft.start import RESIDUAL_OUTPUTS

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
ENOUGH = 1 << 15
ERRORS = 5.0
NAMED = 4


@dataclass
class _Found:
    """Names of tensors by what is wrong with them."""

    broken: list[str] = field(default_factory=list)
    ones: list[str] = field(default_factory=list)
    norms: int = 0
    zero: list[str] = field(default_factory=list)
    constant: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)


def examine_tensors(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """A sentence for each kind of fault that these tensors of a drafter have, by our names."""
    found = _Found()
    coarse = False
    for name, tensor in tensors:
        if tensor.is_floating_point():
            coarse |= tensor.dtype.itemsize < 4
            _sort(found, name, tensor)
    # Next to 1 a half precision has steps of 1/256: some norms may have come back to it.
    ones = found.ones if not coarse or len(found.ones) == found.norms else []
    sayings = (
        (found.broken, "not finite: {}; whatever they touch is lost"),
        (ones, "exactly 1, as before any training: {}; training was lost or never ran"),
        (found.zero, "all zero, as before any training: {}; the sequential head does nothing"),
        (found.constant, "the same number everywhere: {}; training was lost or never ran"),
        (found.fresh, "distributed as fresh weights: {}; training was lost or hardly ran"),
    )
    return [f"weights {text.format(listed(names))}" for names, text in sayings if names]


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _sort(found: _Found, name: str, tensor: Tensor) -> None:
    values = tensor.float()
    norm = tensor.ndim == 1 and name.endswith("norm.weight")
    found.norms += norm
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        found.broken.append(f"{name} ({bad} of {tensor.numel()})")
        return
    low, high = (float(v) for v in torch.aminmax(values))
    if norm and low == high == 1.0:
        found.ones.append(name)
    elif name == W2 and low == high == 0.0:
        found.zero.append(name)
    elif low == high and tensor.numel() > 1:
        found.constant.append(f"{name} ({low:g})")
    elif any(looks_fresh(values, std) for std in _fresh_stds(name, tensor)):
        found.fresh.append(name)


def _fresh_stds(name: str, tensor: Tensor) -> list[float]:
    """Standard deviations that such a tensor may start with."""
    if tensor.ndim != 2:
        return []
    if name == W1:
        return [INIT_STD]
    fan_in = float(tensor.shape[1] ** -0.5)
    residual = any(part in name for part in RESIDUAL_OUTPUTS)
    return [fan_in * (0.5 if residual else 1.0), INIT_STD]


def looks_fresh(values: Tensor, std: float) -> bool:
    """Whether numbers are, by three moments, a normal draw of that standard deviation around 0."""
    n = values.numel()
    if n < ENOUGH:
        return False
    z = values.double().flatten() / std
    second = float(z.square().mean())
    return (
        abs(second - 1) < ERRORS * math.sqrt(2 / n)
        and abs(float(z.mean())) < ERRORS / math.sqrt(n)
        and abs(float(z.pow(4).mean()) / second**2 - 3) < ERRORS * math.sqrt(24 / n)
    )
