"""One draft pass: the whole trained block in one go, then the sequential head, left to right.

    h_1..h_G = backbone([anchor, mask, ..., mask], context)       always the trained block size
    l_k      = LM head(h_k) + bias(code of x_0..x_{k-1})          x_0 = anchor
    x_k ~ q_k = to_probs(rules(l_k))                              argmax at temperature 0
    siblings of x_k ~ q_k without x_k, without replacement        the next best at temperature 0
    c_k      = sigmoid(confidence(h_k, markov_embed(x_{k-1})) / T_k)    known before x_k

A shorter draft length cuts after the block has run: the backbone was trained at one width and a
narrower block is a different function. Only the walk over slots is sequential; it holds as few
operations as the formula allows, because at batch 1 their launch is what a draft costs.
Logits and draws are over the draft vocabulary, everything before and after them over the target's
ids: the head of a reduced vocabulary translates each token as soon as it is drawn, since the next
slot is conditioned on it. (DSpark paper, sections on the sequential and the confidence head.)

Letters: B batch, G block slots, g draft length, V vocabulary of the target, V' of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dspark.draft.anchors import block_inputs
from dspark.draft.calibration import Calibration
from dspark.errors import UserError
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.faults import fault_of, raise_fault
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import Generators, SamplingParams, draw_at, to_probs, uniform
from dspark.runtime.siblings import draw_siblings, next_best
from dspark.taps import TapSet

if TYPE_CHECKING:
    from dspark.runtime.rules import RequestRules


class BlockConfig(Protocol):
    """The two facts about a drafter's block that drafting needs."""

    @property
    def block_size(self) -> int: ...

    @property
    def mask_token_id(self) -> int: ...


