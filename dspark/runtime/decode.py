"""Speculative decoding of one request, or of many in a batch, round by round.

    generate        one request: every round is one draft, one verify pass and one wait
    generate_many   a batch whose rows advance by different amounts; finished ones make room for
                    waiting ones, and no text depends on what else is in the batch

The rounds themselves are in `rounds`; scheduling without waits is `frames`.

`max_new_tokens` is exact. A round emits at most one token more than it sends, so with r tokens left
it drafts at most r - 1; the last token, if it is alone, is a plain step (drafted 0) and counts as a
round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from dspark.errors import UserError
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.judge import Method
from dspark.runtime.many import Many
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.policies.frontier import Policy
from dspark.runtime.prefill import PREFILL_CHUNK, TokenCallback, clock, prefill
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.proposal import Drafter, check_draft_length
from dspark.runtime.records import Generation
from dspark.runtime.relaxed import Relaxed
from dspark.runtime.requests import Request, RoundCallback, Text
from dspark.runtime.rounds import Rounds
from dspark.runtime.rules import Rules
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.seats import Seats
from dspark.runtime.stops import StopStrings
from dspark.runtime.target import Cache, Target


class SpeculativeDecoder:
    """A target and a drafter that reads its taps. Holds no state between requests.

    Raises UserError if the target cannot deliver the drafter's taps.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        check_taps(target, drafter)
        self.target = target
        self.drafter = drafter
        self._head = DraftHead(target, drafter.draft_ids)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        draft_length: int | None = None,
        policy: Policy | None = None,
        method: Method = "token",
        relaxed: Relaxed | None = None,
        rules: Rules | None = None,
        stop: StopStrings | None = None,
        end_token_ids: Collection[int] | None = None,
        seed: int = 0,
        on_tokens: TokenCallback | None = None,
        on_round: RoundCallback | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache: PrefixCache | None = None,
    ) -> Generation:
        """Generate up to `max_new_tokens` tokens, distributed exactly as the target's own.

        At temperature 0 and in float32 they equal plain decoding token for token; at other
        temperatures the law is the same, the sample for a given seed is not. `relaxed` alone gives
        that up.

        Args:
            draft_length: The same number of tokens every round; or
            policy: how many, decided round by round; starts anew with every request. Neither: the
                drafter's whole block.
            method: "token" or "block", see `dspark.runtime.verify`.
            end_token_ids: Replace the target's.
            on_tokens, on_round: Get the first token, then those of each round.
            prefix_cache: Made for this target and drafter: what it holds of the prompt is not read
                again, and the prompt leaves states in it.

        Raises UserError for a wrong request and BadLogits for non-finite logits, which name the
        place in the text.
        """
        request = Request(
            prompt_ids, max_new_tokens, rules, stop, end_token_ids, seed, 0, on_tokens, on_round
        )
        text = Text(self.target, request)
        rounds = self._rounds(sampling, draft_length, policy, method, relaxed)
        device = self.target.device
        start = clock(device)
        seats = begin(rounds, text, prefill_chunk, prefix_cache)
        decode_start = clock(device)
        while not text.finished:
            rounds.run(seats)
        if text.fault is not None:
            raise text.fault
        return text.generation(decode_start - start, clock(device) - decode_start)

    @torch.inference_mode()
    def generate_many(
        self,
        requests: Sequence[Request],
        *,
        sampling: SamplingParams,
        batch: int = 8,
        draft_length: int | None = None,
        policy: Policy | None = None,
        method: Method = "token",
        relaxed: Relaxed | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache: PrefixCache | None = None,
    ) -> list[Generation]:
        """`generate` for many requests, at most `batch` at a time; the results in their order.

        A request's text is that of `generate` with its seed (index 0), and does not depend on the
        other requests; see `dspark.runtime.many` for the policies that are an exception. Times in
        its records are those of the rounds it took part in, which it shared with others.

        Logits that are not finite end their own request, whose `finish` is "fault" and whose
        `fault` names the request and the place in its text. Raises UserError for wrong requests,
        before any of them starts.
        """
        rounds = self._rounds(sampling, draft_length, policy, method, relaxed)
        texts = [Text(self.target, request) for request in requests]

        def read(text: Text) -> Seats:
            return begin(rounds, text, prefill_chunk, prefix_cache)

        return Many(rounds, texts, batch, read).run()

    def _rounds(
        self,
        sampling: SamplingParams,
        draft_length: int | None,
        policy: Policy | None,
        method: Method,
        relaxed: Relaxed | None,
    ) -> Rounds:
        if draft_length is not None:
            if policy is not None:
                raise UserError(
                    "draft_length: given beside a policy, which decides it; give one of them"
                )
            check_draft_length(self.drafter, draft_length)
        chosen = Fixed(draft_length) if policy is None else policy.fresh()
        return Rounds(self.target, self.drafter, self._head, sampling, chosen, method, relaxed)


def check_taps(target: Target, drafter: Drafter) -> None:
    """Raise UserError unless the target can deliver the drafter's taps."""
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


def begin(
    rounds: Rounds,
    text: Text,
    chunk: int,
    prefix_cache: PrefixCache | None = None,
    places: tuple[Cache, Any] | None = None,
) -> Seats:
    """Read one prompt and emit its first token: a batch of one, in `places` if they are given."""
    target, drafter, request = rounds.target, rounds.drafter, text.request
    if places is None:
        cache = target.new_cache(1, request.max_length + rounds.sibling_rows)
        context = drafter.new_context(1, request.max_length)
    else:
        cache, context = places
    prefix = None
    if prefix_cache is not None:
        prefix_cache.check(target, drafter)
        prefix = prefix_cache.open(request.prompt_ids, cache, context)
    anchor = prefill(
        target,
        cache,
        request.prompt_ids,
        rounds.sampling,
        text.judge_draws,
        taps=drafter.taps,
        on_taps=lambda features: drafter.extend(context, features),
        rules=text.rules,
        chunk=chunk,
        prefix=prefix,
    )
    text.first(int(anchor))
    return Seats(cache, context, anchor, [text])
