"""The two small heads on top of the backbone.

    sequential:  logits of slot k += W2 u_k, its code u_k = W1[x_{k-1}] for the vanilla head
    confidence:  logit_k = w . [h_k ; W1[x_{k-1}]] + b, the chance that slot k is accepted

Both look at the token before the slot and never at the token drawn in it, so a decision taken on
the confidence of slot k leaves sampling lossless. (DSpark paper; tensor names are DeepSpec's.)

Letters: V vocabulary, R rank, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.draft.config import DraftConfig


class SequentialHead(nn.Module):
    """What every sequential head has: a table of the previous token and a map from code to bias.

    A subclass says how a slot's code follows from the tokens before it, twice: `codes` for all
    slots of a block in training, `step` for one slot in drafting.

    Args:
        vocab: V, rows of the table of previous tokens: always the target's ids.
        rank: R.
        draft_vocab: V', width of the bias; None: V.
    """

    def __init__(self, vocab: int, rank: int, draft_vocab: int | None = None) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab or vocab, bias=False)

    def embed(self, prev: Tensor) -> Tensor:
        """Embedding of the previous tokens, for the confidence head: ids [...] -> [..., R]."""
        return self.markov_w1(prev)

    def bias(self, code: Tensor) -> Tensor:
        """Logit bias of codes: [..., R] -> [..., V']."""
        return self.markov_w2(code)

    def codes(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Codes of whole blocks under teacher forcing.

        Args:
            prev: [..., G] int64, the token before each slot, ids of the target.
            hidden: [..., G, D] final-normed states of the slots.

        Returns:
            [..., G, R]; slot k depends on slots up to k only.
        """
        raise NotImplementedError

    def start(self, batch: int) -> Tensor | None:
        """State before the first slot of `batch` blocks; None for a head without one."""
        del batch
        return None

    def step(
        self, prev: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Code of the next slot: prev [B], hidden [B, D], state -> code [B, R], new state."""
        raise NotImplementedError


class VanillaMarkovHead(SequentialHead):
    """First-order head: a rank-R logit bias that depends on the previous token alone."""

    def codes(self, prev: Tensor, hidden: Tensor) -> Tensor:
        del hidden
        return self.markov_w1(prev)

    def step(
        self, prev: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        del hidden
        return self.markov_w1(prev), state


class ConfidenceHead(nn.Module):
    """One linear unit that predicts the conditional acceptance of a slot.

    Args:
        hidden: D.
        rank: R of the previous-token embedding it also reads, or 0 to read the hidden state alone.
    """

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(self, hidden: Tensor, prev_embed: Tensor) -> Tensor:
        """Logits of acceptance, before any calibration.

        Args:
            hidden: [..., D] final-normed backbone output of the slot.
            prev_embed: [..., R] from `SequentialHead.embed`; not read when the head has rank 0.

        Returns:
            [...] in fp32: a sigmoid near 0 or 1 has no room in a half precision.
        """
        inputs = torch.cat((hidden, prev_embed.to(hidden.dtype)), -1) if self.rank else hidden
        wide = torch.promote_types(inputs.dtype, torch.float32)
        weight, bias = self.proj.weight.to(wide), self.proj.bias.to(wide)
        return F.linear(inputs.to(wide), weight, bias).squeeze(-1)


def sequential_head(config: DraftConfig) -> SequentialHead:
    """A fresh head of the type that the configuration names."""
    heads = {"vanilla": VanillaMarkovHead}
    if config.markov_head_type not in heads:
        raise ValueError(f"markov_head_type: {config.markov_head_type!r} cannot be built here")
    return heads[config.markov_head_type](
        config.vocab_size, config.markov_rank, config.draft_vocab_size
    )
