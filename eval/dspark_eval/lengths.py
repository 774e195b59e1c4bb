"""What makes a measured number mean less than it seems: nothing drafted, or texts too long.

A drafter that proposes nothing decodes at plain speed under another name. Beyond the rows that it
was trained on, what it learnt of positions and of far states ends, and acceptance may fall without
any error; a mean over short and long texts hides it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.errors import UserError
from dspark.runtime.prefill import too_long_note
from dspark.wording import counted
from dspark_eval import profiles
from dspark_eval.pair import Pair
from dspark_eval.speed import PromptTimings


def require_proposals(timings: Sequence[PromptTimings], drafter: str) -> None:
    """Raises UserError if no round was run, or none of them drafted a token."""
    if not any(timing.rounds for timing in timings):
        raise UserError("no round was measured: every answer ended with its first token")
    if not any(record.drafted for timing in timings for record in timing.rounds):
        raise UserError(
            f"{drafter}: the drafter never proposed a token, so there is no speed to report; "
            "with more --max-new-tokens there is room for a draft"
        )


def long_contexts(pair: Pair, timings: Sequence[PromptTimings]) -> list[str]:
    """A sentence if some texts are beyond what the target claims to read, and one if some rounds
    stood beyond the drafter's training length, with both figures."""
    longest = max(
        (
            length + len(answer.tokens)
            for timing in timings
            for length, answer in zip(timing.prompt_lengths, timing.speculative, strict=True)
        ),
        default=0,
    )
    beyond = too_long_note(pair.target, longest)
    return [*([beyond] if beyond else []), *_beyond_training(pair, timings)]


def _beyond_training(pair: Pair, timings: Sequence[PromptTimings]) -> list[str]:
    trained_on = pair.drafter.config.target
    limit = trained_on.row_length if trained_on else None
    if limit is None:
        return []
    lengths = [length for timing in timings for length in timing.prompt_lengths]
    rounds = [answer.rounds for timing in timings for answer in timing.speculative]
    buckets = {b.low: b for b in profiles.context_buckets(lengths, rounds, (limit,))}
    if limit not in buckets:
        return []
    total = sum(bucket.rounds for bucket in buckets.values())
    within = f", {buckets[0].accepted_length:.2f} within" if 0 in buckets else ""
    return [
        f"{buckets[limit].rounds} of {counted(total, 'round')} stand beyond the {limit} tokens "
        "that the "
        f"drafter was trained on: accepted length {buckets[limit].accepted_length:.2f} there"
        f"{within}"
    ]
