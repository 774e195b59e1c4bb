"""`moe_decode` in Triton: a layer's experts in three to six launches, each expert's bytes once.

    1 project   router, latent inputs, shared gate and up: one product, float32 out
    2 route     top k, weights, z, the shared expert's hidden row
    3 gate_up   h[row, j] = act(W1 z, W3 z)            program (tile of outputs, slot)
    4 down      partial[row, j] = W2 h                 and the shared expert's down
    5 combine   sum in a row's own order, norm
    6 project   back to D, with the shared expert      only with a latent space

One row without a latent space takes 4 and 5 in one pass; with few experts 2 and 3 too,
and then the shared expert's gate and up come along with the routed ones.

The grid has min(n k, E) slots whatever the rows chose. With fewer choices than experts a slot is a
choice, and works if no earlier one is the same expert; else a slot is an expert, and works if any
row chose it. An idle slot returns at once. A working one multiplies every row that chose its
expert, so the expert is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dspark_kernels.linear_rows import MAX_ROWS
from dspark_kernels.linear_rows_triton import HELD_STEP, Plan, held_tiles, plan, project
from dspark_kernels.moe_decode import Experts, MoE
from dspark_kernels.moe_experts_triton import down, gate_up
from dspark_kernels.moe_one_triton import down_one, gate_up_one, router_one
from dspark_kernels.moe_route_triton import combine, route
from dspark_kernels.mxfp4 import GROUP
from dspark_kernels.mxfp4_tile import LIFT
from dspark_kernels.overlap import early

CHUNK = 1024
ROUTED = 2048
"""Of a row's numbers that a warp of the router holds."""
COMBINE = 512
FEW = 64
"""Up to so many experts, every program finds its own: that costs less than a launch."""
LANES = (256, 512, 1024, 2048)
"""Numbers of a tile of which every lane of 1, 2, 4 or 8 warps has 16 bytes."""
HELD_TILES = 9
"""Of a row that a lane holds, of both matrices: more leave too few programs on a processor."""
WARPS = 1536
"""Of `down_one`: as many as run at once."""

MOST_TILES = 12
"""Of a program of `down_one`: they are written out one after another."""


@dataclass(frozen=True)
class MoEPlan:
    """How the launches of a layer are cut."""

    inputs: Plan
    gate_up: Plan
    down: Plan


