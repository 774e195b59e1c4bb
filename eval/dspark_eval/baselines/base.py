"""What a way to draft has to offer, and the loop that decodes with it.

A block drafter is known to the runtime by its states and heads. Here a drafter is anything that
answers one question: which tokens may follow this text, and what distributions q were they drawn
from? Rounds, verdict, records and random numbers are the runtime's own, so a proposal is judged
exactly as any other: lossless if every token was drawn from the q beside it.

One text at a time; between rounds the baseline is told nothing it cannot see in the text, but the
taps of committed tokens if it asks for any.

Letters: B = 1 text, g tokens of a proposal, V vocabulary, N taps, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dspark.draft.calibration import Calibration
from dspark.runtime.decode import begin, check_taps
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.faults import fault_of
from dspark.runtime.judge import Method
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.prefill import PREFILL_CHUNK, clock
from dspark.runtime.proposal import Drafter, check_draft_length
from dspark.runtime.records import Generation, Proposal
from dspark.runtime.requests import Request, Text
from dspark.runtime.rounds import Rounds
from dspark.runtime.sampling import Generators, SamplingParams, draw_at, to_probs, uniform
from dspark.runtime.seats import Seats
from dspark.runtime.target import Target
from dspark.taps import TapSet


@dataclass(frozen=True)
class Block:
    """The most tokens of one proposal."""

    block_size: int


class Baseline(ABC):
    """A way to draft.

    Attributes:
        name: As tables print it.
        config: Its longest proposal.
        taps: States of the target that it reads; None: none.
        confidence_head, calibration: None, it predicts no acceptance.
    """

    name: str
    config: Block
    taps: TapSet | None = None
    confidence_head: None = None
    calibration: Calibration | None = None

    @abstractmethod
    def new_context(self, batch: int, max_length: int) -> Any:
        """What it keeps of one text of at most `max_length` tokens; `batch` is 1."""

    def extend(self, context: Any, features: Tensor, counts: int | Tensor | None = None) -> None:
        """Taps [1, n, N*D] of committed tokens, of which the first `counts` count; None: all."""
        raise NotImplementedError(f"{self.name} asks for no taps")

    def read(self, context: Any, prompt: Sequence[int]) -> None:
        """The prompt, once, before the first round: work that belongs to prefill."""
        del context, prompt

    @abstractmethod
    def propose(
        self,
        context: Any,
        text: Sequence[int],
        length: int,
        sampling: SamplingParams,
        generator: Generators,
    ) -> Proposal:
        """At most `length` tokens after `text`, which ends with the anchor; fewer, or none, too."""


class BaselineRounds(Rounds):
    """The runtime's rounds with drafts from a baseline."""

    def draft(self, seats: Seats, length: int) -> Proposal:
        if length == 0:
            return nothing(seats.anchor.device)
        (text,) = seats.texts
        baseline = cast(Baseline, self.drafter)
        so_far = [*text.request.prompt_ids, *text.tokens]
        return baseline.propose(seats.context, so_far, length, self.sampling, seats.draft_draws)


class BaselineDecoder:
    """A target and a baseline. Raises UserError if the target has not the taps it reads."""

    def __init__(self, target: Target, baseline: Baseline) -> None:
        self.target, self.baseline = target, baseline
        # the part of the protocol that rounds use; the rest of it is how a block is drafted
        self._drafter = cast(Drafter, baseline)
        if baseline.taps is not None:
            check_taps(target, self._drafter)
        self._head = DraftHead(target, None)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        draft_length: int | None = None,
        method: Method = "token",
        end_token_ids: Collection[int] | None = None,
        seed: int = 0,
    ) -> Generation:
        """As `SpeculativeDecoder.generate`; `draft_length` None: the baseline's longest."""
        if draft_length is not None:
            check_draft_length(self._drafter, draft_length)
        request = Request(prompt_ids, max_new_tokens, end_token_ids=end_token_ids, seed=seed)
        text = Text(self.target, request)
        policy = Fixed(draft_length)
        rounds = BaselineRounds(
            self.target, self._drafter, self._head, sampling, policy, method=method
        )
        start = clock(self.target.device)
        seats = begin(rounds, text, PREFILL_CHUNK)
        self.baseline.read(seats.context, prompt_ids)
        decode_start = clock(self.target.device)
        while not text.finished:
            rounds.run(seats)
        if text.fault is not None:
            raise text.fault
        return text.generation(decode_start - start, clock(self.target.device) - decode_start)


def nothing(device: torch.device) -> Proposal:
    """A proposal of no tokens: the round is a plain step."""
    empty = torch.empty((1, 0), device=device)
    return Proposal(empty.long(), None, None, empty)


def walk(
    logits_after: Callable[[Tensor], Tensor],
    anchor: Tensor,
    length: int,
    sampling: SamplingParams,
    generator: Generators,
) -> Proposal:
    """Draw left to right: `logits_after(x_{k-1}) [1] -> [1, V]` gives the q of x_k.

    Called once a token, in order, the anchor first; whoever answers knows what came before.
    """
    coins = None
    if not sampling.greedy:
        coins = uniform((1, length), generator, anchor.device)
    tokens, rows, token = [], [], anchor
    for k in range(length):
        rows.append(logits_after(token).float())
        if coins is None:
            token = rows[-1].argmax(dim=-1)
        else:
            token = draw_at(to_probs(rows[-1], sampling, check=False), coins[:, k])
        tokens.append(token)
    return proposed(torch.stack(tokens, dim=1), torch.stack(rows, dim=1), sampling)


def drawn_apart(logits: Tensor, sampling: SamplingParams, generator: Generators) -> Proposal:
    """Draw every token of [1, g, V] on its own, all at once."""
    if sampling.greedy:
        return proposed(logits.argmax(dim=-1), logits, sampling)
    coins = uniform((1, logits.shape[1]), generator, logits.device)
    tokens = draw_at(to_probs(logits, sampling, check=False), coins)
    return proposed(tokens, logits, sampling)


def proposed(tokens: Tensor, logits: Tensor, sampling: SamplingParams) -> Proposal:
    """Tokens [1, g] with what they were drawn from, by the one function that p is made by too."""
    probs = None if sampling.greedy else to_probs(logits, sampling, check=False)
    entropy = torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1)
    return Proposal(tokens, probs, None, entropy, fault=-fault_of(logits))
