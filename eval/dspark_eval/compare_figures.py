"""What the answers of a comparison amount to: figures in pairs, and whether they are the target's.

At temperature 0 a contender's text is held against plain decoding's, token for token, and every
token against the target's best. Above it no two texts need agree, so each text is read once more by
the target and tested for being drawn from its law (`fidelity`); plain decoding's are tested too. A
comparison of t contenders on s sets holds 2 t s tests, and raises a false alarm as rarely as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dspark.runtime.records import Generation
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval import fidelity, metrics
from dspark_eval.contenders import PLAIN, Contender
from dspark_eval.intervals import paired


def summaries(
    contenders: Sequence[Contender],
    answers: Sequence[Sequence[Generation]],
    sampling: SamplingParams,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """What each contender's answers amount to, beside the first's and beside plain decoding."""
    plain = answers[[contender.kind for contender in contenders].index(PLAIN)]
    first = [answer.rounds for answer in answers[0]]
    found = []
    for contender, own in zip(contenders, answers, strict=True):
        rounds = [answer.rounds for answer in own]
        pooled = metrics.pool(rounds)
        is_plain = contender.kind == PLAIN
        estimates = metrics.estimates([[answer] for answer in own], seed=seed)
        ratio = None
        if own is not answers[0] and not is_plain:
            ratio = asdict(metrics.compare(rounds, first, seed=seed))
        speed = paired([_pace(a) for a in own], [_pace(a) for a in plain], seed=seed)
        found.append(
            {
                "name": contender.name,
                **{key: asdict(value) for key, value in estimates.items()},
                "conditional_acceptance": metrics.conditional_acceptance(pooled),
                "positions": {
                    key: [asdict(value) for value in values]
                    for key, values in metrics.position_estimates(rounds, seed=seed).items()
                },
                "ratio": ratio,
                "speedup": None if is_plain else asdict(speed),
                "tokens_per_s": speed.ours,
                "greedy_mismatches": _mismatches(own, plain, sampling),
                **metrics.round_times_ms(pooled),
                "emitted": [sum(r.emitted for r in held) for held in rounds],
                "rounds": [len(held) for held in rounds],
            }
        )
    return found


def _pace(answer: Generation) -> tuple[float, float]:
    """Tokens after the first, and their seconds."""
    return max(len(answer.tokens) - 1, 0), answer.decode_s


def _mismatches(
    own: Sequence[Generation], plain: Sequence[Generation], sampling: SamplingParams
) -> int | None:
    """Answers that are not plain decoding's; None above temperature 0, where no two need agree."""
    if not sampling.greedy:
        return None
    return sum(a.tokens != b.tokens for a, b in zip(own, plain, strict=True))


def held_against_the_law(
    target: Target,
    prompts: Sequence[list[int]],
    answers: Sequence[Sequence[Generation]],
    sampling: SamplingParams,
    *,
    seed: int,
    sets: int,
) -> list[dict[str, Any]]:
    """`fidelity.judge` of each contender's texts; `sets` of prompts the whole comparison has."""
    return [
        fidelity.judge(
            fidelity.collect(
                target,
                [(prompt, answer.tokens) for prompt, answer in zip(prompts, own, strict=True)],
                sampling,
                seed=seed,
            ),
            sampling,
            tests=2 * len(answers) * sets,
        )
        for own in answers
    ]
