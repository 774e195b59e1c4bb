"""Layers of a large training pass in compiled regions: products, and a kernel for what is between.

Eager torch writes every intermediate of a norm, a rotation or a gate to memory, in float32, and
keeps most of them for the backward pass. Here a layer is two compiled functions around the
attention; what is elementwise joins the kernels of its neighbours, and the backward pass recomputes
it from the products' results. Attention is a kernel of ours in half precision, else flex.

    project   norm, q of the block, k and v of [context; block] in one product each, norms, rotation
    finish    output projection, residual, norm, gated MLP, residual

The first call compiles, for about half a minute; sizes are symbolic, so later ones do not.

Letters: B batch, S context, A anchors, G slots, D hidden, H/J query/key heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark import ops
from dspark.draft import flex
from dspark.draft.attention import DraftAttention, DraftLayer, gated, rms_norm
from dspark.draft.rotary import Rotation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from dspark.draft.config import DraftConfig
    from dspark.draft.sight import Sight


Attend = Callable[[DraftAttention, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, A*G, H, K], keys and values [B, S + A*G, J, K]) -> [B, A*G, H, K]."""


def run_layers(
    config: DraftConfig,
    layers: nn.ModuleList,
    hidden: Tensor,
    context: Tensor,
    turns: tuple[Rotation, Rotation],
    attend: Attend,
) -> Tensor:
    """The layers of the `attention` backbone.

    Args:
        config: Of the drafter.
        layers: Each a `DraftLayer` with `DraftAttention`.
        hidden: [B, A*G, D]. context: [B, S, D].
        turns: Rotations of the context and of the blocks, as in `BlockLayout`.
        attend: Attention between the regions, `by_kernel` or `by_flex`.

    Returns:
        [B, A*G, D].
    """
    turned = side_by_side(*turns)
    project, finish = _compiled(config.rms_norm_eps, config.head_dim, config.hidden_act)
    for layer in cast(list[DraftLayer], list(layers)):
        attention = cast(DraftAttention, layer.self_attn)
        q, keys, values = project(
            hidden, context, turned, layer.input_layernorm.weight,
            *(getattr(attention, f"{name}_proj").weight for name in "qkv"),
            attention.q_norm.weight, attention.k_norm.weight,
        )  # fmt: skip
        hidden = finish(
            hidden, attend(attention, q, keys, values), attention.o_proj.weight,
            layer.post_attention_layernorm.weight,
            *(getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")),
        )  # fmt: skip
    return hidden


def kernel_serves(config: DraftConfig, valid: Tensor) -> bool:
    """Whether `by_kernel` can be taken: half precision, heads of a size that it has tiles for."""
    half = torch.is_autocast_enabled(valid.device.type) and (
        torch.get_autocast_dtype(valid.device.type) == torch.bfloat16
    )
    return half and config.head_dim in (16, 32, 64, 128) and ops.by_kernel("block_attention", valid)


def by_kernel(valid: Tensor, anchors: Tensor, slots: int) -> Attend:
    """Attention by `ops.block_attention`. `valid` [B, S] bool is a prefix of every row."""
    lengths = valid.sum(1)

    def attend(layer: DraftAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        sight = layer.sight
        return ops.block_attention(
            q, keys, values, anchors, lengths, slots, layer.scale, sight.window, sight.causal
        )

    return attend


def by_flex(masks: Mapping[Sight, BlockMask]) -> Attend:
    """Attention by flex attention, for what the kernel does not take."""

    def attend(layer: DraftAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, keys, values = (each.transpose(1, 2) for each in (q, keys, values))
        return flex.attend_whole(masks[layer.sight], q, keys, values, layer.scale).transpose(1, 2)

    return attend


def side_by_side(context: Rotation, block: Rotation) -> tuple[Tensor, Tensor]:
    """Cosine and sine of [context; block], [B, S + A*G, 1, K]."""

    def joined(first: Tensor, second: Tensor) -> Tensor:
        return torch.cat((first.expand(len(second), *first.shape), second), 1)

    return joined(context.cos, block.cos), joined(context.sin, block.sin)


Region = Callable[..., Any]


@cache
def _compiled(eps: float, head_dim: int, act: str) -> tuple[Region, Region]:
    project, finish = _regions(eps, head_dim, act)
    # Its analysis fails on symbolic sizes in torch 2.11.
    options: dict[str, Any] = {"triton.coalesce_tiling_analysis": False}
    return (
        torch.compile(project, dynamic=True, options=options),
        torch.compile(finish, dynamic=True, options=options),
    )


def _regions(eps: float, head_dim: int, act: str) -> tuple[Region, Region]:
    """`project` and `finish`, not compiled."""

    def heads(x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed and turned heads of a projection: [B, n, heads * K] -> [B, n, heads, K]."""
        normed = rms_norm(x.unflatten(-1, (-1, head_dim)), norm, eps)
        return Rotation(cos, sin, False).turn(normed).to(x.dtype)

    def project(
        hidden: Tensor, context: Tensor, turned: tuple[Tensor, Tensor], norm: Tensor,
        q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        cos, sin = turned
        block = rms_norm(hidden, norm, eps)
        length = context.shape[1]
        queries = heads(F.linear(block, q), q_norm, cos[:, length:], sin[:, length:])
        both = torch.cat((context.to(block.dtype), block), 1)
        keys = heads(F.linear(both, k), k_norm, cos, sin)
        return queries, keys, F.linear(both, v).unflatten(-1, (-1, head_dim))

    def finish(
        hidden: Tensor, mixed: Tensor, output: Tensor, norm: Tensor, gate: Tensor, up: Tensor,
        down: Tensor,
    ) -> Tensor:  # fmt: skip
        hidden = hidden + F.linear(mixed.flatten(2), output)
        block = rms_norm(hidden, norm, eps)
        inner = F.linear(block, gate), F.linear(block, up)
        # Their product is made again in the backward pass: it is the widest thing to keep.
        mixed = checkpoint(narrow, *inner, down, use_reentrant=False, preserve_rng_state=False)
        return hidden + mixed

    def narrow(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(gated(act, gate, up), down)

    return project, finish
