"""Attention of anchored blocks, forward and backward, beside flex attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark_kernels import block_attention as reference
from dspark_kernels.bench.harness import Case, Thunk

LENGTH, ANCHORS, SLOTS, HEADS, KEY_HEADS, WIDTH = 4096, 512, 7, 32, 8, 128


def cases() -> Iterator[Case]:
    """A layer of a drafter for Qwen3-4B."""
    forward, backward = reference.cost(_anchors("cpu"), SLOTS, HEADS, WIDTH)
    count = ANCHORS * SLOTS
    queries, keys = 2 * count * HEADS * WIDTH, 2 * (LENGTH + count) * KEY_HEADS * WIDTH
    for name, back, moved, flops in (
        ("forward", False, 2 * queries + 2 * keys, forward),
        ("forward and backward", True, 6 * queries + 6 * keys, forward + backward),
    ):
        yield Case(
            f"{name}, {ANCHORS} x {SLOTS} in {LENGTH}", moved, flops, partial(_kernel, back),
            partial(_flex, back), "flex attention",
        )  # fmt: skip


def _anchors(device: str = "cuda") -> Tensor:
    order = torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(0))
    return order[:ANCHORS].sort().values[None].to(device)


def _inputs() -> tuple[list[Tensor], Tensor]:
    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(1, rows, heads, WIDTH, device="cuda", dtype=torch.bfloat16)

    count = ANCHORS * SLOTS
    shapes = (count, HEADS), (LENGTH + count, KEY_HEADS), (LENGTH + count, KEY_HEADS)
    return [normal(*shape).requires_grad_() for shape in shapes], normal(count, HEADS)


def _kernel(back: bool) -> Thunk:
    from dspark_kernels import block_attention_triton as kernel

    inputs, gradient = _inputs()
    anchors, lengths = _anchors(), torch.tensor([LENGTH], device="cuda")

    def attend() -> Any:
        q, k, v = inputs
        out = kernel.block_attention(q, k, v, anchors, lengths, SLOTS, WIDTH**-0.5)
        return torch.autograd.grad(out, inputs, gradient) if back else out

    return attend


def _flex(back: bool) -> Thunk:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs, gradient = _inputs()
    anchors, count = _anchors(), ANCHORS * SLOTS

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (k - LENGTH) // SLOTS == q // SLOTS
        return torch.where(k < LENGTH, k < anchors[b, q // SLOTS], own)

    mask = create_block_mask(sees, 1, None, count, LENGTH + count, device="cuda")
    call: Any = torch.compile(flex_attention)

    def attend() -> Any:
        q, k, v = (each.transpose(1, 2) for each in inputs)
        out = call(q, k, v, block_mask=mask, scale=WIDTH**-0.5, enable_gqa=True).transpose(1, 2)
        return torch.autograd.grad(out, inputs, gradient) if back else out

    return attend
