"""Context of the mla backbone, and its weights laid out for drafting.

A committed position keeps [c | turn(k_p)] per layer: the normed latent and the key part that all
heads share, R + p numbers whatever the number of heads.

Letters: L layers, B batch, C capacity, D hidden, H heads, Q query rank, R latent rank, n unrotated,
p rotated and v value channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.draft.attention import DraftLayer
from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.mla import DraftMLA, mla_shape
from dspark.draft.packed import PackedMLP
from dspark.draft.ring import Ring
from dspark.draft.rotary import Rotary
from dspark.k3.storage import Storage


@dataclass(frozen=True)
class PackedMLALayer:
    """Weights of one layer.

    norm [D], of the layer's input; down [Q + R + p (+ H*v), D]: query latent, key-value latent and
    shared key, output gate; q_norm [Q]; q_up [H*(n+p), Q]; kv_norm [R]; key_up [H, n, R] and
    value_up [H, v, R], which take queries into the latent space and sums out of it;
    output [D, H*v].
    """

    norm: Tensor
    down: Tensor
    q_norm: Tensor
    q_up: Tensor
    kv_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    output: Tensor
    mlp: PackedMLP


@dataclass(frozen=True)
class PackedMLAWeights:
    """All layers, and the latents that all of them take from a context feature in one product.

    context [L*(R+p), D]; context_norm [L, R], norm weights of the latents.
    """

    layers: tuple[PackedMLALayer, ...]
    context: Tensor
    context_norm: Tensor


def pack_mla(layers: nn.ModuleList) -> PackedMLAWeights:
    """Packs the current weights, detached from autograd."""
    attentions: list[DraftMLA] = [layer.self_attn for layer in layers]  # type: ignore[misc]
    with torch.no_grad():
        return PackedMLAWeights(
            tuple(_pack_layer(layer) for layer in layers),  # type: ignore[arg-type]
            torch.cat([attention.kv_a_proj_with_mqa.weight for attention in attentions]),
            torch.stack([attention.kv_a_layernorm.weight for attention in attentions]),
        )


def _pack_layer(layer: DraftLayer) -> PackedMLALayer:
    attention = layer.self_attn
    assert isinstance(attention, DraftMLA)
    shape = attention.shape
    down = [attention.q_a_proj.weight, attention.kv_a_proj_with_mqa.weight]
    if shape.output_gate:
        down.append(attention.g_proj.weight)
    up = attention.kv_b_proj.weight.unflatten(0, (attention.heads, -1))
    return PackedMLALayer(
        norm=layer.input_layernorm.weight.detach(),
        down=torch.cat(down),
        q_norm=attention.q_a_layernorm.weight.detach(),
        q_up=attention.q_b_proj.weight.detach(),
        kv_norm=attention.kv_a_layernorm.weight.detach(),
        key_up=up[:, : shape.qk_nope_head_dim].contiguous(),
        value_up=up[:, shape.qk_nope_head_dim :].contiguous(),
        output=attention.o_proj.weight.detach(),
        mlp=PackedMLP.of(layer),
    )


class MLAContext(DraftContext):
    """Latents [L, B, 1, C, R+p] of the positions that layers still see, one buffer per reach.

    Args:
        config: Shape of the drafter.
        batch: B.
        max_length: Longest text in tokens that will be appended to one row.
        device: Where the buffers live.
        dtype: Dtype of latents.
        weights: The drafter's weights, as they are now; see `AttentionContext`.
        storage: See `DraftContext`.
    """

    def __init__(
        self,
        config: DraftConfig,
        batch: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        weights: PackedMLAWeights,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(batch, max_length, device, weights, storage)
        self.weights: PackedMLAWeights = weights
        self.rotary = Rotary.of(config, device, dtype)
        shape = mla_shape(config)
        width = shape.kv_lora_rank + shape.qk_rope_head_dim
        self.rings = [
            Ring(min(config.window(layer) or max_length, max_length), config.block_size)
            for layer in range(config.num_layers)
        ]
        self.latents = self._take(
            [((batch, 1, ring.capacity, width), dtype) for ring in self.rings]
        )
        self.reach = max(ring.size for ring in self.rings)

    @property
    def nbytes(self) -> int:
        """Bytes of latents."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.latents)

    def _write_row(self, row: int, other: MLAContext | None) -> None:
        for layer, (ring, latents) in enumerate(zip(self.rings, self.latents, strict=True)):
            if other is None:
                latents[row].zero_()
                continue
            if other.fixed:
                latents[row] = other.latents[layer][0]
                continue
            theirs = other.latents[layer][0], other.rings[layer]
            ring.copy_row(latents[row], *theirs, other.row_lengths[0])

    def _select_rows(self, rows: Tensor) -> None:
        self.latents = [self._rows_of(latents, rows) for latents in self.latents]
