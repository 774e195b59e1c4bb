"""The KDA backbone at work: folding text into a fixed-size context, drafting blocks from it.

Committed rows are folded exactly, whatever the order of the block's series: the state does not
depend on where rounds were cut. The state a block would leave behind is never formed. The layers
and the training pass are in `kda.py`, the packed weights in `kda_packed.py`.

Letters: B batch, n new rows, A anchors, G slots, D hidden, L layers, H heads, K head dim, W rows of
the convolution, C = 3 H K channels of q, k and v.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark import ops
from dspark.draft.attention import SITU_BETA, SITU_LINEAR_BETA
from dspark.draft.config import DraftConfig
from dspark.draft.kda import KDALayer, kda_shape
from dspark.draft.kda_context import KDAContext
from dspark.draft.kda_packed import PackedKDA, PackedKDALayer, pack_kda
from dspark.draft.packed import project, weight_stamp
from dspark.k3.storage import Storage


class KDABackbone:
    """See `dspark.draft.backbone.Backbone`."""

    def __init__(self, config: DraftConfig, layers: nn.ModuleList) -> None:
        self.config, self.layers = config, layers
        self.shape = kda_shape(config)
        self._packed: tuple[tuple[tuple[int, int], ...], PackedKDA] | None = None

    def new_context(
        self, batch: int, max_length: int, storage: Storage | None = None
    ) -> KDAContext:
        """An empty context that drafts with the weights of this moment."""
        weight = next(iter(self.layers.parameters()))
        return KDAContext(
            self.config, batch, max_length, weight.device, weight.dtype, self._pack(), storage
        )

    def extend(self, context: KDAContext, features: Tensor, kept: list[int] | Tensor) -> None:
        """Folds committed positions into the states of all layers at once."""
        ragged = isinstance(kept, Tensor) or len(set(kept)) > 1
        if not ragged:
            features = features[:, : kept[0]]
        weights, count, bound = context.weights, features.shape[1], self.shape.gate_lower_bound
        few = count <= ops.KDA_CHUNK
        made = ops.kda_context_rows if few else ops.kda_context_text
        k, v, g, beta, window = made(
            project(features, weights.context), context.window.flatten(2), weights.conv,
            weights.decay, weights.dt_bias, weights.rate, bound,
            torch.as_tensor(kept, device=features.device) if ragged else None,
        )  # fmt: skip
        if few:
            _, state = ops.kda_step(k, k, v, g, beta, context.state, count, context.room)
        else:
            _, state = ops.kda_chunk(k, k, v, g, beta, context.state, bound)
        context.hold(state, window.view_as(context.window))

    def block(self, hidden: Tensor, context: KDAContext) -> Tensor:
        """One block per row against the frozen states."""
        batch, slots, width = hidden.shape
        hidden = hidden.reshape(batch * slots, width)
        eps, act = self.config.rms_norm_eps, self.config.hidden_act
        betas = None if act == "silu" else (SITU_BETA, SITU_LINEAR_BETA)
        for index, layer in enumerate(context.weights.layers):
            mixed = self._mix(hidden, layer, *context.layer(index), slots)
            hidden = ops.linear_rows(mixed, layer.output, residual=hidden)
            inner = ops.gated_rows(hidden, layer.gate_up, norm=layer.mlp_norm, eps=eps, situ=betas)
            hidden = ops.linear_rows(inner, layer.down, residual=hidden)
        return hidden.view(batch, slots, width)

    def train(
        self,
        hidden: Tensor,
        features: Tensor,
        valid: Tensor,
        anchors: Tensor,
        alike: bool = False,
    ) -> Tensor:
        """All blocks of a batch in one differentiable pass.

        Padding stands behind every anchor, and no row reaches a state before it: `valid` adds
        nothing to what `anchors` says. Rows that are `alike` are projected one by one.
        """
        for layer in self.layers:
            hidden = layer(hidden, features, anchors)
        return hidden

    @torch.no_grad()
    def coupling_norms(self, hidden: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """|A| that the series of every layer, block and head meets, [L, B, A, H].

        Below 1 every further order helps; above it low orders may be worse than order 0.
        Arguments as for `train`.
        """
        norms = []
        for layer in self.layers:
            assert isinstance(layer, KDALayer)
            normed = layer.input_layernorm(hidden)
            norms.append(layer.self_attn.coupling_norms(normed, features, anchors))
            hidden = layer(hidden, features, anchors)
        return torch.stack(norms)

    def _mix(
        self, hidden: Tensor, layer: PackedKDALayer, state: Tensor, window: Tensor, slots: int
    ) -> Tensor:
        """What the layer's heads answer, [B*G, H*K], before the output projection."""
        config, shape = self.config, self.shape
        batch = len(hidden) // slots
        inputs = ops.linear_rows(
            hidden,
            layer.inputs,
            norm=layer.attention_norm,
            eps=config.rms_norm_eps,
            residual=layer.slots.expand(batch, -1, -1).reshape(len(hidden), -1),
        )
        mixed = ops.kda_linear(
            inputs.view(batch, slots, -1), window, layer.conv, layer.decay, layer.dt_bias,
            layer.rate, layer.output_norm, state, shape.order, shape.gate_lower_bound,
            config.rms_norm_eps, layer.sharpness, layer.gain,
        )  # fmt: skip
        return mixed.flatten(0, 1)

    def _pack(self) -> PackedKDA:
        stamp = weight_stamp(self.layers.parameters())
        if self._packed is None or self._packed[0] != stamp:
            self._packed = (stamp, pack_kda(self.layers))  # type: ignore[arg-type]
        return self._packed[1]
