"""A target that is its tables alone, for measuring a training step that reads kept states.

Letters: B batch, S sequence, D hidden, V vocabulary, N taps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.distill.taps import Features
from dspark.runtime.target import Cache, TargetOutput
from dspark.taps import TapSet


class HeadTarget:
    """Embedding and LM head of one random matrix in bfloat16. It has no layers to run."""

    name = "tables"
    num_layers = 0
    tap_kinds: tuple[str, ...] = ("residual",)
    end_token_ids: tuple[int, ...] = ()
    max_positions = 1 << 30
    supports_trees = False
    notes: tuple[str, ...] = ()
    head_rest = ""
    dtype = torch.bfloat16

    def __init__(self, vocab: int, hidden: int, device: torch.device) -> None:
        self.vocab_size = self.table_size = vocab
        self.hidden_size, self.device = hidden, device
        generator = torch.Generator(device).manual_seed(1)
        table = torch.empty(vocab, hidden, dtype=torch.bfloat16, device=device)
        # Logits of unit-variance states then spread by 3 nats, about as sharp as a trained model's.
        self.table = table.normal_(std=3 * hidden**-0.5, generator=generator)

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        return F.embedding(tokens, self.table)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] float32."""
        return F.linear(hidden, self.table).float()

    def head(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """See `Target.head`."""
        rows = self.table[ids]
        return lambda hidden: F.linear(hidden, rows).float()

    def head_weight(self) -> Tensor:
        """See `Target.head_weight`."""
        return self.table

    def plain_head(self) -> Tensor:
        """See `Target.plain_head`."""
        return self.table

    def new_cache(self, batch: int, max_length: int) -> Cache:
        """Raises RuntimeError: there are no layers."""
        raise RuntimeError("these tables have no layers to run; give the trainer kept states")

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
        """Raises RuntimeError: there are no layers."""
        raise RuntimeError("these tables have no layers to run; give the trainer kept states")


def random_states(rows: int, length: int, taps: int, hidden: int, device: torch.device) -> Features:
    """Normal taps [B, S, N*D] and post-norm states [B, S, D] in bfloat16."""
    generator = torch.Generator(device).manual_seed(2)

    def normal(width: int) -> Tensor:
        made = torch.empty(rows, length, width, dtype=torch.bfloat16, device=device)
        return made.normal_(generator=generator)

    return Features(normal(taps * hidden), normal(hidden))
