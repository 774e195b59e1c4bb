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
from dspark_eval.metrics import (
    Rounds,
    acceptance_rate,
    acceptance_rate_with_bonus,
    accepted_length,
)

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


def threshold_curve(
    rounds: Rounds, thresholds: Sequence[float] = THRESHOLDS
) -> list[Threshold] | None:
    """Tokens per round by confidence threshold: the DSpark paper's Fig. 5.

    L is the run of leading c_k >= threshold. Threshold 0 is the run itself. None without a
    confidence head, or without a whole chain.
    """
    whole = [r for r in rounds if r.confidence and _is_whole(r)]
    if not whole:
        return None
    return [_at_threshold(whole, threshold) for threshold in thresholds]


def _is_whole(record: RoundRecord) -> bool:
    """Whether all that was drafted was judged: verified, or cut by an accepted end token."""
    ended = record.emitted == record.accepted == record.verified
    chain = record.target_rows == record.drafted + 1
    return chain and (record.verified == record.drafted or ended)


def _at_threshold(rounds: Rounds, threshold: float) -> Threshold:
    cut = [_cut(record, threshold) for record in rounds]
    length, rate = accepted_length(cut), acceptance_rate(cut)
    assert length is not None
    return Threshold(
        threshold,
        sum(r.verified for r in cut) / len(cut),
        length,
        rate,
        acceptance_rate_with_bonus(cut),
        len(cut),
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
    figure is for.
    """

    concurrency: int
    plain: float
    speculative: float
    speedup: float
    draft_length: int
    measured_times: bool


def goodput(
    rounds: Rounds, cost: CostModel, concurrency: Sequence[int] = CONCURRENCY
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
    whole = [r for r in rounds if r.drafted and _is_whole(r)]
    longest = max((r.drafted for r in whole), default=0)
    whole = [r for r in whole if r.drafted == longest]
    lengths = {length: _tau(whole, length) for length in range(1, longest + 1)}
    sizes = [costs.batch for costs in cost.batches]
    found = []
    for batch in (b for b in concurrency if lengths and min(sizes) <= b <= max(sizes)):
        plain = batch / cost.plain_s(batch)
        rates = {g: batch * tau / cost.round_s(g, 1 + g, batch) for g, tau in lengths.items()}
        best = max(rates, key=lambda g: rates[g])
        faster = rates[best] / plain
        found.append(Goodput(batch, plain, rates[best], faster, best, batch in sizes))
    return found


def _tau(rounds: Rounds, length: int) -> float:
    """Accepted length of whole blocks, each cut after `length` tokens."""
    return sum(length + 1 if length < r.accepted else r.emitted for r in rounds) / len(rounds)
