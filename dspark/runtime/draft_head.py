"""What a drafter borrows of its target: the embedding, and the LM head over its own vocabulary.

A drafter with a reduced vocabulary needs the head's rows of its ids only. They are copied once,
side by side, so that a draft reads V' rows of the head and not V, and a proposal is put back into
the target's ids and the target's width, where verification needs no rule of its own: outside of
the draft vocabulary q is zero.

Letters: B batch, g slots, D hidden, V vocabulary of the target, V' of the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.runtime.target import Target


class DraftHead:
    """The target's tables as one drafter uses them; made once and kept as long as the pair is.

    Args:
        target: Owner of embedding and LM head.
        ids: Target ids [V'] int64, ascending, of a reduced draft vocabulary; None: all.
    """

    def __init__(self, target: Target, ids: Tensor | None) -> None:
        self.embed = target.embed
        self._dtype = target.dtype
        self._width = target.vocab_size
        self.ids = None if ids is None else ids.to(target.device)
        self._head = target.logits if self.ids is None else target.head(self.ids)
        self.where = None if self.ids is None else self._places(self.ids)
        """Draft id of each target id [V] int64, -1 for none; None: they are the same."""

    def _places(self, ids: Tensor) -> Tensor:
        none = ids.new_full((self._width,), -1)
        return none.index_copy_(0, ids, torch.arange(len(ids), device=ids.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] states of the drafter -> [..., V'] float32, the caller's to overwrite."""
        return self._head(hidden.to(self._dtype))

    def tokens(self, drawn: Tensor) -> Tensor:
        """Draft ids of any shape -> target ids."""
        return drawn if self.ids is None else self.ids[drawn]

    def spread(self, probs: Tensor) -> Tensor:
        """[..., V'] over draft ids -> [..., V] over target ids, zero outside the vocabulary."""
        if self.ids is None:
            return probs
        wide = probs.new_zeros((*probs.shape[:-1], self._width))
        return wide.index_copy_(-1, self.ids, probs)
