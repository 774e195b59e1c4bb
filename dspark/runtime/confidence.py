"""What a drafter's confidence said in real rounds, and what became of them.

    logit_k = log(c_k / (1 - c_k))       c_k the raw confidence on record, a float32 sigmoid

Rounds are those of the decode loop itself, so that context, sampled tokens and cuts are the ones
that a policy will meet; teacher forcing would show none of them. Near 1 a float32 sigmoid has steps
of 6e-8, which moves a logit of 10 by 1e-3 and caps it at 16: no temperature would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dspark.draft.reliability import ConfidenceRounds
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.proposal import Drafter
from dspark.runtime.records import RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target

_SMALLEST, _LARGEST = 1e-7, 1 - 2.0**-24


@contextmanager
def raw_confidence(drafter: Drafter) -> Iterator[None]:
    """Inside, the drafter reports its head's sigmoid, whatever calibration it carries."""
    calibration = drafter.calibration
    drafter.calibration = None
    try:
        yield
    finally:
        drafter.calibration = calibration


def collect_rounds(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    seed: int,
    numbers: Sequence[int] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> ConfidenceRounds:
    """Decode the prompts with whole blocks and keep the raw confidence of every round.

    Args:
        prompts: Token ids, none of which the drafter was trained on.
        seed: Of the run; prompt i draws with `seed + numbers[i]`.
        numbers: What the prompts are called in the result; 0, 1, ... if left out.
        advance: Called after each prompt.

    Raises ValueError for a drafter without a confidence head.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    by_prompt = collect_records(
        target,
        drafter,
        prompts,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        numbers=numbers,
        advance=advance,
    )
    return confidence_rounds(by_prompt, drafter.config.block_size, numbers)


def collect_records(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    seed: int,
    numbers: Sequence[int],
    advance: Callable[[], None] = lambda: None,
) -> list[list[RoundRecord]]:
    """The records behind `collect_rounds`, by prompt; their confidence is the head's own."""
    if drafter.confidence_head is None:
        raise ValueError("the drafter has no confidence head")
    decoder = SpeculativeDecoder(target, drafter)
    by_prompt = []
    with raw_confidence(drafter):
        for number, prompt in zip(numbers, prompts, strict=True):
            generation = decoder.generate(
                prompt,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                draft_length=drafter.config.block_size,
                seed=seed + number,
            )
            by_prompt.append(generation.rounds)
            advance()
    return by_prompt


def confidence_rounds(
    by_prompt: Sequence[Sequence[RoundRecord]],
    block_size: int,
    numbers: Sequence[int] | None = None,
) -> ConfidenceRounds:
    """The records of each prompt as arrays. Rounds that drafted nothing say nothing: left out."""
    numbers = range(len(by_prompt)) if numbers is None else numbers
    kept = [
        (number, record)
        for number, rounds in zip(numbers, by_prompt, strict=True)
        for record in rounds
        if record.confidence
    ]
    confidence = np.full((len(kept), block_size), np.nan)
    for row, (_, record) in enumerate(kept):
        confidence[row, : len(record.confidence)] = record.confidence
    confidence = confidence.clip(_SMALLEST, _LARGEST)
    return ConfidenceRounds(
        np.log(confidence) - np.log1p(-confidence),
        np.array([record.accepted for _, record in kept], dtype=np.int64),
        np.array([record.verified for _, record in kept], dtype=np.int64),
        np.array([number for number, _ in kept], dtype=np.int64),
    )
