"""What every backbone of a drafter offers, and which class belongs to which name.

A backbone turns the embeddings of a block into hidden states, reading the context features of all
positions before the anchor. It appears twice, and both must agree to rounding: `train` runs all
blocks of a batch of rows at once, differentiably; `extend` and `block` work against an incremental
context, as drafting does. It holds no weights of its own: the drafter's `layers` do, under the
names that checkpoints use.

Letters: B batch, S context, n new rows, A anchors, G slots, D hidden.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor, nn

from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.kinds import registered
from dspark.k3.storage import Storage

Context = TypeVar("Context", bound=DraftContext)


class Backbone(Protocol[Context]):
    """Layers of one kind. Features arrive projected and normed: c = hidden_norm(fc(taps))."""

    def new_context(self, batch: int, max_length: int, storage: Storage | None = None) -> Context:
        """An empty context that drafts with the weights of this moment."""
        ...

    def extend(self, context: Context, features: Tensor, kept: list[int] | Tensor) -> None:
        """Fold committed positions into a context, in place; no gradient.

        Args:
            features: [B, n, D] features of the positions after the context's lengths, n >= 1;
                finite everywhere.
            kept: Rows to keep of each batch row, from the first, each in 0..n; a tensor where the
                context's shapes are fixed. The lengths are the caller's to move, afterwards.
        """
        ...

    def block(self, hidden: Tensor, context: Context) -> Tensor:
        """One block per row, anchored at the context's length: [B, G, D] -> [B, G, D].

        The context is as before afterwards. No final norm; no gradient.
        """
        ...

    def train(
        self,
        hidden: Tensor,
        features: Tensor,
        valid: Tensor,
        anchors: Tensor,
        alike: bool = False,
    ) -> Tensor:
        """All blocks of a batch: [B, A, G, D] -> [B, A, G, D], before the final norm.

        Args:
            hidden: Embeddings of the blocks' input ids.
            features: [B, S, D], row s is position s; padding on the right, finite.
            valid: [B, S] bool, real positions.
            anchors: [B, A] int64 positions p in [0, S); a block sees valid positions before p.
            alike: Promises that slots 1.. of all blocks have the same embedding, which a backbone
                may project once.
        """
        ...


def build_layers(config: DraftConfig) -> nn.ModuleList:
    """Fresh layers of the backbone that the configuration names."""
    if config.backbone == "attention":
        from dspark.draft.attention import DraftAttention, DraftLayer

        return nn.ModuleList(
            DraftLayer(config, DraftAttention(config, layer)) for layer in range(config.num_layers)
        )
    if config.backbone == "mla":
        from dspark.draft.attention import DraftLayer
        from dspark.draft.mla import DraftMLA

        return nn.ModuleList(
            DraftLayer(config, DraftMLA(config, layer)) for layer in range(config.num_layers)
        )
    if config.backbone == "kda":
        from dspark.draft.kda import KDALayer

        return nn.ModuleList(KDALayer(config) for _ in range(config.num_layers))
    if (kind := registered(config.backbone)) is not None:
        return kind.layers(config)
    raise ValueError(f"backbone: {config.backbone!r} has no layers here")


def build_backbone(config: DraftConfig, layers: nn.ModuleList) -> Backbone:
    """The backbone that runs `layers`, which `build_layers` made of the same configuration."""
    if config.backbone == "attention":
        from dspark.draft.attention_backbone import AttentionBackbone

        return AttentionBackbone(config, layers)
    if config.backbone == "kda":
        from dspark.draft.kda_backbone import KDABackbone

        return KDABackbone(config, layers)
    if config.backbone == "mla":
        from dspark.draft.mla_backbone import MLABackbone

        return MLABackbone(config, layers)
    if (kind := registered(config.backbone)) is not None:
        return kind.run(config, layers)
    raise ValueError(f"backbone: {config.backbone!r} cannot be run here")