class SequentialHead(Protocol):
    """What the tokens before a slot add to its logits."""

    def start(self, batch: int) -> Tensor | None:
        """State before the first slot; None for a head without one."""
        ...

    def step(
        self, prev: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """prev [B] int64, hidden [B, D], state -> the slot's code [B, R], new state."""
        ...

    def bias(self, code: Tensor) -> Tensor:
        """[..., R] -> [..., V'], or wider by rows that pad the table."""
        ...

    def embed(self, prev: Tensor) -> Tensor:
        """[...] int64 -> [..., R], what the confidence head reads of the previous token."""
        ...


class Drafter(Protocol):
    """A block drafter, as far as the runtime knows one. Contexts are opaque here.

    calibration  temperatures T_k of the confidence; None: its raw sigmoid is reported
    """

    calibration: Calibration | None

    @property
    def config(self) -> BlockConfig: ...

    @property
    def taps(self) -> TapSet: ...

    @property
    def draft_ids(self) -> Tensor | None:
        """Target ids [V'] int64 of a reduced draft vocabulary, ascending; None: all of them."""
        ...

    @property
    def markov_head(self) -> SequentialHead: ...

    @property
    def confidence_head(self) -> Callable[[Tensor, Tensor], Tensor] | None: ...

    def new_context(self, batch: int, max_length: int) -> Any:
        """Empty draft context for `batch` rows of at most `max_length` committed tokens."""
        ...

    def extend(self, context: Any, features: Tensor, counts: int | Tensor | None = None) -> None:
        """Append taps [B, N, n*D] of committed tokens; `counts` keeps the first rows of each."""
        ...

    def block_hidden(self, block_embeds: Tensor, context: Any) -> Tensor:
        """[B, G, D] embeddings of [anchor, mask, ...] -> [B, G, D] states, final norm applied."""
        ...


def check_draft_length(drafter: Drafter, draft_length: int) -> None:
    """Raise UserError unless 1 <= draft_length <= the trained block size."""
    block = drafter.config.block_size
    if not 1 <= draft_length <= block:
        raise UserError(
            f"draft_length: expected 1..{block} (this drafter was trained on blocks of {block}; "
            f"a wider one collapses every position), got {draft_length}"
        )


@torch.no_grad()
def propose(
    drafter: Drafter,
    head: DraftHead,
    context: Any,
    anchor: Tensor,
    draft_length: int,
    sampling: SamplingParams,
    generator: Generators,
    *,
    siblings: int = 0,
    rules: Sequence[RequestRules | None] | None = None,
    check: bool = True,
) -> Proposal:
    """Propose `draft_length` tokens after `anchor` [B] int64, each an id of the target.

    Args:
        head: Of `drafter` and its target.
        context: Holds the taps of every committed token before the anchor.
        generator: Gives a block's worth of uniforms whatever the draft length, so that a request's
            draws do not depend on how far its batch drafts; none at temperature 0.
        siblings: How many to propose beside each token.
        rules: Of each batch row, applied slot by slot on the host's time; None: nobody has any.
        check: False leaves it to `verify`, which this proposal then tells of bad logits.

    Raises UserError for a draft length outside 1..block_size and BadLogits if the drafter's logits
    are not finite. Waits for no device but for that check and for rules.
    """
    check_draft_length(drafter, draft_length)
    block_size = drafter.config.block_size
    block = block_inputs(anchor, block_size, drafter.config.mask_token_id)
    hidden = drafter.block_hidden(head.embed(block), context)[:, :draft_length]
    logits = head.logits(hidden)
    coins = None
    if not sampling.greedy:
        shape = (anchor.shape[0], block_size, 1 + siblings)
        coins = uniform(shape, generator, anchor.device)[:, :draft_length]
    walk = _Walk(drafter.markov_head, head, sampling, coins, rules)
    drawn, choices = walk.run(logits, hidden, anchor)
    tokens, probs, beside = head.tokens(drawn), None, None
    if coins is not None or siblings:
        choices_BgV = torch.stack(choices, dim=1)
        probs = None if coins is None else head.spread(choices_BgV)
        beside = _siblings(head, choices_BgV, drawn, siblings, coins) if siblings else None
    confidence = None
    if drafter.confidence_head is not None:
        before = torch.cat((anchor.unsqueeze(1), tokens[:, :-1]), dim=1)
        scores = drafter.confidence_head(hidden, drafter.markov_head.embed(before))
        confidence = _confidence(drafter.calibration, scores, sampling)
    fault = -fault_of(logits)
    if check:
        raise_fault(fault.tolist())
    return Proposal(
        tokens=tokens,
        probs=probs,
        confidence=confidence,
        entropy=_entropy(logits),
        siblings=beside,
        fault=fault,
    )


def _siblings(
    head: DraftHead, choices: Tensor, drawn: Tensor, count: int, coins: Tensor | None
) -> Tensor:
    """[B, g, count] target ids besides the draft ids `drawn`, -1 where there is no other token."""
    if coins is None:
        found = next_best(choices, drawn, count)
    else:
        found = draw_siblings(choices, drawn, coins[..., 1:])
    return torch.where(found < 0, found, head.tokens(found.clamp(min=0)))


def _confidence(
    calibration: Calibration | None, scores: Tensor, sampling: SamplingParams
) -> Tensor:
    """Head logits [B, g] -> [B, g]. They never depend on `sampling`, what they mean does."""
    if calibration is None:
        return torch.sigmoid(scores.float())
    return calibration.confidence(scores, sampling)


@dataclass(frozen=True, eq=False)
class _Walk:
    """Left to right over the slots, each conditioned on the tokens chosen before it.

    coins  [B, g, 1 + m] float64 uniforms, the first of them chooses the token; None: argmax
    """

    sequential: SequentialHead
    head: DraftHead
    sampling: SamplingParams
    coins: Tensor | None
    rules: Sequence[RequestRules | None] | None

    def run(self, logits: Tensor, hidden: Tensor, anchor: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Adds the biases to `logits` [B, g, V'] in place.

        Returns the chosen draft ids [B, g] and, slot by slot, what they were chosen from [B, V']:
        probabilities or, at temperature 0, logits.
        """
        drawn, choices, tokens = [], [], [anchor]
        state = self.sequential.start(anchor.shape[0])
        for k, (row, slot) in enumerate(zip(logits.unbind(1), hidden.unbind(1), strict=True)):
            code, state = self.sequential.step(tokens[-1], slot, state)
            scores = self._ruled(_add_bias(row, self.sequential, code), tokens[1:])
            # A bad row chooses some id in range; its fault is found once for all slots.
            if self.coins is None:
                choice, token = scores, scores.argmax(dim=-1)
            else:
                choice = to_probs(scores, self.sampling, check=False)
                token = draw_at(choice, self.coins[:, k, 0])
            drawn.append(token)
            choices.append(choice)
            tokens.append(self.head.tokens(token))
        return torch.stack(drawn, dim=1), choices

    def _ruled(self, scores: Tensor, drafted: list[Tensor]) -> Tensor:
        """Logits [B, V'] under the rules of each row, a new tensor; as they are without rules."""
        if self.rules is None or all(rules is None for rules in self.rules):
            return scores
        path = torch.stack(drafted, dim=1) if drafted else scores.new_empty(len(scores), 0).long()
        ruled = [
            row if rules is None else rules.slot(row, before, self.head.ids)
            for row, before, rules in zip(scores, path, self.rules, strict=True)
        ]
        return torch.stack(ruled)


def _add_bias(row: Tensor, sequential: SequentialHead, code: Tensor) -> Tensor:
    bias = sequential.bias(code)
    # A table padded past the logical vocabulary must not lend probability to its padding.
    return row.add_(bias if bias.shape[-1] == row.shape[-1] else bias[..., : row.shape[-1]])


def _entropy(logits: Tensor) -> Tensor:
    """[..., V] -> [...] nats at temperature 1, unfiltered; a logit of -inf contributes 0."""
    log_q = torch.log_softmax(logits, dim=-1)
    return -(log_q.exp() * log_q.clamp_(min=torch.finfo(log_q.dtype).min)).sum(dim=-1)
