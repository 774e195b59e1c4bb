"""Layers of a large training pass as products and one kernel between two of them.

`regions.py` leaves what lies between products to a compiler. Here both passes of a layer are
written out: every norm, rotation and gate is one kernel that reads and writes once (`train_rows`),
sums of gradients are taken inside the products that add to them, and nothing has to be compiled. A
layer is two functions around the attention, which differentiates itself:

    project   h = hidden + added, n = norm(h); q of n, k and v of [context; n]; norms, rotation
    finish    h = h + W_o mixed, n = norm(h); added = W_down(silu(W_gate n) * W_up n)

The residual stream is float32. What a layer adds last travels beside it, in half precision, and is
summed where it is next normed. The context passes through all layers, so that its gradient is one
float32 buffer that each layer's products add to.

Letters: B batch, S context, N = A G slots of all blocks, D hidden, H/J query/key heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dspark import ops
from dspark.draft.attention import DraftAttention, DraftLayer
from dspark.draft.config import DraftConfig
from dspark.products import add_product


def serves(config: DraftConfig) -> bool:
    """Whether `run_layers` has the layers of a drafter."""
    return config.hidden_act == "silu"


def run_layers(
    config: DraftConfig,
    layers: nn.ModuleList,
    hidden: Tensor,
    context: Tensor,
    tables: tuple[Tensor, Tensor],
    attend: Callable[[DraftAttention, Tensor, Tensor, Tensor], Tensor],
    half: torch.dtype = torch.bfloat16,
    alike: int = 0,
) -> Tensor:
    """The layers of the `attention` backbone.

    Args:
        config: Of the drafter.
        layers: Each a `DraftLayer` with `DraftAttention`, norms in float32.
        hidden: [B, N, D] float32. context: [B, S, D].
        tables: Cosine and signed sine of [context; block], [B, S + N, 1, K] float32.
        attend: Attention between the parts, as `regions.Attend`.
        half: Dtype of products. (In float64, with everything else, the passes are exact.)
        alike: G promises that slots 1.. of all blocks begin as the same row: the first layer then
            projects that row once. 0: they may differ.

    Returns:
        [B, N, D] float32.
    """
    shape, eps = hidden.shape, config.rms_norm_eps
    cos, sin = (table.squeeze(2).contiguous() for table in tables)
    read = context.detach().to(half)
    rows, added = hidden.reshape(-1, shape[-1]), None
    if hidden.requires_grad or alike == 1:  # each row has a gradient of its own, or no fellows
        alike = 0
    for layer in cast(list[DraftLayer], list(layers)):
        attention, mlp = cast(DraftAttention, layer.self_attn), layer.mlp
        rows, q, keys, values, context = _Project.apply(
            rows, added, context, read, cos, sin, eps, alike, layer.input_layernorm.weight,
            *(getattr(attention, f"{name}_proj").weight for name in "qkv"),
            attention.q_norm.weight, attention.k_norm.weight,
        )  # fmt: skip
        alike = 0
        rows, added = _Finish.apply(
            rows, attend(attention, q, keys, values), eps, layer.post_attention_layernorm.weight,
            attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
        )  # fmt: skip
    assert added is not None
    return (rows + added).view(shape)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of half-precision rows x [..., D] under a float32 weight: float32.

    `attention.rms_norm` rounds to half before the weight; here nothing is rounded.
    """
    out: Tensor = _Norm.apply(x, weight, eps)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _, out, root = ops.norm_rows(rows, None, weight, eps, weight.dtype)
        ctx.save_for_backward(rows, weight, root)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, root = ctx.saved_tensors
        flat = gradient.reshape(rows.shape).contiguous()
        of_x, of_weight = ops.norm_half_back(rows, weight, root, flat)
        return of_x.view(gradient.shape), of_weight, None


