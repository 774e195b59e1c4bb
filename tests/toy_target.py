"""A tiny target that is obviously right: it recomputes every row from its first token.

h_t = sum over the last `reach` tokens of an embedding per age, through a tanh layer; logits are
sharp and depend mostly on the last token, so a drafter can learn it in a few dozen steps. Taps are
affine images of h with a different matrix per layer. Caches hold token lists; nothing is shared
between steps, so rollback cannot go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.runtime.target import TargetOutput
from dspark.taps import TapSet


@dataclass(eq=False)
class ToyCache:
    """Token lists per row, committed and pending."""

    rows: list[list[int]]
    pending: list[list[int]] | None = None
    nbytes: int = 0

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(row) for row in self.rows])

    def commit(self, n: int | Tensor) -> None:
        if self.pending is None:
            raise ValueError("nothing is pending")
        counts = [n] * len(self.rows) if isinstance(n, int) else n.tolist()
        for row, extra, count in zip(self.rows, self.pending, counts, strict=True):
            if not 0 <= count <= len(extra):
                raise ValueError(f"{count} of {len(extra)} rows")
            row += extra[:count]
        self.pending = None

    def rollback(self) -> None:
        self.commit(0)

    def select(self, rows: Tensor) -> None:
        self.rows = [self.rows[i] for i in rows.tolist()]


@dataclass(eq=False)
class ToyTarget:
    """Implements the `Target` protocol in plain float32."""

    vocab_size: int = 64
    hidden_size: int = 32
    num_layers: int = 4
    max_positions: int = 100_000
    supports_trees: bool = False
    sharpness: float = 6.0
    reach: int = 3
    name: str = "toy"
    tap_kinds: tuple[str, ...] = ("residual",)
    end_token_ids: tuple[int, ...] = (1,)
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    dtype: torch.dtype = torch.float32
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def table_size(self) -> int:
        return self.vocab_size

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        ages = torch.tensor([1.0, 0.3, 0.1, 0.05])[: self.reach, None, None]
        self.weights = {
            "embed": draw(self.vocab_size, self.hidden_size),
            "history": ages * draw(self.reach, self.vocab_size, self.hidden_size),
            "layers": draw(self.num_layers, self.hidden_size, self.hidden_size)
            / self.hidden_size**0.5,
            "head": self.sharpness
            * draw(self.vocab_size, self.hidden_size)
            / self.hidden_size**0.5,
        }

    def embed(self, tokens: Tensor) -> Tensor:
        return self.weights["embed"][tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weights["head"].T

    def head(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        rows = self.weights["head"][ids]
        return lambda hidden: hidden.float() @ rows.T

    def new_cache(self, batch: int, max_length: int) -> ToyCache:
        return ToyCache([[] for _ in range(batch)])

    def states(self, tokens: Tensor) -> Tensor:
        """[S] -> [S, D], every position from its last `reach` tokens."""
        total = torch.zeros(len(tokens), self.hidden_size)
        for age in range(min(self.reach, len(tokens))):
            total[age:] += self.weights["history"][age][tokens[: len(tokens) - age]]
        return torch.tanh(total)

    def forward(
        self,
        tokens: Tensor,
        cache: ToyCache,
        *,
        valid: Tensor | None = None,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
        commit: bool,
    ) -> TargetOutput:
        assert parents is None, "supports_trees is False"
        batch, new = tokens.shape
        hidden = torch.zeros(batch, new, self.hidden_size)
        pending = []
        for b in range(batch):
            keep = torch.ones(new, dtype=torch.bool) if valid is None else valid[b]
            fresh = tokens[b][keep]
            pending.append(fresh.tolist())
            states = self.states(torch.tensor(cache.rows[b] + pending[b], dtype=torch.int64))
            hidden[b, keep] = states[len(states) - len(fresh) :]
        cache.pending = pending
        if commit:
            cache.commit(torch.tensor([len(row) for row in pending]))
        layers = (
            [] if taps is None else [hidden @ self.weights["layers"][i] for i in taps.layer_ids]
        )
        return TargetOutput(hidden, torch.cat(layers, -1) if layers else None)


def toy_rows(target: ToyTarget, count: int, length: int = 40, seed: int = 3) -> list[tuple]:
    """(ids, loss_mask) sampled from the target: a random prompt of 4..8 tokens, then its answer."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(4, 9, (count,), generator=generator).tolist()
    ids = torch.randint(2, target.vocab_size, (count, length), generator=generator)
    for at in range(min(prompt), length):
        hidden = torch.stack([target.states(row[max(0, at - 4) : at])[-1] for row in ids])
        logits = target.logits(hidden)
        logits[:, list(target.end_token_ids)] = -1e9  # every row runs to its full length
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        answers = torch.tensor([at >= p for p in prompt])
        ids[:, at] = torch.where(answers, drawn, ids[:, at])
    return [
        (tuple(ids[i].tolist()), tuple(t >= prompt[i] for t in range(length))) for i in range(count)
    ]
