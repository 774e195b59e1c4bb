"""A layer's experts for one and for eight rows: Kimi-Linear's in bfloat16, K3's in MXFP4.

Rows choose independently here, which is the most that a block of eight can read; how many distinct
experts that was is part of a case's name. Sets of inputs share one layer: each chooses its own
experts, so no call finds the ones before it in the L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from dspark_kernels import moe_decode as plain
from dspark_kernels import moe_decode_triton as kernel
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.moe_decode import Experts, MoE

EPS = 1e-5
NOISE = 2**22


def cases() -> Iterator[Case]:
    """Both models' layers."""
    for name, layer in (
        ("Kimi-Linear 32 experts", lambda: kimi_linear(32)),
        ("Kimi-Linear 256 experts", lambda: kimi_linear(256)),
        ("K3 MXFP4", k3),
    ):
        moe = layer()
        for n in (1, 8):
            yield _case(name, moe, n)
        del moe


def _case(name: str, moe: MoE, n: int) -> Case:
    torch.manual_seed(n)
    norm = torch.ones_like(moe.inputs[0])
    rows = [torch.randn(n, len(norm), device="cuda").bfloat16() for _ in range(8)]
    distinct = [
        len(kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=x)[1].unique()) for x in rows
    ]
    mean = sum(distinct) / len(distinct)
    turn = iter(range(10**9))

    def maker(call: Callable[..., object]) -> Callable[[], Thunk]:
        def make() -> Thunk:
            x = rows[next(turn) % len(rows)]
            return lambda: call(x, moe, norm=norm, eps=EPS, residual=x)

        return make

    small = moe.experts.scales is None
    return Case(
        f"{name}, {n} rows, {mean:.1f} distinct",
        plain.moved_bytes(n, round(mean), moe),
        plain.flops(n, moe),
        maker(kernel.moe_decode),
        maker(plain.moe_decode) if small else None,
        f"gathered products, torch {torch.__version__}" if small else "",
    )


@cache
def _noise() -> Tensor:
    return torch.randn(NOISE, device="cuda").bfloat16()


def _weights(*shape: int) -> Tensor:
    """Random enough, and made without a second copy of gigabytes in float32."""
    weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    flat = weight.view(-1)
    for start in range(0, flat.numel(), NOISE):
        part = flat[start : start + NOISE]
        torch.mul(_noise()[: len(part)], shape[-1] ** -0.5, out=part)
    return weight


def kimi_linear(experts: int) -> MoE:
    """Hidden 2304, top 8 of so many experts of width 1024, one shared, SiLU."""
    D, inner = 2304, 1024
    return plain.pack(
        torch.randn(experts, D, device="cuda").mul_(D**-0.5).bfloat16(),
        torch.zeros(experts, device="cuda"),
        Experts(
            _weights(experts, inner, D),
            _weights(experts, inner, D),
            _weights(experts, D, inner),
        ),
        down=None,
        up=None,
        shared_gate_up=_weights(2 * inner, D),
        shared_down=_weights(D, inner),
        norm=None,
        norm_eps=EPS,
        top_k=8,
        renormalise=True,
        scaling=2.446,
        situ=None,
    )


def k3() -> MoE:
    """Hidden 7168, latent 3584, top 16 of 896 MXFP4 experts of width 3072, two shared, SiTU."""
    D, L, E, inner, S = 7168, 3584, 896, 3072, 6144

    def codes(*shape: int) -> Tensor:
        return torch.randint(256, shape, dtype=torch.uint8, device="cuda")

    def scales(*shape: int) -> Tensor:
        return torch.randint(117, 121, shape, dtype=torch.uint8, device="cuda")

    return plain.pack(
        torch.randn(E, D, device="cuda").mul_(D**-0.5).bfloat16(),
        torch.zeros(E, device="cuda"),
        Experts(
            codes(E, inner, L // 2),
            codes(E, inner, L // 2),
            codes(E, L, inner // 2),
            (scales(E, inner, L // 32), scales(E, inner, L // 32), scales(E, L, inner // 32)),
        ),
        down=_weights(L, D),
        up=_weights(D, L),
        shared_gate_up=_weights(2 * S, D),
        shared_down=_weights(D, S),
        norm=torch.ones(L, dtype=torch.bfloat16, device="cuda"),
        norm_eps=EPS,
        top_k=16,
        renormalise=True,
        scaling=1.0,
        situ=(4.0, 25.0),
    )