class _Project(torch.autograd.Function):
    """hidden [B N, D], added [B N, D] or None, context [B, S, D] -> h, q [B, N, H, K], keys and
    values [B, S + N, J, K], context.

    With `alike` G, of the rows that are the same in all blocks two are projected (`_folded` says
    why), and hidden has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, added: Tensor | None, context: Tensor, half: Tensor, cos: Tensor,
        sin: Tensor, eps: float, alike: int, norm: Tensor, q: Tensor, k: Tensor, v: Tensor,
        q_norm: Tensor, k_norm: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        width, length = len(q_norm), half.shape[1]
        rows, place = _unlike(hidden, len(half), alike) if alike else (hidden, None)
        total, normed, root = ops.norm_rows(rows, added, norm, eps, half.dtype)
        own = normed.view(len(half), -1, normed.shape[-1])
        queries = own @ _half(q, half).T
        queries = queries if place is None else queries.index_select(1, place)
        queries = queries.unflatten(-1, (-1, width))
        keys, values = (_of_both(half, own, w, place).unflatten(-1, (-1, width)) for w in (k, v))
        ctx.save_for_backward(
            total, normed, root, queries, keys, half, cos, sin, norm, q, k, v, q_norm, k_norm
        )
        ctx.eps, ctx.wide, ctx.alike = eps, context.dtype, alike
        return (
            hidden if alike else total,
            ops.turn_heads(queries, q_norm, cos, sin, length, eps),
            ops.turn_heads(keys, k_norm, cos, sin, 0, eps),
            values,
            context,
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, through: Tensor, d_queries: Tensor, d_keys: Tensor, d_values: Tensor,
        d_context: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        total, normed, root, queries, keys, half, cos, sin, norm, *weights = ctx.saved_tensors
        (q, k, v), (q_norm, k_norm) = (_half(w, half) for w in weights[:3]), weights[3:]
        length, own = half.shape[1], normed.view(len(half), -1, normed.shape[-1])
        d_queries, of_q_norm = ops.turn_heads_back(
            queries, q_norm, cos, sin, length, ctx.eps, d_queries
        )
        d_keys, of_k_norm = ops.turn_heads_back(keys, k_norm, cos, sin, 0, ctx.eps, d_keys)
        # Keys and values side by side: a product for both, and one pass over what it adds to.
        d_both, both = torch.cat((d_keys, d_values), 2).flatten(2), torch.cat((k, v))
        d_queries, d_mine = d_queries.flatten(2), d_both[:, length:]
        if ctx.alike:
            d_queries, d_mine = (_folded(x, ctx.alike, ctx.wide) for x in (d_queries, d_mine))
        d_own = d_queries @ q
        of_q = d_queries.flatten(0, 1).T @ normed
        of_both = None
        fresh = d_context is None
        d_context = torch.empty_like(half, dtype=ctx.wide) if d_context is None else d_context
        for row in range(len(half)):
            d_read = d_both[row, :length]
            d_own[row].addmm_(d_mine[row], both)
            add_product(d_context[row], d_read, both, fresh)
            read = half[row]
            of_both = d_read.T @ read if of_both is None else of_both.addmm_(d_read.T, read)
            of_both.addmm_(d_mine[row].T, own[row])
        assert of_both is not None
        d_total = d_added = None
        if ctx.alike:
            _, of_norm = ops.norm_half_back(total, norm, root, d_own.flatten(0, 1))
        else:
            d_total, d_added, of_norm = ops.norm_rows_back(
                total, norm, root, d_own.flatten(0, 1), through
            )
        of_weights = of_norm, of_q, *of_both.split(len(k)), of_q_norm, of_k_norm
        d_added = d_added if ctx.needs_input_grad[1] else None
        return d_total, d_added, d_context, *[None] * 5, *of_weights


class _Finish(torch.autograd.Function):
    """h [B N, D], mixed [B, N, H, K] -> h [B N, D] and what the MLP adds to it [B N, D]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, mixed: Tensor, eps: float, norm: Tensor, output: Tensor,
        gate: Tensor, up: Tensor, down: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        flat = mixed.reshape(len(hidden), -1)
        attended = flat @ _half(output, flat).T
        total, normed, root = ops.norm_rows(hidden, attended, norm, eps, flat.dtype)
        inner = normed @ _half(gate, flat).T, normed @ _half(up, flat).T
        added = ops.gate_silu(*inner) @ _half(down, flat).T
        ctx.save_for_backward(mixed, total, normed, root, *inner, norm, output, gate, up, down)
        return total, added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, through: Tensor, d_added: Tensor) -> tuple[Tensor | None, ...]:
        mixed, total, normed, root, *inner, norm, output, gate, up, down = ctx.saved_tensors
        flat = mixed.reshape(len(total), -1)
        d_gate, d_up, product = ops.gate_silu_back(inner[0], inner[1], d_added @ _half(down, flat))
        of_down = d_added.T @ product
        del product
        of_gate, of_up = d_gate.T @ normed, d_up.T @ normed
        d_normed = (d_gate @ _half(gate, flat)).addmm_(d_up, _half(up, flat))
        del d_gate, d_up
        d_hidden, d_attended, of_norm = ops.norm_rows_back(total, norm, root, d_normed, through)
        of_output = d_attended.T @ flat
        d_mixed = (d_attended @ _half(output, flat)).view_as(mixed)
        return d_hidden, d_mixed, None, of_norm, of_output, of_gate, of_up, of_down


def _half(weight: Tensor, like: Tensor) -> Tensor:
    """A weight as it is multiplied."""
    return weight.detach().to(like.dtype)


def _unlike(hidden: Tensor, batch: int, slots: int) -> tuple[Tensor, Tensor]:
    """Rows [B (A + 2), D] of blocks whose later slots are alike: the first slots', and that of all
    others twice; and which of a batch row's A + 2 stands at each of its N places, [N]."""
    blocks = hidden.view(batch, -1, slots, hidden.shape[-1])
    count = blocks.shape[1]
    other = blocks[:, :1, 1].expand(-1, 2, -1)
    at = torch.arange(count * slots, device=hidden.device)
    place = torch.where(at % slots == 0, at // slots, count)
    return torch.cat((blocks[:, :, 0], other), 1).flatten(0, 1), place


def _folded(gradient: Tensor, slots: int, wide: torch.dtype) -> Tensor:
    """Gradients of all places [B, N, *] -> of the rows of `_unlike` [B, A + 2, *].

    The sum over thousands of places is taken in `wide` and leaves as two numbers of half precision,
    its rounded value and what that left out: it is multiplied as exactly as its parts would be.
    """
    blocks = gradient.unflatten(1, (-1, slots))
    whole = blocks[:, :, 1:].sum((1, 2), dtype=wide)[:, None]
    rounded = whole.to(gradient.dtype)
    return torch.cat((blocks[:, :, 0], rounded, (whole - rounded).to(gradient.dtype)), 1)


def _of_both(context: Tensor, own: Tensor, weight: Tensor, place: Tensor | None) -> Tensor:
    """Projections of [context; own], [B, S + N, *], where no copy of both has to be made.

    `place` [N]: which of `own` stands at each place, if they are not all there.
    """
    batch, length, _ = context.shape
    weight = _half(weight, context)
    count = own.shape[1] if place is None else len(place)
    out = context.new_empty(batch, length + count, len(weight))
    for row in range(batch):
        torch.mm(context[row], weight.T, out=out[row, :length])
        if place is None:
            torch.mm(own[row], weight.T, out=out[row, length:])
        else:
            torch.index_select(own[row] @ weight.T, 0, place, out=out[row, length:])
    return out
