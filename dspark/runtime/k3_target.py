"""The K3 decoder as a target."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from dspark.k3.cache import K3Cache
from dspark.k3.model import K3ForCausalLM
from dspark.k3.storage import Storage
from dspark.runtime.target import Cache, TargetOutput
from dspark.taps import TapSet


class K3Target:
    """A `K3ForCausalLM` behind the `Target` protocol, its projections packed for inference.

    Only the head's logits leave the model's dtype: they are float32 whatever it is.

    Args:
        model: Owned from here on.
        name: For messages and records.
        end_token_ids: What ends a text.
        vocab_size: Ids that are tokens, where the model's tables are padded; None: all rows are.
    """

    supports_trees = True
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        model: K3ForCausalLM,
        name: str,
        end_token_ids: tuple[int, ...],
        vocab_size: int | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        model.pack_()
        config = model.config
        self.name = name
        self.vocab_size = vocab_size or config.vocab_size
        self.table_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.max_positions = config.max_position_embeddings
        self.tap_kinds = model.tap_kinds
        self.end_token_ids = end_token_ids
        self.device = model.lm_head.weight.device
        self.dtype = model.lm_head.weight.dtype
        self._head = model.lm_head.weight[: self.vocab_size]

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., D]."""
        return self.model.model.embed_tokens(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] float32."""
        return F.linear(hidden, self._head).float()

    def head_weight(self) -> Tensor:
        """See `Target.head_weight`."""
        return self.model.lm_head.weight

    @property
    def head_rest(self) -> str:
        """See `Target.head_rest`."""
        return ""

    def plain_head(self) -> Tensor:
        """See `Target.plain_head`."""
        return self._head

    def head(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """See `Target.head`."""
        rows = self._head[ids]
        return lambda hidden: F.linear(hidden, rows).float()

    def new_cache(self, batch: int, max_length: int, storage: Storage | None = None) -> K3Cache:
        """See `Target.new_cache`; ``storage``: where the cache's tensors live (`dspark.k3`)."""
        return self.model.new_cache(batch, max_length, storage)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache,
        *,
        valid: Tensor | None = None,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
        commit: bool,
    ) -> TargetOutput:
        """See `Target.forward`; `cache` must come from this target's `new_cache`."""
        if not isinstance(cache, K3Cache):
            raise TypeError(f"expected a K3Cache of this target, got {type(cache).__name__}")
        hidden, tapped = self.model(
            tokens, cache, valid=valid, parents=parents, taps=taps, commit=commit
        )
        return TargetOutput(hidden, tapped)
