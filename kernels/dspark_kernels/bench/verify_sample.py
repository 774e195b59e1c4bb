"""The verdict on seven drafted tokens, beside the same in plain torch, which sorts for its cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dspark_kernels import verify_sample as plain
from dspark_kernels import verify_sample_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.law import Law, law_of

VOCAB, COUNT = 163_840, 7
KINDS = ("greedy", "temperature 1", "top-p 0.95", "top-k 50")


def cases() -> Iterator[Case]:
    """K3's vocabulary; logits of the target in bf16."""
    for batch, kinds in ((1, KINDS), (16, KINDS[:2])):
        for kind in kinds:
            yield Case(
                f"{COUNT} drafted, vocabulary {VOCAB}, batch {batch}, {kind}",
                plain.moved_bytes(batch, COUNT, VOCAB, 2, drawn=kind != "greedy"),
                0,
                _maker(kernel.verify_sample, batch, kind),
                _maker(plain.verify_sample, batch, kind),
                f"torch {torch.__version__}",
            )


def _maker(call: Callable[..., object], batch: int, kind: str) -> Callable[[], Thunk]:
    def make() -> Thunk:
        logits = torch.empty(batch, COUNT + 1, VOCAB, dtype=torch.bfloat16, device="cuda")
        logits.normal_(std=2.5)
        scores = logits[:, :COUNT].float()
        scores += 0.5 * torch.randn_like(scores)
        tokens = scores.argmax(-1)
        lengths = torch.full((batch,), COUNT, device="cuda")
        if kind == "greedy":
            return lambda: call(logits, tokens, lengths)
        warm = torch.ones(batch, device="cuda")
        law = Law(*(x.contiguous() for x in law_of(scores, warm[:, None].expand(batch, COUNT))))
        coins = torch.rand(batch, COUNT + 1, dtype=torch.float64, device="cuda")
        top_k = torch.full((batch,), 50, device="cuda") if "top-k" in kind else None
        top_p = torch.full((batch,), 0.95, device="cuda") if "top-p" in kind else None
        return lambda: call(logits, tokens, lengths, scores, law, coins, warm, top_k, top_p)

    return make
