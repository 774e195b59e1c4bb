"""A read of Attention Residuals at K3's width; the peer is the reference, compiled by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from dspark_kernels import attn_res
from dspark_kernels.attn_res_triton import attn_res_mix as kernel
from dspark_kernels.bench.harness import Case, Thunk

WIDTH, EPS = 7168, 1e-5


@cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(attn_res.attn_res_mix, dynamic=False)
    return compiled


def _make(rows: int, count: int, ours: bool) -> Thunk:
    prefix, added = torch.randn(2, rows, WIDTH, device="cuda").bfloat16()
    bank = torch.randn(count, rows, WIDTH, device="cuda").bfloat16()
    key = torch.randn(WIDTH, device="cuda") * WIDTH**-0.5
    weight = torch.ones(WIDTH, device="cuda").bfloat16()
    op = kernel if ours else _compiled()
    return partial(op, prefix, bank, count, key, EPS, weight, EPS, added)


def cases() -> Iterator[Case]:
    for rows, count in ((1, 1), (1, 8), (8, 8), (16, 8), (64, 8)):
        nbytes, flops = attn_res.cost(rows, WIDTH, count, added=True, append=False)
        yield Case(
            f"{rows} rows, {count} entries of {WIDTH}",
            nbytes,
            flops,
            partial(_make, rows, count, True),
            partial(_make, rows, count, False),
            "torch.compile",
        )
