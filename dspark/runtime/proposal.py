"""One draft pass: the whole trained block in one go, then the sequential head, left to right.

    h_1..h_G = backbone([anchor, mask, ..., mask], context)       always the trained block size
    l_k      = LM head(h_k) + bias(code of x_0..x_{k-1})          x_0 = anchor
    x_k ~ q_k = to_probs(l_k)                                     argmax at temperature 0
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

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.draft.anchors import block_inputs
from dspark.draft.calibration import Calibration
from dspark.errors import UserError
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import (
    Generators,
    SamplingParams,
    check_logits,
    draw_at,
    to_probs,
    uniform,
)
from dspark.taps import TapSet


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
) -> Proposal:
    """Propose `draft_length` tokens after `anchor` [B] int64, each an id of the target.

    `head` belongs to `drafter` and its target; `context` holds the taps of every committed token
    before the anchor. Raises UserError for a draft length outside 1..block_size and BadLogits if
    the drafter's logits are not finite.
    """
    check_draft_length(drafter, draft_length)
    block = block_inputs(anchor, drafter.config.block_size, drafter.config.mask_token_id)
    hidden = drafter.block_hidden(head.embed(block), context)[:, :draft_length]
    logits = head.logits(hidden)
    if sampling.greedy:
        tokens, probs = _walk_greedy(drafter.markov_head, head, logits, hidden, anchor), None
    else:
        u = uniform((anchor.shape[0], draft_length), generator, anchor.device)
        walk = _walk_sampled(drafter.markov_head, head, logits, hidden, anchor, sampling, u)
        tokens, probs = walk
    confidence = None
    if drafter.confidence_head is not None:
        before = torch.cat((anchor.unsqueeze(1), tokens[:, :-1]), dim=1)
        scores = drafter.confidence_head(hidden, drafter.markov_head.embed(before))
        confidence = _confidence(drafter.calibration, scores, sampling)
    return Proposal(tokens, probs, confidence, _entropy(logits))


def _confidence(
    calibration: Calibration | None, scores: Tensor, sampling: SamplingParams
) -> Tensor:
    """Head logits [B, g] -> [B, g]. They never depend on `sampling`, what they mean does."""
    if calibration is None:
        return torch.sigmoid(scores.float())
    return calibration.confidence(scores, sampling)


def _walk_greedy(
    sequential: SequentialHead, head: DraftHead, logits: Tensor, hidden: Tensor, anchor: Tensor
) -> Tensor:
    """Adds the biases to `logits` [B, g, V'] in place; returns the argmax walk [B, g]."""
    tokens, prev, state = [], anchor, sequential.start(anchor.shape[0])
    for row, slot in zip(logits.unbind(1), hidden.unbind(1), strict=True):
        code, state = sequential.step(prev, slot, state)
        prev = head.tokens(_add_bias(row, sequential, code).argmax(dim=-1))
        tokens.append(prev)
    check_logits(logits, "drafter")
    return torch.stack(tokens, dim=1)


def _walk_sampled(
    sequential: SequentialHead,
    head: DraftHead,
    logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    sampling: SamplingParams,
    u: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `_walk_greedy`, drawing with uniforms `u` [B, g]; also the q [B, g, V] drawn from."""
    tokens, probs, prev, state = [], [], anchor, sequential.start(anchor.shape[0])
    for k, (row, slot) in enumerate(zip(logits.unbind(1), hidden.unbind(1), strict=True)):
        code, state = sequential.step(prev, slot, state)
        # Checked once for all slots below: a bad row draws some id in range until then.
        q = to_probs(_add_bias(row, sequential, code), sampling, check=False)
        prev = head.tokens(draw_at(q, u[:, k]))
        tokens.append(prev)
        probs.append(q)
    check_logits(logits, "drafter")
    return torch.stack(tokens, dim=1), head.spread(torch.stack(probs, dim=1))


def _add_bias(row: Tensor, sequential: SequentialHead, code: Tensor) -> Tensor:
    bias = sequential.bias(code)
    # A table padded past the logical vocabulary must not lend probability to its padding.
    return row.add_(bias if bias.shape[-1] == row.shape[-1] else bias[..., : row.shape[-1]])


def _entropy(logits: Tensor) -> Tensor:
    """[..., V] -> [...] nats at temperature 1, unfiltered; a logit of -inf contributes 0."""
    log_q = torch.log_softmax(logits, dim=-1)
    return -(log_q.exp() * log_q.clamp_(min=torch.finfo(log_q.dtype).min)).sum(dim=-1)
