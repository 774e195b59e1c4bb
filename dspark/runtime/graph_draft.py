"""The draft of a frame: block pass, then the sequential head, left to right, and its confidence.

What a head makes of the hidden states alone is made for all slots at once; the walk over slots is
one op, whatever the head (`dspark_kernels.markov_sample`). Nothing here is read by the host and no
shape depends on a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark import ops
from dspark.draft.anchors import block_inputs
from dspark.draft.context import DraftContext
from dspark.draft.model import DSparkDrafter
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.graph_seats import Chances, GraphSeats


@dataclass(frozen=True, eq=False)
class Drafting:
    """A drafter with the target's tables and its context, in place and of fixed shapes."""

    drafter: DSparkDrafter
    head: DraftHead
    context: DraftContext

    def propose(self, seats: GraphSeats, length: int, chances: Chances) -> ops.Drafted:
        """A block for every seat, cut to ``length`` slots."""
        drafter, config = self.drafter, self.drafter.config
        block = block_inputs(seats.anchor, config.block_size, config.mask_token_id)
        hidden = drafter.block_hidden(self.head.embed(block), self.context)[:, :length]
        place = self.context.lengths
        coins = chances.coins(seats.seed, place, ops.DRAFT_STREAM, config.block_size)
        head, confidence = drafter.markov_head, drafter.confidence_head
        return ops.markov_sample(
            self.head.logits(hidden),
            seats.anchor,
            head.markov_w1.weight,
            head.markov_w2.weight,
            coins=None if coins is None else coins[:, :length],
            temperature=chances.temperature,
            top_k=chances.top_k,
            top_p=chances.top_p,
            ids=self.head.ids,
            hidden=hidden,
            confidence=None
            if confidence is None
            else (confidence.proj.weight, confidence.proj.bias),
            coder=head.coder(hidden),
        )
