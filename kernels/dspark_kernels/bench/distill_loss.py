"""Terms and gradient of a distillation loss over logits, beside torch compiled on the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dspark_kernels import distill_loss
from dspark_kernels.bench.harness import Case, Thunk

SIZES = ((1792, 1200, 151_936), (1792, 1200, 163_840))
"""Slots, positions of the target that they share, vocabulary."""


def cases() -> Iterator[Case]:
    """Both calls at the chunk of a training step, for Qwen3's vocabulary and K3's."""
    for slots, positions, vocab in SIZES:
        moved, operations = distill_loss.cost(slots, positions, vocab)
        yield Case(
            f"terms + pull, {slots} slots, V {vocab}", moved, operations,
            partial(_kernel, slots, positions, vocab), partial(_compiled, slots, positions, vocab),
            "torch.compile",
        )  # fmt: skip


def _kernel(slots: int, positions: int, vocab: int) -> Thunk:
    from dspark_kernels import distill_loss_triton as kernel

    return _call(kernel.terms, kernel.pull, slots, positions, vocab)


def _compiled(slots: int, positions: int, vocab: int) -> Thunk:
    terms, pull = (torch.compile(f) for f in (distill_loss.terms, distill_loss.pull))
    return _call(terms, pull, slots, positions, vocab)


def _call(
    terms: Callable[..., Any],
    pull: Callable[..., Any],
    slots: int,
    positions: int,
    vocab: int,
) -> Thunk:
    z, target = (
        torch.randn(n, vocab, device="cuda", dtype=torch.bfloat16).mul_(3)
        for n in (slots, positions)
    )
    rows = torch.randint(positions, (slots,), device="cuda").sort().values
    labels = torch.randint(vocab, (slots,), device="cuda")
    worth = torch.tensor([0.1, 0.9, 0, 0, 0], device="cuda")[:, None].repeat(1, slots)

    def both() -> Any:
        found = terms(z, target, rows, labels, False)
        return pull(z, target, rows, labels, False, found, worth)

    return both
