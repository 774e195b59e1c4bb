"""A backbone in under 100 lines: a slot reads the mean of the context and its place in the block.

    c(p) = mean of the features before position p         all that is kept of a text
    h_k <- h_k + W_out silu(W_in [norm(h_k) ; c ; place_k])

No good drafter, but all that one owes: ragged contexts, blocks, and training that agrees with both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.draft.attention import RMSNorm
from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.kinds import BackboneKind, register_backbone
from dspark.k3.storage import Storage


class MeanLayer(nn.Module):
    """Weights of one layer; the drafter stores them as `layers.N.*`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.place = nn.Embedding(config.block_size, width)
        self.read = nn.Linear(3 * width, config.intermediate_size, bias=False)
        self.write = nn.Linear(config.intermediate_size, width, bias=False)

    def forward(self, hidden: Tensor, mean: Tensor) -> Tensor:
        """[..., G, D] and [..., 1, D] -> [..., G, D]."""
        seen = (self.norm(hidden), mean.expand_as(hidden), self.place.weight.expand_as(hidden))
        return hidden + self.write(F.silu(self.read(torch.cat(seen, -1))))


class MeanContext(DraftContext):
    """The sum of what each text has read, [B, D]; the base class keeps the lengths."""

    def __init__(self, batch: int, max_length: int, like: Tensor, storage: Storage | None) -> None:
        super().__init__(batch, max_length, like.device, storage=storage)
        (self.total,) = self._take([((batch, like.shape[-1]), torch.float32)])

    @property
    def nbytes(self) -> int:
        return self.total.nbytes

    def _write_row(self, row: int, other: MeanContext | None) -> None:
        self.total[row] = 0 if other is None else other.total[0]

    def _select_rows(self, rows: Tensor) -> None:
        self.total = self._rows_of(self.total, rows)


class MeanBackbone:
    """See `dspark.draft.backbone.Backbone`."""

    def __init__(self, config: DraftConfig, layers: nn.ModuleList) -> None:
        self.layers = layers

    def new_context(
        self, batch: int, max_length: int, storage: Storage | None = None
    ) -> MeanContext:
        return MeanContext(batch, max_length, self.layers[0].place.weight, storage)

    def extend(self, context: MeanContext, features: Tensor, kept: list[int] | Tensor) -> None:
        counts = torch.as_tensor(kept, device=features.device)[:, None, None]
        rows = torch.arange(features.shape[1], device=features.device)[:, None]
        context.total += torch.where(rows < counts, features, 0).sum(1, dtype=torch.float32)

    def block(self, hidden: Tensor, context: MeanContext) -> Tensor:
        mean = context.total / context.lengths.clamp(min=1)[:, None]
        return self._run(hidden, mean[:, None].to(hidden.dtype))

    def train(
        self, hidden: Tensor, features: Tensor, valid: Tensor, anchors: Tensor, alike: bool = False
    ) -> Tensor:
        total = (features.float() * valid[..., None]).cumsum(1)
        before = F.pad(total, (0, 0, 1, 0))  # row p: the sum of all positions before p
        picked = before.gather(1, anchors[..., None].expand(-1, -1, total.shape[-1]))
        mean = picked / anchors.clamp(min=1)[..., None]
        return self._run(hidden, mean[..., None, :].to(hidden.dtype))

    def _run(self, hidden: Tensor, mean: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mean)
        return hidden


register_backbone(
    "mean",
    BackboneKind(
        layers=lambda config: nn.ModuleList(MeanLayer(config) for _ in range(config.num_layers)),
        run=MeanBackbone,
        context_bytes=lambda config, length, dtype: 4 * config.hidden_size,
    ),
)
