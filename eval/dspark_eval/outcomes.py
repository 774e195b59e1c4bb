"""How rounds ended, in which band their positions were, and what relaxing them cost.

    level   all accepted | sibling | corrected | cut | plain (nothing was drafted)
    band    high | mid | low, by the confidence of a position (`dspark.runtime.policies.bands`)

Bands are those of the policy where it has any; of a policy without, those that the default
thresholds would make, so that their use can be judged before they are turned on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from dspark.runtime.policies.bands import band_names
from dspark.runtime.records import ALL_ACCEPTED, CORRECTED, CUT, SIBLING, Band, RoundRecord
from dspark_eval.intervals import Estimate, share_of

LEVELS = {ALL_ACCEPTED: "all_accepted", SIBLING: "sibling", CORRECTED: "corrected", CUT: "cut"}
PLAIN = "plain"
ACCEPTED = "accepted"
FATES = (ACCEPTED, LEVELS[SIBLING], LEVELS[CORRECTED], LEVELS[CUT])
"""Of a position that was decided on."""

Rounds = Sequence[RoundRecord]


def level_name(record: RoundRecord) -> str:
    """How one round ended."""
    return LEVELS[record.level] if record.drafted else PLAIN


def level_shares(rounds: Rounds) -> dict[str, float] | None:
    """Share of rounds by outcome; they add up to 1. None without a round."""
    if not rounds:
        return None
    found = [level_name(r) for r in rounds]
    return {name: found.count(name) / len(found) for name in (*LEVELS.values(), PLAIN)}


def level_estimates(by_prompt: Sequence[Rounds]) -> dict[str, Estimate]:
    """`level_shares` of the rounds of each prompt, each with its n and interval."""
    found = [[level_name(record) for record in rounds] for rounds in by_prompt]
    return {
        name: share_of([held.count(name) for held in found], [len(held) for held in found])
        for name in (*LEVELS.values(), PLAIN)
    }


def band_table(by_prompt: Sequence[Rounds]) -> dict[str, dict[str, Any]] | None:
    """By band: `share` of drafted positions, positions `reached`, the share of those that was
    accepted (`acceptance`, with its interval over the `n_prompts` that have any), and `levels`,
    what became of the positions that were decided on.

    A position is reached if it was verified and all before it were accepted, which is what a
    confidence speaks of. It is decided on if it was reached, or if the block was cut right before
    it: then it is accepted, sibling, corrected or cut, and the four shares add up to 1. None for a
    drafter without a confidence head.
    """
    held = [_banded(rounds) for rounds in by_prompt]
    total = sum(map(len, held))
    if not total:
        return None
    table: dict[str, dict[str, Any]] = {}
    for band in get_args(Band):
        inside = [[fate for name, fate in own if name == band] for own in held]
        decided = [fate for own in inside for fate in own if fate is not None]
        judged = [len(own) - own.count(None) - own.count(LEVELS[CUT]) for own in inside]
        accepted = share_of([own.count(ACCEPTED) for own in inside], judged)
        table[band] = {
            "share": sum(map(len, inside)) / total,
            "reached": sum(judged),
            "acceptance": accepted.value,
            "acceptance_ci95": accepted.ci95,
            "n_prompts": accepted.n_prompts,
            "few": accepted.few,
            "levels": {fate: decided.count(fate) / len(decided) for fate in FATES}
            if decided
            else None,
        }
    return table


def _banded(rounds: Rounds) -> list[tuple[Band, str | None]]:
    """Band and fate of every drafted position."""
    return [
        (band, _fate(record, k))
        for record in rounds
        for k, band in enumerate(record.bands or band_names(record.confidence))
    ]


def _fate(record: RoundRecord, k: int) -> str | None:
    """What became of the drafted position k (from 0); None if nothing was decided about it."""
    if k < record.accepted:
        return ACCEPTED
    if k > record.accepted:
        return None
    if k < record.verified:
        return LEVELS[SIBLING] if record.level == SIBLING else LEVELS[CORRECTED]
    return LEVELS[CUT] if record.level == CUT else None


def distances(rounds: Rounds) -> dict[str, float] | None:
    """Total variation between what relaxed positions gave and the target, per emitted token.

    `tv_mean` over all emitted positions, 0 where nothing was relaxed; `tv_max` of one position.
    None: nothing was relaxed, the law is the target's.
    """
    values = [value for record in rounds for value in record.distance]
    if not values:
        return None
    emitted = sum(record.emitted for record in rounds)
    return {"tv_mean": sum(values) / max(emitted, 1), "tv_max": max(values)}


def relaxation(
    rounds: Rounds, exact: float | None, lossless: float | None
) -> dict[str, Any] | None:
    """What stands beside every number of a relaxed run; None for a lossless one.

    exact, lossless: share of right answers of the run, and of the target without relaxation.
    """
    found = distances(rounds)
    if found is None:
        return None
    change = None if exact is None or lossless is None else exact - lossless
    return {
        **found,
        "exact_answers": exact,
        "exact_answers_lossless": lossless,
        "accuracy_change": change,
    }
