"""The two small heads on top of the backbone.

    markov:      bias(x_{k-1}) = W2 W1[x_{k-1}], added to the logits of slot k
    confidence:  logit_k = w . [h_k ; W1[x_{k-1}]] + b, the chance that slot k is accepted

Both look at the token before the slot and never at the token drawn in it, so a decision taken on
the confidence of slot k leaves sampling lossless. (DSpark paper; tensor names are DeepSpec's.)

Letters: V vocabulary, R rank, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VanillaMarkovHead(nn.Module):
    """First-order sequential head: a rank-R logit bias that depends on the previous token.

    Args:
        vocab: V.
        rank: R.
    """

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)

    def embed(self, prev: Tensor) -> Tensor:
        """Embedding of the previous tokens: ids [...] -> [..., R]."""
        return self.markov_w1(prev)

    def bias(self, prev: Tensor) -> Tensor:
        """Logit bias after the previous tokens: ids [...] -> [..., V]."""
        return self.markov_w2(self.markov_w1(prev))


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
            prev_embed: [..., R] from `VanillaMarkovHead.embed`; not read when the head has rank 0.

        Returns:
            [...] in fp32: a sigmoid near 0 or 1 has no room in a half precision.
        """
        inputs = torch.cat((hidden, prev_embed.to(hidden.dtype)), -1) if self.rank else hidden
        wide = torch.promote_types(inputs.dtype, torch.float32)
        weight, bias = self.proj.weight.to(wide), self.proj.bias.to(wide)
        return F.linear(inputs.to(wide), weight, bias).squeeze(-1)
