"""What recorded rounds would have given: cut by a confidence threshold, or in a full batch.

A whole block tells for every shorter cut L what the target would have answered: L + 1 tokens where
L < a, else what the round gave. Exact for the round, because what is cut behind L changes nothing
before it; a model of a run, since after a cut the next block would have started elsewhere. Rounds
that tried siblings, or that a policy had cut already, do not tell: only whole chains count. Nor do
rounds of block verification, whose verdict on a position depends on where the block ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dspark.runtime.cost_model import CostModel
from dspark.runtime.records import RoundRecord
from dspark_eval.intervals import Estimate, Interval, estimate, share_of
from dspark_eval.metrics import FIGURES, Rounds, acceptance_rate_with_bonus, pool

THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(10))
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)


# ------------------------------------------------------------------ confidence thresholds


@dataclass(frozen=True)
class Threshold:
    """What the recorded rounds would have given, cut before the first c_k below `threshold`."""

    threshold: float
    draft_length: float
    accepted_length: float
    acceptance_rate: float | None
    acceptance_rate_with_bonus: float | None
    rounds: int
    n_prompts: int
    accepted_length_ci95: Interval | None
    acceptance_rate_ci95: Interval | None
    few: bool


def threshold_curve(
    by_prompt: Sequence[Rounds], thresholds: Sequence[float] = THRESHOLDS
) -> list[Threshold] | None:
    """Tokens per round by confidence threshold: the DSpark paper's Fig. 5.

    L is the run of leading c_k >= threshold. Threshold 0 is the run itself. None without a
    confidence head, or without a whole chain.
    """
    whole = [[r for r in rounds if r.confidence and _is_whole(r)] for rounds in by_prompt]
    if not any(whole):
        return None
    return [_at_threshold(whole, threshold) for threshold in thresholds]


def _is_whole(record: RoundRecord) -> bool:
    """Whether all that was drafted was judged: verified, or cut by an accepted end token."""
    ended = record.emitted == record.accepted == record.verified
    chain = record.target_rows == record.drafted + 1
    return chain and (record.verified == record.drafted or ended)


def _at_threshold(by_prompt: Sequence[Rounds], threshold: float) -> Threshold:
    held = [[_cut(record, threshold) for record in rounds] for rounds in by_prompt]
    length = estimate([sum(r.emitted for r in own) for own in held], [len(own) for own in held])
    rate = share_of(*zip(*map(FIGURES["acceptance_rate"], held), strict=True))
    cut = pool(held)
    assert length.value is not None
    return Threshold(
        threshold,
        sum(r.verified for r in cut) / len(cut),
        length.value,
        rate.value,
        acceptance_rate_with_bonus(cut),
        len(cut),
        length.n_prompts,
        length.ci95,
        rate.ci95,
        length.few,
    )


def _cut(record: RoundRecord, threshold: float) -> RoundRecord:
    below = (k for k, c in enumerate(record.confidence) if c < threshold)
    length = min(next(below, record.drafted), record.drafted)
    emitted = length + 1 if length < record.accepted else record.emitted
    return replace(
        record,
        verified=min(length, record.verified),
        accepted=min(length, record.accepted),
        emitted=emitted,
    )


# ------------------------------------------------------------------ concurrency


@dataclass(frozen=True)
class Goodput:
    """Tokens per second that users receive, of `concurrency` requests decoded in one batch.

    plain and speculative are totals; the same per user is the total over `concurrency`. `speedup`
    below 1: at this concurrency plain decoding is faster. `draft_length`: the length that the
    figure is for. The interval of the speed-up is that of tau(L) over prompts, step times and L
    taken as known.
    """

    concurrency: int
    plain: float
    speculative: float
    speedup: float
    draft_length: int
    measured_times: bool
    rounds: int
    n_prompts: int
    speedup_ci95: Interval | None
    few: bool


def goodput(
    by_prompt: Sequence[Rounds], cost: CostModel, concurrency: Sequence[int] = CONCURRENCY
) -> list[Goodput]:
    """Goodput against concurrency, from accepted length and a measured step-time curve.

        plain(B)       = B / t_plain(B)
        speculative(B) = max_L B tau(L) / t_round(L, 1 + L, B)

    Goodput counts the tokens that users keep (Liu et al. 2024, "Optimizing speculative decoding for
    serving large language models using goodput"; throughput against concurrency is the DSpark
    paper's Fig. 7). tau(L) is that of the recorded whole blocks cut at L, and L the best constant
    length at that concurrency: a full batch wants short drafts. Only between the smallest and the
    largest batch of the curve; `measured_times`: the batch is one of the curve's own, else its
    times are interpolated. Empty if no round verified a block.
    """
    whole = [[r for r in rounds if r.drafted and _is_whole(r)] for rounds in by_prompt]
    longest = max((r.drafted for r in pool(whole)), default=0)
    whole = [[r for r in rounds if r.drafted == longest] for rounds in whole]
    lengths = {length: _tau(whole, length) for length in range(1, longest + 1)}
    sizes = [costs.batch for costs in cost.batches]
    found = []
    for batch in (b for b in concurrency if lengths and min(sizes) <= b <= max(sizes)):
        plain = batch / cost.plain_s(batch)
        # tokens per second for each token that a round gives
        paces = {g: batch / cost.round_s(g, 1 + g, batch) for g in lengths}
        best = max(paces, key=lambda g: paces[g] * (lengths[g].value or 0))
        tau, faster = lengths[best], paces[best] / plain
        assert tau.value is not None
        bounds = tau.ci95 and (faster * tau.ci95[0], faster * tau.ci95[1])
        found.append(
            Goodput(
                batch, plain, paces[best] * tau.value, faster * tau.value, best, batch in sizes,
                int(tau.n), tau.n_prompts, bounds, tau.few,
            )
        )  # fmt: skip
    return found


def _tau(by_prompt: Sequence[Rounds], length: int) -> Estimate:
    """Accepted length of whole blocks, each cut after `length` tokens."""
    return estimate(
        [sum(length + 1 if length < r.accepted else r.emitted for r in own) for own in by_prompt],
        [len(own) for own in by_prompt],
    )
