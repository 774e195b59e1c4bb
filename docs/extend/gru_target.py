"""A target in under 100 lines: a GRU language model, its cache the plainest, a list of tokens.

Every pass reads the whole text again: slow and right, so the oracle of a faster one, which keeps
the state after the committed tokens and folds the accepted rows on `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.runtime.target import TargetOutput
from dspark.taps import TapSet


class GRUModel(nn.Module):
    """Embedding, GRU layers that each add to the residual stream, norm, tied LM head."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """[1, T] -> the residual stream after each layer, [1, T, D]; the last one normed."""
        states = [self.embed(tokens)]
        for layer in self.layers:
            states.append(states[-1] + layer(states[-1])[0])
        return [*states[1:-1], self.norm(states[-1])]


class TokenCache:
    """Committed tokens of one text, and the pending rows after them."""

    nbytes = 0

    def __init__(self) -> None:
        self.tokens, self.pending = list[int](), list[int]()

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(self.tokens)])

    def commit(self, n: int | Tensor) -> None:
        if not self.pending or not 0 <= int(n) <= len(self.pending):
            raise ValueError(f"commit({int(n)}): {len(self.pending)} rows are pending")
        self.tokens, self.pending = self.tokens + self.pending[: int(n)], []

    def rollback(self) -> None:
        self.commit(0)


class GRUTarget:
    """See `dspark.runtime.target.Target`."""

    tap_kinds, supports_trees, head_rest, max_positions = ("residual",), False, "", 1 << 20
    notes = ("reads the whole text again in every pass",)

    def __init__(self, model: GRUModel, end_token_ids: Sequence[int], name: str = "gru") -> None:
        self.model, self.name, self.end_token_ids = model.eval(), name, tuple(end_token_ids)
        self.vocab_size, self.hidden_size = model.embed.weight.shape
        self.table_size, self.num_layers = self.vocab_size, len(model.layers)
        self.device, self.dtype = model.embed.weight.device, model.embed.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.model.embed.weight.T).float()

    def head(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        rows = self.model.embed.weight[ids]
        return lambda hidden: (hidden @ rows.T).float()

    def head_weight(self) -> Tensor:
        return self.model.embed.weight

    plain_head = head_weight

    def new_cache(self, batch: int, max_length: int) -> TokenCache:
        assert batch == 1, "this target reads one text at a time"
        return TokenCache()

    def forward(
        self, tokens: Tensor, cache: TokenCache, *, taps: TapSet | None = None, commit: bool,
        **none: Any,  # valid and parents: neither padding nor trees reach a batch of one chain
    ) -> TargetOutput:  # fmt: skip
        new = tokens[0].tolist()
        states = self.model(torch.tensor([cache.tokens + new], device=self.device))
        states = [state[:, -len(new) :] for state in states]
        tapped = None if taps is None else torch.cat([states[i] for i in taps.layer_ids], -1)
        cache.pending = new
        if commit:
            cache.commit(len(new))
        return TargetOutput(states[-1], tapped)