def moe_decode(
    x: Tensor,
    moe: MoE,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `dspark_kernels.moe_decode.moe_decode`."""
    return by_plan(x, moe, norm, eps, residual, moe_plan(x.shape[0], moe))


def by_plan(
    x: Tensor, moe: MoE, norm: Tensor | None, eps: float, residual: Tensor | None, how: MoEPlan
) -> tuple[Tensor, Tensor]:
    """`moe_decode` by a given plan."""
    one = x.shape[0] == 1 and not moe.latent and not moe.experts.packed
    if one and moe.experts.count <= FEW and how.gate_up.held:
        h, ids, weights, tail = _gate_up_one(x, moe, norm, eps, how)
        return _down_one(h, ids, weights, tail, residual, moe, how.down), ids
    projected = project(x, moe.inputs, norm, eps, None, torch.float32, how.inputs)
    ids, weights, z, tail = route_rows(x, moe, norm, eps, projected)
    h = _gate_up(z, ids, moe, how, told=one)
    if one:
        return _down_one(h, ids, weights, tail, residual, moe, how.down), ids
    partial, shared = _down(h, ids, tail, moe, how)
    if not moe.latent:
        out = torch.empty_like(x)
        combine_rows(partial, weights, shared, residual, out, moe)
        return out, ids
    combine_rows(partial, weights, None, None, tail, moe)
    assert moe.outputs is not None
    n, width = tail.shape
    last = plan(n, width, moe.outputs.shape[0])
    return project(tail, moe.outputs, None, 0.0, residual, x.dtype, last), ids


def route_rows(
    x: Tensor, moe: MoE, norm: Tensor | None, eps: float, projected: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, D = x.shape
    E, k, L, S = moe.experts.count, moe.top_k, moe.experts.width, moe.shared
    ids = torch.empty(n, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(n, k, dtype=torch.float32, device=x.device)
    z = torch.empty(n, L, dtype=x.dtype, device=x.device)
    offset = L if moe.latent else 0
    tail = torch.empty(n, max(1, offset + S), dtype=x.dtype, device=x.device)
    parts = (1 if moe.latent else 2) + triton.cdiv(offset + S, CHUNK)
    beta, linear_beta = moe.situ or (1.0, 1.0)
    route[(n, parts)](
        projected, moe.bias, x, norm, ids, weights, z, tail,
        eps, moe.scaling, LIFT.value if moe.experts.packed else 1.0, beta, linear_beta,
        D=D, DP=triton.next_power_of_2(D), E=E, EP=triton.next_power_of_2(E), K=k,
        KP=triton.next_power_of_2(k), L=L, S=S, BLOCK=CHUNK, LATENT=moe.latent,
        NORM=norm is not None, RENORM=moe.renormalise, PLANAR=moe.experts.packed,
        SITU=moe.situ is not None, num_warps=1 if E <= 64 else 2, **early(),
    )  # fmt: skip
    return ids, weights, z, tail


def _slots(n: int, moe: MoE) -> int:
    return min(n * moe.top_k, moe.experts.count)


Three = tuple[Tensor, Tensor, Tensor]


def stored(experts: Experts) -> tuple[Three, Three]:
    """The three matrices as the kernels read them, and their scales or something in their place."""
    w1, w3, w2 = experts.w1, experts.w3, experts.w2
    if experts.packed:
        w1, w3, w2 = (w.view(torch.int32) for w in (w1, w3, w2))
    return (w1, w3, w2), experts.scales or (w1, w3, w2)


def _gate_up(z: Tensor, ids: Tensor, moe: MoE, how: MoEPlan, told: bool) -> Tensor:
    n, k = ids.shape
    E, inner, L = moe.experts.count, moe.experts.inner, moe.experts.width
    (w1, w3, _), (s1, s3, _) = stored(moe.experts)
    h = torch.empty(n * k, inner, dtype=z.dtype, device=z.device)
    beta, linear_beta = moe.situ or (1.0, 1.0)
    cut = how.gate_up
    gate_up[(triton.cdiv(inner, cut.out), _slots(n, moe))](
        z, ids, w1, w3, s1, s3, h, n, LIFT.value if moe.experts.packed else 1.0, beta, linear_beta,
        K=k, KP=triton.next_power_of_2(k), INNER=inner, L=L, BO=cut.out, BK=cut.step,
        N=1 if n == 1 else MAX_ROWS, STAGES=cut.stages, DIRECT=n * k > E, PACKED=moe.experts.packed,
        SITU=moe.situ is not None, DOT=cut.dot, TOLD=told, num_warps=cut.warps, **early(),
    )  # fmt: skip
    return h


def _down(
    h: Tensor, ids: Tensor, tail: Tensor, moe: MoE, how: MoEPlan
) -> tuple[Tensor, Tensor | None]:
    """partial [n k, L], and [n, D] of the shared expert where no latent space follows."""
    n, k = ids.shape
    E, inner, L, S = moe.experts.count, moe.experts.inner, moe.experts.width, moe.shared
    (_, _, w2), (_, _, s2) = stored(moe.experts)
    partial = torch.empty(n * k, L, dtype=torch.float32, device=h.device)
    beside = S > 0 and not moe.latent
    shared = torch.empty(n, L, dtype=torch.float32, device=h.device) if beside else partial
    slots, cut = _slots(n, moe), how.down
    down[(triton.cdiv(L, cut.out), slots + beside)](
        h, ids, w2, s2, partial, tail, moe.outputs if beside else w2, shared, n,
        K=k, KP=triton.next_power_of_2(k), INNER=inner, L=L, S=S, SLOTS=slots, BO=cut.out,
        BK=cut.step, N=1 if n == 1 and not beside else MAX_ROWS, STAGES=cut.stages,
        DIRECT=n * k > E, PACKED=moe.experts.packed, SHARED=beside, DOT=cut.dot,
        num_warps=cut.warps, **early(),
    )  # fmt: skip
    return partial, shared if beside else None


def _gate_up_one(
    x: Tensor, moe: MoE, norm: Tensor | None, eps: float, how: MoEPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The hidden rows [k, I], ids and weights [1, k], the shared expert's hidden row [1, S]."""
    k, E, inner, L, S = (
        moe.top_k,
        moe.experts.count,
        moe.experts.inner,
        moe.experts.width,
        moe.shared,
    )
    keys = torch.empty(E, dtype=torch.int64, device=x.device)
    scores = torch.empty(E + 1, dtype=torch.float32, device=x.device)
    z, scale, wide = torch.empty_like(x), scores[E:], triton.next_power_of_2(L)
    router_one[(E,)](
        x, norm, moe.inputs, moe.bias, keys, scores, z, scale, eps, L=L, LP=wide,
        NORM=norm is not None, num_warps=max(1, wide // ROUTED), **early(),
    )  # fmt: skip
    ids = torch.empty(1, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(1, k, dtype=torch.float32, device=x.device)
    h = torch.empty(k, inner, dtype=x.dtype, device=x.device)
    tail = torch.empty(1, max(1, S), dtype=x.dtype, device=x.device)
    beta, linear_beta = moe.situ or (1.0, 1.0)
    cut = how.gate_up
    gate_up_one[(triton.cdiv(max(inner, S), cut.out),)](
        keys, scores, z, scale, moe.experts.w1, moe.experts.w3, moe.inputs[E:], ids, weights,
        h, tail, moe.scaling, beta, linear_beta, E=E, EP=triton.next_power_of_2(E), K=k,
        INNER=inner, L=L, S=S, BO=cut.out, BK=cut.step, RENORM=moe.renormalise,
        SITU=moe.situ is not None, num_warps=cut.warps, **cut.limits(), **early(),
    )  # fmt: skip
    return h, ids, weights, tail


def _down_one(
    h: Tensor, ids: Tensor, weights: Tensor, tail: Tensor, residual: Tensor | None, moe: MoE,
    cut: Plan,
) -> Tensor:  # fmt: skip
    k, inner, L, S = moe.top_k, moe.experts.inner, moe.experts.width, moe.shared
    out = torch.empty(1, L, dtype=h.dtype, device=h.device)
    down_one[(triton.cdiv(L, cut.out * cut.tiles),)](
        h, ids, weights, moe.experts.w2, tail, moe.outputs, residual, out,
        K=k, INNER=inner, L=L, S=S, BO=cut.out, BK=cut.step, TILES=cut.tiles,
        ADD=residual is not None, num_warps=cut.warps, **cut.limits(), **early(),
    )  # fmt: skip
    return out


def combine_rows(
    partial: Tensor, weights: Tensor, shared: Tensor | None, residual: Tensor | None, out: Tensor,
    moe: MoE,
) -> None:  # fmt: skip
    """Into the first L columns of ``out``."""
    n, k = weights.shape
    L = moe.experts.width
    block = COMBINE if moe.norm is None else triton.next_power_of_2(L)
    combine[(n, triton.cdiv(L, block))](
        partial, weights, shared, residual, moe.norm, out, moe.norm_eps, out.stride(0),
        L=L, BLOCK=block, K=k, SHARED=shared is not None, ADD=residual is not None,
        NORM=moe.norm is not None, num_warps=2 if moe.norm is None else 8, **early(),
    )  # fmt: skip


def moe_plan(n: int, moe: MoE) -> MoEPlan:
    """The measured best cuts."""
    inner, L = moe.experts.inner, moe.experts.width
    inputs = plan(n, moe.inputs.shape[1], moe.inputs.shape[0])
    if moe.experts.packed:
        return MoEPlan(inputs, _packed_cut(L), _packed_cut(inner))
    if n == 1:
        narrow = Plan(8, _step(inner, 256), 2, 3) if moe.latent else _down_cut(moe)
        return MoEPlan(inputs, _gate_up_cut(moe), narrow)
    gate_up = Plan(64, _step(L, 128), 4, 3, dot=True)
    return MoEPlan(inputs, gate_up, Plan(32, _step(inner, 128), 4, 5, dot=True))


def _gate_up_cut(moe: MoE) -> Plan:
    """Of one row; ``held`` where `gate_up_one` may take it: few experts, and nine tiles hold it."""
    inputs, few = moe.experts.width, moe.experts.count <= FEW and not moe.latent
    for step in LANES if few else ():
        if inputs % step == 0 and inputs // step <= HELD_TILES:
            return Plan(1, step, step // LANES[0], 1, held=inputs // step)
    return Plan(2, HELD_STEP, 2, 1) if held_tiles(inputs) else Plan(8, _step(inputs, 256), 2, 3)


def _down_cut(moe: MoE) -> Plan:
    """Of one row without a latent space: a lane has 16 bytes of a tile, a program all of a row."""
    inner, L = moe.experts.inner, moe.experts.width
    step = next((n for n in LANES if n >= inner), LANES[-1])
    warps = step // LANES[0]
    held = moe.top_k * triton.cdiv(inner, step) + triton.cdiv(moe.shared, step)
    # two rows of more tiles do not fit into a lane's registers
    tiles = min(MOST_TILES, triton.cdiv(L * warps, WARPS)) if held < 2 * HELD_TILES else 1
    return Plan(1, step, warps, 1, held=held, tiles=tiles)


def _packed_cut(inputs: int) -> Plan:
    """Steps are words of eight inputs; a row at a time."""
    return Plan(32, _step(inputs // 8, 64), 4, 3)


def _step(inputs: int, most: int) -> int:
    step = most
    while inputs % step:
        step //= 2
    return step


def refuses(
    x: Tensor,
    moe: MoE,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> str | None:
    """Why the kernels cannot take this; None: they can."""
    experts = moe.experts
    like = [t for t in (x, moe.inputs, moe.outputs, moe.norm, norm, residual) if t is not None]
    stacked = [experts.w1, experts.w3, experts.w2, *(experts.scales or ())]
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"rows are {x.dtype}, not bfloat16 or float16"
    if experts.scales is None:
        like += stacked
    elif x.dtype != torch.bfloat16:
        return "MXFP4 experts want rows of bfloat16"
    elif any(t.dtype != torch.uint8 for t in stacked):
        return "MXFP4 experts are not uint8"
    if any(t.dtype != x.dtype for t in like):
        return "not all tensors have the rows' dtype"
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
        return f"x is {list(x.shape)}, not 1 to {MAX_ROWS} rows"
    if any(not t.is_contiguous() for t in (*like, *stacked, moe.bias)):
        return "a tensor is not contiguous"
    if x.shape[1] % 16 or experts.inner % GROUP or experts.width % GROUP:
        return f"expert sizes {experts.inner} and {experts.width} are no multiples of {GROUP}"
    if moe.norm is not None and not moe.latent:
        return "a norm of the routed sum without a latent space"
    if torch.is_grad_enabled() and any(t.requires_grad for t in like):
        return "gradients are wanted, and the kernel has no backward"
    return None
