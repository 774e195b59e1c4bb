"""KDA in chunks at prefill and training sizes, heads of 128; the peer is fla's `chunk_kda`.

Both take q, k and v in bfloat16 and log-decays, write strengths and states in float32, or all in
float32, which fla multiplies in tf32. The gate is K3's, bounded at -5 per row, and both are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels import kda, kda_states
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.kda_chunk_triton import chunk, refuses
from dspark_kernels.kda_states_triton import refuses as states_refuses
from dspark_kernels.kda_states_triton import states_at

WIDTH = 128
BOUND = -5.0
TOKENS, HEADS = (2048, 8192, 32768), (32, 96)
TRAINED = (2048, 8192)
Form = Callable[..., tuple[Tensor, Tensor]]


def inputs(tokens: int, heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, g, beta and an entering state on the GPU."""
    shape = (1, tokens, heads, WIDTH)
    q, k, v = (torch.empty(shape, device="cuda").normal_() for _ in range(3))
    q, k = F.normalize(q, dim=-1) * WIDTH**-0.5, F.normalize(k, dim=-1)
    g = BOUND * torch.empty(shape, device="cuda").uniform_().pow_(4)
    beta = torch.rand(shape[:3], device="cuda")
    state = torch.randn(1, heads, WIDTH, WIDTH, device="cuda")
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta, state]


def _ours(*rows: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = rows
    return chunk(q, k, v, g, beta, state, BOUND)


def _fla(*rows: Tensor) -> tuple[Tensor, Tensor]:
    from fla.ops.kda import chunk_kda  # type: ignore[import-not-found,import-untyped,unused-ignore]

    out, state = chunk_kda(
        *rows[:5],
        scale=1.0,
        initial_state=rows[5],
        output_final_state=True,
        safe_gate=True,
        lower_bound=BOUND,
    )
    return out, state


def _forward(form: Form, tokens: int, heads: int, dtype: torch.dtype) -> Thunk:
    given = inputs(tokens, heads, dtype)

    def call() -> object:
        with torch.no_grad():
            return form(*given)

    return call


def _training(form: Form, tokens: int, heads: int, dtype: torch.dtype) -> Thunk:
    given = [x.requires_grad_() for x in inputs(tokens, heads, dtype)]
    flow = torch.randn_like(given[2]), torch.randn_like(given[5])
    return lambda: torch.autograd.grad(form(*given), given, flow)


def _states(tokens: int, heads: int, anchors: int) -> Thunk:
    given = [x.requires_grad_() for x in inputs(tokens, heads, torch.float32)[1:]]
    k, v, g, beta, state = given
    positions = torch.randint(tokens, (1, anchors), device="cuda")
    flow = torch.randn(1, anchors, heads, WIDTH, WIDTH, device="cuda")

    def call() -> object:
        states = states_at(k, v, g, beta, state, positions, BOUND)
        return torch.autograd.grad(states, given, flow)

    return call


def _peer() -> str:
    try:
        return f"fla {version('fla-core')}"
    except PackageNotFoundError:
        return ""


def _taken(dtype: torch.dtype, training: bool) -> bool:
    """Whether the kernels take such rows: nothing else is timed under their name."""
    q, k, v, g, beta, state = (x.requires_grad_(training) for x in inputs(64, 1, dtype))
    return refuses(q, k, v, g, beta, state, BOUND) is None


def every_kernel() -> Iterator[Case]:
    """Cases that between them run every kernel, ours and the peer's, at their shortest."""
    return (case for case in cases() if case.name.startswith(f"kda_chunk {TOKENS[0]} "))


def _states_taken() -> bool:
    _, k, v, g, beta, state = inputs(64, 1, torch.float32)
    positions = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    return states_refuses(k, v, g, beta, state, positions, BOUND) is None


def cases() -> Iterator[Case]:
    """Every size forward, the smaller ones with their gradients; then states at anchors."""
    kinds = (("", _forward, TOKENS), (" + backward", _training, TRAINED))
    for dtype, (kind, run, sizes) in product((torch.bfloat16, torch.float32), kinds):
        if _taken(dtype, bool(kind)):
            for heads, tokens in product(HEADS, sizes):
                yield _case(tokens, heads, dtype, kind, run)
    if _states_taken():
        yield Case(
            "kda_states_at 4096 x 20, 512 anchors, float32 + backward",
            kda_states.states_bytes(1, 4096, 20, WIDTH, WIDTH, 512, backward=True),
            0,
            partial(_states, 4096, 20, 512),
        )


def _case(
    tokens: int, heads: int, dtype: torch.dtype, kind: str, run: Callable[..., Thunk]
) -> Case:
    peer = _peer()
    return Case(
        f"kda_chunk {tokens} x {heads} {str(dtype).removeprefix('torch.')}{kind}",
        kda.chunk_bytes(1, tokens, heads, WIDTH, WIDTH, dtype.itemsize, bool(kind)),
        kda.chunk_flops(1, tokens, heads, WIDTH, WIDTH, bool(kind)),
        partial(run, _ours, tokens, heads, dtype),
        partial(run, _fla, tokens, heads, dtype) if peer else None,
        peer,
    )
