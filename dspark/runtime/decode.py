"""The speculative decode loop at batch 1: draft, verify, commit, repeat.

State between rounds: the cache and the draft context hold every token before the anchor; the
anchor has been emitted and not yet run. One round with draft length G:

    propose   x_1..x_G from the context and the anchor
    verify    target([anchor, x_1..x_G]), rows pending -> accepted a, next token y
    emit      x_1..x_a, y, cut after the first end token: e tokens
    commit    the first e rows, which are [anchor, x_1..x_{e-1}]: everything before the last
              emitted token, the new anchor
    extend    the draft context by the taps of the same e rows; those of rejected tokens never
              reach it

`max_new_tokens` is exact. A round emits at most G + 1 tokens, so with r tokens left it drafts at
most r - 1; the last token, if it is alone, is a plain step (drafted 0) and counts as a round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.prefill import (
    PREFILL_CHUNK,
    TokenCallback,
    check_request,
    clock,
    end_ids,
    prefill,
)
from dspark.runtime.proposal import Drafter, check_draft_length, propose
from dspark.runtime.records import ALL_ACCEPTED, Generation, Proposal, RoundRecord, Verdict
from dspark.runtime.sampling import SamplingParams, request_generator
from dspark.runtime.target import Cache, Target
from dspark.runtime.verify import verify


@dataclass(eq=False)
class _Request:
    """What one running request holds."""

    cache: Cache
    context: Any
    anchor: Tensor
    sampling: SamplingParams
    generator: torch.Generator
    ends: frozenset[int]


@dataclass(frozen=True)
class _Outcome:
    """What the host learns of a round: the verdict, the proposed tokens and what goes on record."""

    accepted: int
    next_token: int
    level: int
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    entropy: tuple[float, ...]

    @classmethod
    def read(cls, proposal: Proposal, verdict: Verdict) -> _Outcome:
        """In one transfer, since each is a wait: float64 holds ids and float32 values exactly."""
        length = proposal.tokens.shape[1]
        parts = [verdict.accepted, verdict.next_token, verdict.level]
        parts += [proposal.tokens[0], proposal.entropy[0]]
        if proposal.confidence is not None:
            parts.append(proposal.confidence[0])
        values = torch.cat([part.double() for part in parts]).tolist()
        accepted, next_token, level, *tokens = map(int, values[: 3 + length])
        entropy, confidence = values[3 + length : 3 + 2 * length], values[3 + 2 * length :]
        return cls(accepted, next_token, level, tuple(tokens), tuple(confidence), tuple(entropy))


class SpeculativeDecoder:
    """A target and a drafter that reads its taps. Holds no state between requests.

    Raises UserError if the target cannot deliver the drafter's taps.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        taps = drafter.taps
        if taps.kind not in target.tap_kinds:
            raise UserError(
                f"drafter: reads taps of kind {taps.kind!r}, target {target.name} delivers "
                f"{', '.join(target.tap_kinds)}; use the drafter with the target it was made for"
            )
        if taps.layer_ids[-1] >= target.num_layers:
            raise UserError(
                f"drafter: reads layer {taps.layer_ids[-1]}, target {target.name} has layers "
                f"0..{target.num_layers - 1}; use the drafter with the target it was made for"
            )
        self.target = target
        self.drafter = drafter
        self._draft_head = DraftHead(target, drafter.draft_ids)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        draft_length: int,
        end_token_ids: Collection[int] | None = None,
        seed: int = 0,
        on_tokens: TokenCallback | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> Generation:
        """Generate up to `max_new_tokens` tokens, distributed exactly as the target's own.

        At temperature 0 and in float32 they equal plain decoding token for token; at other
        temperatures the law is the same, the sample for a given seed is not. `end_token_ids`
        replaces the target's; `on_tokens` gets the first token, then those of each round.

        Raises UserError for a wrong request and BadLogits for non-finite logits.
        """
        check_request(self.target, prompt_ids, max_new_tokens)
        check_draft_length(self.drafter, draft_length)
        device = self.target.device
        start = clock(device)
        request = self._begin(
            prompt_ids,
            len(prompt_ids) + max_new_tokens,  # a round never verifies past the last token
            sampling,
            end_ids(self.target, end_token_ids),
            request_generator(seed, 0, device),
            prefill_chunk,
        )
        tokens = request.anchor.tolist()
        if on_tokens is not None:
            on_tokens(list(tokens))
        decode_start = clock(device)

        rounds: list[RoundRecord] = []
        while tokens[-1] not in request.ends and len(tokens) < max_new_tokens:
            length = min(draft_length, max_new_tokens - len(tokens) - 1)
            emitted, record = self._round(request, length, on_tokens)
            tokens += emitted
            rounds.append(record)
        return Generation(
            tokens=tokens,
            finish="end" if tokens[-1] in request.ends else "length",
            prefill_s=decode_start - start,
            decode_s=clock(device) - decode_start,
            rounds=rounds,
        )

    def _begin(
        self,
        prompt_ids: Sequence[int],
        max_length: int,
        sampling: SamplingParams,
        ends: frozenset[int],
        generator: torch.Generator,
        chunk: int,
    ) -> _Request:
        cache = self.target.new_cache(1, max_length)
        context = self.drafter.new_context(1, max_length)
        anchor = prefill(
            self.target,
            cache,
            prompt_ids,
            sampling,
            generator,
            taps=self.drafter.taps,
            on_taps=lambda features: self.drafter.extend(context, features),
            chunk=chunk,
        )
        return _Request(cache, context, anchor, sampling, generator, ends)

    def _round(
        self, request: _Request, length: int, on_tokens: TokenCallback | None
    ) -> tuple[list[int], RoundRecord]:
        """One round; moves `request` to the new anchor and returns the emitted tokens."""
        target, device = self.target, self.target.device
        start = clock(device)
        proposal = self._draft(request, length)
        drafted = clock(device)

        block = torch.cat((request.anchor.unsqueeze(1), proposal.tokens), dim=1)
        out = target.forward(block, request.cache, taps=self.drafter.taps, commit=False)
        verdict = verify(proposal, target.logits(out.hidden), request.sampling, request.generator)
        outcome = _Outcome.read(proposal, verdict)
        verified = clock(device)

        accepted = outcome.accepted
        emitted = _until_end([*outcome.tokens[:accepted], outcome.next_token], request.ends)
        request.cache.commit(len(emitted))
        # Where an accepted token ended the text this is not its last token, but no round follows.
        request.anchor = verdict.next_token
        if on_tokens is not None:
            on_tokens(list(emitted))
        committed = clock(device)

        if out.taps is not None:
            self.drafter.extend(request.context, out.taps[:, : len(emitted)])
        end = clock(device)
        cut = len(emitted) <= accepted  # an accepted token ended the text
        return emitted, RoundRecord(
            drafted=length,
            verified=len(emitted) if cut else length,
            accepted=min(accepted, len(emitted)),
            emitted=len(emitted),
            level=ALL_ACCEPTED if cut else outcome.level,
            draft_s=(drafted - start) + (end - committed),
            verify_s=verified - drafted,
            other_s=committed - verified,
            confidence=outcome.confidence,
            entropy=outcome.entropy,
        )

    def _draft(self, request: _Request, length: int) -> Proposal:
        if length == 0:  # one token left: nothing worth drafting
            empty = torch.empty((1, 0), device=self.target.device)
            return Proposal(empty.long(), None, empty, empty)
        return propose(
            self.drafter,
            self._draft_head,
            request.context,
            request.anchor,
            length,
            request.sampling,
            request.generator,
        )


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """The tokens up to and including the first end token."""
    for k, token in enumerate(tokens):
        if token in ends:
            return tokens[: k + 1]
    return tokens
