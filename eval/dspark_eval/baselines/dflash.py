"""DFlash: a block drafter whose slots know nothing of each other's tokens.

    h_1..h_G = backbone([anchor, mask, ..., mask], context)      one pass, as DSpark's
    x_k ~ q_k = softmax(LM head(h_k))                            all slots at once

It is DSpark without the sequential head, so the folder is an ordinary drafter's whose head adds
exactly zero, and is drafted here without the walk that such a head would need. What a slot cannot
know, which token was drawn before it, shows in slots that fit their neighbours badly.

(Chen, Liang, Liu 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", in the slot layout
of the DSpark paper, in which the anchor's slot predicts too; DeepSpec trains it as the same class
with markov rank 0.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.draft.anchors import block_inputs
from dspark.draft.heads import SequentialHead
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import Generators, SamplingParams
from dspark.runtime.target import Target
from dspark_eval.baselines.base import Baseline, Block, drawn_apart


class NoHead(SequentialHead):
    """A sequential head whose code is zero: it adds nothing, and no gradient reaches its tables."""

    def codes(self, prev: Tensor, hidden: Tensor) -> Tensor:
        del hidden
        return torch.zeros((*prev.shape, self.markov_w2.in_features), device=prev.device)

    def step(
        self, prev: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.codes(prev, hidden), state

    def coder(self, hidden: Tensor) -> None:
        """Its tables are zero, and so is every embedding."""
        del hidden


def without_head(drafter: DSparkDrafter) -> DSparkDrafter:
    """The same drafter with a head that adds exactly zero, its tables zero too."""
    config = drafter.config
    head = NoHead(config.vocab_size, config.markov_rank, config.draft_vocab_size)
    for table in head.parameters():
        torch.nn.init.zeros_(table)
    drafter.markov_head = head.to(drafter.fc.weight.device)
    return drafter


class DFlash(Baseline):
    """Drafts a block without a walk. Raises UserError if the drafter's head adds anything."""

    name = "dflash"

    def __init__(self, drafter: DSparkDrafter, target: Target) -> None:
        if bool(drafter.markov_head.markov_w2.weight.any()):
            raise UserError(
                "dflash: this drafter's sequential head is not zero; it is no DFlash drafter, "
                "compare it as it is"
            )
        self.drafter, self.head = drafter, DraftHead(target, drafter.draft_ids)
        self.config, self.taps = Block(drafter.config.block_size), drafter.taps

    def new_context(self, batch: int, max_length: int) -> Any:
        return self.drafter.new_context(batch, max_length)

    def extend(self, context: Any, features: Tensor, counts: int | Tensor | None = None) -> None:
        self.drafter.extend(context, features, counts)

    def propose(
        self,
        context: Any,
        text: Sequence[int],
        length: int,
        sampling: SamplingParams,
        generator: Generators,
    ) -> Proposal:
        config = self.drafter.config
        anchor = torch.tensor([text[-1]], device=self.drafter.fc.weight.device)
        block = block_inputs(anchor, config.block_size, config.mask_token_id)
        hidden = self.drafter.block_hidden(self.head.embed(block), context)[:, :length]
        logits = self.head.logits(hidden)
        if self.head.ids is None:
            return drawn_apart(logits, sampling, generator)
        wide = logits.new_full((*logits.shape[:-1], config.vocab_size), -torch.inf)
        wide = wide.index_copy_(-1, self.head.ids, logits)
        return drawn_apart(wide, sampling, generator)
