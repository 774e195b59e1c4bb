"""Every acceptance number, defined once, as pure functions over round records.

Letters, per round: k drafted tokens put before the target (`verified`), a accepted (the leading
run the user receives, 0 <= a <= k), e emitted tokens (`emitted`): a + 1 with the bonus or
correction token, or a when the answer ends inside the accepted run. R rounds in all. The first
token of an answer comes from prefill and belongs to no round: sum e + 1 = tokens of the answer.

All figures are pooled: sums over every round of every prompt, then one division. The mean of
per-prompt means weighs short answers more and is not what the DSpark paper prints. Rounds of one
prompt resemble each other, so intervals resample prompts, never rounds.

A figure that has nothing to divide by is None ("not measured"), never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.loops import is_loop
from dspark.runtime.records import Generation, RoundRecord

MIN_PROMPTS = 30
CONTEXT_EDGES = (128, 512, 2048, 8192, 32768)  # tokens; 2k, 8k and 32k are the usual buckets
BOOTSTRAP_RESAMPLES = 2000

Rounds = Sequence[RoundRecord]
Interval = tuple[float, float]


def pool(rounds_by_prompt: Iterable[Rounds]) -> list[RoundRecord]:
    """All rounds of all prompts in one list."""
    return [record for rounds in rounds_by_prompt for record in rounds]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


# ------------------------------------------------------------------ figures over pooled rounds


def accepted_length(rounds: Rounds) -> float | None:
    """tau = sum e / R, tokens committed per round with the bonus or correction token.

    Printed as accepted length by the DSpark paper, DeepSpec (`accept_len`) and SGLang, and as
    "mean acceptance length" by vLLM.
    """
    return _ratio(sum(r.emitted for r in rounds), len(rounds))


def acceptance_rate(rounds: Rounds) -> float | None:
    """sum a / sum k, accepted over verified draft tokens; vLLM, llama.cpp, dspark-mlx print it."""
    return _ratio(sum(r.accepted for r in rounds), sum(r.verified for r in rounds))


def acceptance_rate_with_bonus(rounds: Rounds) -> float | None:
    """sum e / (sum k + R), the bonus token on both sides. The paper and DeepSpec print it."""
    return _ratio(sum(r.emitted for r in rounds), sum(r.verified + 1 for r in rounds))


def sibling_rate(rounds: Rounds) -> float | None:
    """Rounds that an accepted sibling ended, over all rounds. `acceptance_rate` counts none."""
    return _ratio(sum(r.sibling for r in rounds), len(rounds))


def rows_per_round(rounds: Rounds) -> float | None:
    """Rows of a verify pass: anchor, primaries, siblings, and padding where there was any."""
    return _ratio(sum(r.target_rows for r in rounds), len(rounds))


def draft_length_mean(rounds: Rounds) -> float | None:
    """sum k / R, draft tokens put before the target per round."""
    return _ratio(sum(r.verified for r in rounds), len(rounds))


def conditional_acceptance(rounds: Rounds) -> list[float | None]:
    """C_j = #(a >= j) / #(a >= j - 1 and k >= j) for j = 1..max k: the paper's Fig. 2.

    The probability that position j is accepted once all before it were. None where no round got
    that far.
    """
    return [
        _ratio(
            sum(r.accepted >= j for r in rounds),
            sum(r.accepted >= j - 1 and r.verified >= j for r in rounds),
        )
        for j in range(1, _longest(rounds) + 1)
    ]


def prefix_survival(rounds: Rounds) -> list[float | None]:
    """S_j = #(a >= j) / #(k >= j) for j = 1..max k: DeepSpec's `accept_rate@j`, vLLM's rates.

    When every round verifies the same k and none ends early, tau = 1 + sum_j S_j.
    """
    return [
        _ratio(sum(r.accepted >= j for r in rounds), sum(r.verified >= j for r in rounds))
        for j in range(1, _longest(rounds) + 1)
    ]


def _longest(rounds: Rounds) -> int:
    return max((r.verified for r in rounds), default=0)


def round_times_ms(rounds: Rounds) -> dict[str, float | None]:
    """Mean draft, verify and other milliseconds per round, and the p50 and p99 of their sum.

    A round is a frame as long as rounds run one after the other, so the percentiles are reported
    as frame times. `other` is what remains: acceptance, commit, the context of the drafter.
    """
    names = ("draft_ms", "verify_ms", "other_ms", "frame_ms_p50", "frame_ms_p99")
    if not rounds:
        return dict.fromkeys(names)
    times = 1e3 * np.array([(r.draft_s, r.verify_s, r.other_s) for r in rounds])
    frames = np.percentile(times.sum(axis=1), (50, 99))
    return dict(zip(names, (float(value) for value in (*times.mean(axis=0), *frames)), strict=True))


# ------------------------------------------------------------------ figures over prompts


def accepted_length_percentiles(rounds_by_prompt: Sequence[Rounds]) -> dict[str, float | None]:
    """p10, p50 and p90 over prompts of each prompt's own tau; prompts without a round left out."""
    each = [sum(r.emitted for r in rounds) / len(rounds) for rounds in rounds_by_prompt if rounds]
    if not each:
        return dict.fromkeys(("p10", "p50", "p90"))
    low, middle, high = np.percentile(each, (10, 50, 90))
    return {"p10": float(low), "p50": float(middle), "p90": float(high)}


