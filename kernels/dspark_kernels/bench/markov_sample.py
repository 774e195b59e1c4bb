"""A block of seven tokens from the sequential head, beside the same walk in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from dspark_kernels import markov_code
from dspark_kernels import markov_sample as plain
from dspark_kernels import markov_sample_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk

VOCAB, RANK, SLOTS = 163_840, 256, 7
HIDDEN = {"gated": 1, "rnn": 3}
"""Heads whose codes are made, and how many times R numbers a slot's hidden state says of them."""
KINDS = ("greedy", "greedy, gated", "greedy, rnn", "temperature 1", "top-p 0.95", "top-k 50")


def cases() -> Iterator[Case]:
    """K3's vocabulary and the published rank; the table is read once per slot."""
    for batch, kinds in ((1, KINDS), (16, ("greedy", "greedy, rnn", "temperature 1"))):
        for kind in kinds:
            head = next((name for name in HIDDEN if name in kind), None)
            code = markov_code.moved_bytes(RANK, SLOTS, 2, head == "rnn") if head else 0
            yield Case(
                f"{SLOTS} slots, vocabulary {VOCAB}, rank {RANK}, batch {batch}, {kind}",
                plain.moved_bytes(batch, SLOTS, VOCAB, RANK, 2) + code,
                plain.flops(batch, SLOTS, VOCAB, RANK),
                _maker(kernel.markov_sample, batch, kind, head),
                _maker(plain.markov_sample, batch, kind, head),
                f"torch {torch.__version__}",
            )


def _maker(
    call: Callable[..., object], batch: int, kind: str, head: str | None
) -> Callable[[], Thunk]:
    def make() -> Thunk:
        w1, w2 = (
            torch.empty(VOCAB, RANK, dtype=torch.bfloat16, device="cuda").normal_(std=0.1)
            for _ in range(2)
        )
        base = torch.empty(batch, SLOTS, VOCAB, dtype=torch.bfloat16, device="cuda")
        base.normal_(std=2.5)
        anchor = torch.randint(VOCAB, (batch,), device="cuda")
        if "greedy" in kind:
            return partial(call, base, anchor, w1, w2, coder=_coder(batch, head))
        coins = torch.rand(batch, SLOTS, dtype=torch.float64, device="cuda")
        warm = torch.ones(batch, device="cuda")
        top_k = torch.full((batch,), 50, device="cuda") if "top-k" in kind else None
        top_p = torch.full((batch,), 0.95, device="cuda") if "top-p" in kind else None
        return lambda: call(base, anchor, w1, w2, coins, warm, top_k, top_p)

    return make


def _coder(batch: int, head: str | None) -> markov_code.Coder | None:
    if head is None:
        return None
    outputs, inputs = HIDDEN[head] * RANK, RANK if head == "gated" else 2 * RANK
    weight = torch.randn(outputs, inputs, device="cuda").bfloat16() * inputs**-0.5
    fixed = torch.randn(batch, SLOTS, outputs, device="cuda").bfloat16()
    return markov_code.Coder(fixed, weight, head == "rnn")
