"""The draft of a frame: block pass, then the sequential head, left to right, and its confidence.

    vanilla       all slots in one op: a slot's code is the embedding of the token before it
    gated, rnn    slot by slot: the head makes the code, the same op adds its bias and draws

The op reads codes from a table, by the token before the slot. Where the head has made the codes,
they are the table, one row per seat, and seat b takes row b. The confidence reads the embedding of
the token before, whatever the head, so it is made for all slots at once when all tokens are known.
Nothing here is read by the host and no shape depends on a value.

Letters: B seats, G slots drafted, V' vocabulary drafted from, D hidden, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        if coins is not None:
            coins = coins[:, :length]
        logits = self.head.logits(hidden)
        if drafter.markov_head.plain:
            return self._at_once(logits, hidden, seats.anchor, coins, chances)
        return self._slot_by_slot(logits, hidden, seats.anchor, coins, chances)

    def _at_once(
        self, logits: Tensor, hidden: Tensor, anchor: Tensor, coins: Tensor | None, chances: Chances
    ) -> ops.Drafted:
        head, confidence = self.drafter.markov_head, self.drafter.confidence_head
        return ops.markov_sample(
            logits,
            anchor,
            head.markov_w1.weight,
            head.markov_w2.weight,
            coins=coins,
            temperature=chances.temperature,
            top_k=chances.top_k,
            top_p=chances.top_p,
            ids=self.head.ids,
            hidden=hidden,
            confidence=None
            if confidence is None
            else (confidence.proj.weight, confidence.proj.bias),
        )

    def _slot_by_slot(
        self, logits: Tensor, hidden: Tensor, anchor: Tensor, coins: Tensor | None, chances: Chances
    ) -> ops.Drafted:
        head, confidence = self.drafter.markov_head, self.drafter.confidence_head
        batch, slots, _ = logits.shape
        own = torch.arange(batch, device=anchor.device)
        # one copy for all slots: the op wants a slot's numbers side by side
        chance = None if coins is None else coins.t().contiguous().unsqueeze(-1)
        state, before, made = head.start(batch), [anchor], []
        for k in range(slots):
            code, state = head.step(before[-1], hidden[:, k], state)
            slot = ops.markov_sample(
                logits[:, k : k + 1],
                own,
                code,
                head.markov_w2.weight,
                coins=None if chance is None else chance[k],
                temperature=chances.temperature,
                top_k=chances.top_k,
                top_p=chances.top_p,
                ids=self.head.ids,
            )
            made.append(slot)
            before.append(slot.tokens.squeeze(1))
        block = _joined(made)
        if confidence is None:
            return block
        embed = head.embed(torch.stack(before[:-1], 1))
        return block._replace(confidence=confidence(hidden, embed))


def _joined(slots: Sequence[ops.Drafted]) -> ops.Drafted:
    """Blocks of one slot each, side by side; without a confidence."""

    def beside(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=1)

    return ops.Drafted(
        tokens=beside([slot.tokens for slot in slots]),
        scores=beside([slot.scores for slot in slots]),
        law=type(slots[0].law)(
            *(beside(part) for part in zip(*(slot.law for slot in slots), strict=True))
        ),
        entropy=beside([slot.entropy for slot in slots]),
        confidence=None,
        peak=beside([slot.peak for slot in slots]),
    )