def bootstrap_ci95(
    per_prompt: np.ndarray | Sequence[Sequence[float]],
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    seed: int = 0,
    resamples: int = BOOTSTRAP_RESAMPLES,
) -> Interval | None:
    """95 % percentile interval of a statistic of sums, resampling prompts with replacement.

    per_prompt: n rows of c sums (tokens, seconds, ...). statistic maps the c columns [c, B] of
    resampled sums to B values. Drawing n prompts with replacement is drawing how often each one
    counts, so one multinomial matrix [B, n] times the rows [n, c] gives every resample at once.
    None below two prompts: one prompt says nothing about the next.
    """
    rows = np.asarray(per_prompt, dtype=np.float64)
    if len(rows) < 2:
        return None
    n = len(rows)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic((counts @ rows).T)
    values = values[np.isfinite(values)]
    if values.size == 0:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def ratio_ci95(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> Interval | None:
    """95 % interval of sum numerators / sum denominators, one pair for each prompt."""
    pairs = list(zip(numerators, denominators, strict=True))
    return bootstrap_ci95(pairs, lambda sums: sums[0] / sums[1], seed=seed)


def accepted_length_ci95(rounds_by_prompt: Sequence[Rounds], *, seed: int = 0) -> Interval | None:
    """95 % interval of tau over prompts."""
    emitted = [sum(r.emitted for r in rounds) for rounds in rounds_by_prompt]
    return ratio_ci95(emitted, [len(rounds) for rounds in rounds_by_prompt], seed=seed)


def sample_size_warnings(n_prompts: int) -> list[str]:
    """A sentence to print when there are too few prompts for the figures to mean much."""
    if n_prompts >= MIN_PROMPTS:
        return []
    return [
        f"few prompts ({n_prompts}): below {MIN_PROMPTS} the topic of the prompts moves accepted "
        "length more than the drafter does"
    ]


# ------------------------------------------------------------------ loops and context length


def loop_share(answers: Sequence[Sequence[int]]) -> float | None:
    """Share of answers that loop. A loop is easy to draft and inflates accepted length."""
    return _ratio(sum(is_loop(tokens) for tokens in answers), len(answers))


def accepted_length_without_loops(generations: Sequence[Generation]) -> float | None:
    """tau over the answers that do not loop."""
    return accepted_length(pool(g.rounds for g in generations if not is_loop(g.tokens)))


@dataclass(frozen=True)
class ContextBucket:
    """Rounds whose context length at the anchor lies in [low, high) tokens; high None = no end."""

    low: int
    high: int | None
    rounds: int
    accepted_length: float | None
    acceptance_rate: float | None


def context_buckets(
    prompt_lengths: Sequence[int],
    rounds_by_prompt: Sequence[Rounds],
    edges: Sequence[int] = CONTEXT_EDGES,
) -> list[ContextBucket]:
    """tau by context length: the tokens in front of a round's anchor. Empty buckets left out."""
    held: list[list[RoundRecord]] = [[] for _ in range(len(edges) + 1)]
    for length, rounds in zip(prompt_lengths, rounds_by_prompt, strict=True):
        context = length  # the first anchor is the first token of the answer
        for record in rounds:
            held[int(np.searchsorted(edges, context, side="right"))].append(record)
            context += record.emitted
    return [
        ContextBucket(low, high, len(rounds), accepted_length(rounds), acceptance_rate(rounds))
        for low, high, rounds in zip((0, *edges), (*edges, None), held, strict=True)
        if rounds
    ]


# ------------------------------------------------------------------ the records themselves


def check_generation(generation: Generation) -> None:
    """Hold a speculative answer to the definitions above.

    Raises ValueError when the rounds do not add up to the tokens the user receives, which is how
    overstated acceptance starts (tokens after an end token, matches after a rejection).
    """
    for index, r in enumerate(generation.rounds):
        own = r.emitted - r.accepted  # of the target, and the sibling before it
        if not (0 <= r.accepted <= r.verified <= r.drafted and 0 <= own <= 1 + r.sibling):
            raise ValueError(
                f"round {index}: drafted {r.drafted}, verified {r.verified}, accepted "
                f"{r.accepted}, emitted {r.emitted} cannot all be true"
            )
    counted = sum(r.emitted for r in generation.rounds)
    if counted != max(len(generation.tokens) - 1, 0):
        raise ValueError(
            f"rounds emitted {counted} tokens after the first, the answer has "
            f"{len(generation.tokens)} in all"
        )
