"""A layer's experts for one and for eight rows: Kimi-Linear's in bfloat16, K3's in MXFP4.

Rows choose independently here, which is the most that a block of eight can read; how many distinct
experts that was is part of a case's name. Sets of inputs share one layer: each chooses its own
experts, so no call finds the ones before it in the L2.

64, 144 and 576 rows are seats of a batch, in blocks of several lengths; beside them are parts of 16
rows, and torch's product of groups between gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from dspark_kernels import moe_decode as plain
from dspark_kernels import moe_decode_triton as kernel
from dspark_kernels import moe_grouped_triton as grouped
from dspark_kernels.bench.harness import Case, Thunk
from dspark_kernels.linear_rows import MAX_ROWS, activate
from dspark_kernels.moe_decode import Experts, MoE

EPS = 1e-5
MANY = (64, 144, 576)
NOISE = 2**22


def cases() -> Iterator[Case]:
    """Both models' layers."""
    for name, layer in (
        ("Kimi-Linear 32 experts", lambda: kimi_linear(32)),
        ("Kimi-Linear 256 experts", lambda: kimi_linear(256)),
        ("K3 MXFP4", k3),
        ("Twin 8gb", twin),
    ):
        moe = layer()
        for n in (1, 8):
            yield _case(name, moe, n, kernel.moe_decode, *_gathered(moe))
        for n in MANY:
            yield from _many(name, moe, n)
        del moe


Call = Callable[..., object]


def _gathered(moe: MoE) -> tuple[Call | None, str]:
    small = moe.experts.scales is None
    peer = f"gathered products, torch {torch.__version__}"
    return (plain.moe_decode, peer) if small else (None, "")


def _many(name: str, moe: MoE, n: int) -> Iterator[Case]:
    """Blocks of the length that is picked, beside both other ways; then blocks of other lengths."""
    picked = grouped.block_plan(n, moe).rows
    yield _case(f"{name}, blocks of {picked}", moe, n, grouped.moe_decode, in_parts, "parts of 16")
    if moe.experts.packed:
        return
    peer = f"grouped_mm, torch {torch.__version__}"
    yield _case(f"{name}, blocks of {picked}", moe, n, grouped.moe_decode, by_groups, peer)
    for length in sorted({32, 64} - {picked}):
        how = grouped.plan_of(n, moe, length)

        def call(x: Tensor, moe: MoE, *, norm: Tensor, eps: float, residual: Tensor) -> object:
            return grouped.by_blocks(x, moe, norm, eps, residual, how)  # noqa: B023

        yield _case(f"{name}, blocks of {length}", moe, n, call, None, "")


def _case(name: str, moe: MoE, n: int, ours: Call, peer: Call | None, peer_name: str) -> Case:
    torch.manual_seed(n)
    norm = torch.ones_like(moe.inputs[0])
    rows = [torch.randn(n, len(norm), device="cuda").bfloat16() for _ in range(8)]
    distinct = [
        len(grouped.moe_decode(x, moe, norm=norm, eps=EPS, residual=x)[1].unique()) for x in rows
    ]
    mean = sum(distinct) / len(distinct)
    turn = iter(range(10**9))

    def maker(call: Call) -> Callable[[], Thunk]:
        def make() -> Thunk:
            x = rows[next(turn) % len(rows)]
            return lambda: call(x, moe, norm=norm, eps=EPS, residual=x)

        return make

    return Case(
        f"{name}, {n} rows, {mean:.1f} distinct",
        plain.moved_bytes(n, round(mean), moe),
        plain.flops(n, moe),
        maker(ours),
        None if peer is None else maker(peer),
        peer_name,
    )


def in_parts(x: Tensor, moe: MoE, *, norm: Tensor, eps: float, residual: Tensor) -> object:
    """Sixteen rows after sixteen rows."""
    parts = zip(x.split(MAX_ROWS), residual.split(MAX_ROWS), strict=True)
    return [kernel.moe_decode(a, moe, norm=norm, eps=eps, residual=b) for a, b in parts]


def by_groups(x: Tensor, moe: MoE, *, norm: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Torch's products of groups; choice and sum are ours, and so is what is around the experts."""
    how = grouped.block_plan(x.shape[0], moe)
    projected = grouped.project(x, moe.inputs, norm, eps, None, torch.float32, how)
    ids, weights, z, tail = kernel.route_rows(x, moe, norm, eps, projected)
    experts = torch.arange(moe.experts.count, device=x.device)
    ends = (ids.flatten()[:, None] == experts).sum(0).cumsum(0).int()
    order = ids.flatten().argsort(stable=True)
    w1, w3, w2 = (w.transpose(1, 2) for w in (moe.experts.w1, moe.experts.w3, moe.experts.w2))
    given = z[order // moe.top_k]
    gate, up = (torch._grouped_mm(given, w, offs=ends) for w in (w1, w3))
    out = torch._grouped_mm(activate(gate, up, moe.situ).to(x.dtype), w2, offs=ends)
    partial = torch.empty(out.shape, dtype=torch.float32, device=x.device)
    partial[order] = out.float()
    return grouped.together(partial, weights, tail, residual, moe, how)


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


def twin() -> MoE:
    """Of `dspark_eval.twins`, 8gb: latent 1536, top 16 of 128 experts of width 3072, of which a
    text chooses 64."""
    D, L, E, inner, S = 3072, 1536, 128, 3072, 6144
    bias = torch.zeros(E, device="cuda")
    bias[E // 2 :] = -9.0
    return plain.pack(
        torch.randn(E, D, device="cuda").mul_(D**-0.5).bfloat16(),
        bias,
        Experts(_weights(E, inner, L), _weights(E, inner, L), _weights(E, L, inner)),
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
