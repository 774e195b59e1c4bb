"""Every acceptance number, defined once, as pure functions over round records.

Letters, per round: k drafted tokens put before the target (`verified`), a accepted (the leading
run the user receives, 0 <= a <= k), e emitted tokens (`emitted`): a + 1 with the bonus or
correction token, or a when the answer ends inside the accepted run. R rounds in all. The first
token of an answer comes from prefill and belongs to no round: sum e + 1 = tokens of the answer.

All figures are pooled: sums over every round of every prompt, then one division. The mean of
per-prompt means weighs short answers more and is not what the DSpark paper prints. A figure that
has nothing to divide by is None ("not measured"), never 0.

Papers: Leviathan et al. 2023 (acceptance, speed-up), Sun et al. 2024 (block efficiency), the DSpark
paper (accepted length, conditional acceptance). Beside this file, one definition each:

    intervals      n, spread and interval of every mean, two drafters in pairs
    profiles       by context length, by entropy
    sweeps         by confidence threshold; goodput by concurrency
    outcomes       levels and bands: how rounds ended, what became of positions
    confidence     reliability, ECE and AUC, of survival and of each position
    speed          tokens per second, speed-up against plain decoding, break-even
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dspark.loops import is_loop
from dspark.runtime.records import Generation, RoundRecord
from dspark_eval.intervals import MIN_PROMPTS as MIN_PROMPTS
from dspark_eval.intervals import Estimate, Interval, Paired, estimate, paired, share_of
from dspark_eval.intervals import bootstrap_ci95 as bootstrap_ci95
from dspark_eval.intervals import ratio_ci95 as ratio_ci95
from dspark_eval.intervals import sample_size_warnings as sample_size_warnings

Rounds = Sequence[RoundRecord]


def pool(rounds_by_prompt: Iterable[Rounds]) -> list[RoundRecord]:
    """All rounds of all prompts in one list."""
    return [record for rounds in rounds_by_prompt for record in rounds]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


# ------------------------------------------------------------------ figures over pooled rounds


Counts = tuple[float, float]

FIGURES: dict[str, Callable[[Rounds], Counts]] = {
    "accepted_length": lambda rounds: (sum(r.emitted for r in rounds), len(rounds)),
    "accepted_length_without_bonus": lambda rounds: (
        sum(r.accepted + r.sibling for r in rounds),
        len(rounds),
    ),
    "acceptance_rate": lambda rounds: (
        sum(r.accepted for r in rounds),
        sum(r.verified for r in rounds),
    ),
    "acceptance_rate_with_bonus": lambda rounds: (
        sum(r.emitted for r in rounds),
        sum(r.verified + 1 for r in rounds),
    ),
    "draft_length_mean": lambda rounds: (sum(r.verified for r in rounds), len(rounds)),
    "rows_per_round": lambda rounds: (sum(r.target_rows for r in rounds), len(rounds)),
    "sibling_rate": lambda rounds: (sum(r.sibling for r in rounds), len(rounds)),
    "draft_share": lambda rounds: (
        sum(r.draft_s for r in rounds),
        sum(r.draft_s + r.verify_s + r.other_s for r in rounds),
    ),
}
"""Numerator and denominator of each figure, of one prompt's rounds or of all."""

SHARES = ("acceptance_rate", "sibling_rate", "loop_share", "finished_share")
"""Counts out of counts, whose interval is `intervals.share_of`'s."""


def accepted_length(rounds: Rounds) -> float | None:
    """tau = sum e / R, tokens committed per round with the bonus or correction token.

    Printed as accepted length by the DSpark paper, DeepSpec (`accept_len`) and SGLang, and as
    "mean acceptance length" by vLLM.
    """
    return _ratio(*FIGURES["accepted_length"](rounds))


def accepted_length_without_bonus(rounds: Rounds) -> float | None:
    """Draft tokens that the user receives per round, sum a / R, an accepted sibling among them.

    tau less one, but for rounds that an accepted end token closed: those have no bonus. vLLM's
    accepted tokens over drafts.
    """
    return _ratio(*FIGURES["accepted_length_without_bonus"](rounds))


def acceptance_rate(rounds: Rounds) -> float | None:
    """sum a / sum k, accepted over verified draft tokens; vLLM, llama.cpp, dspark-mlx print it."""
    return _ratio(*FIGURES["acceptance_rate"](rounds))


def acceptance_rate_with_bonus(rounds: Rounds) -> float | None:
    """sum e / (sum k + R), the bonus token on both sides. The paper and DeepSpec print it."""
    return _ratio(*FIGURES["acceptance_rate_with_bonus"](rounds))


def sibling_rate(rounds: Rounds) -> float | None:
    """Rounds that an accepted sibling ended, over all rounds. `acceptance_rate` counts none."""
    return _ratio(*FIGURES["sibling_rate"](rounds))


def rows_per_round(rounds: Rounds) -> float | None:
    """Rows of a verify pass: anchor, primaries, siblings, and padding where there was any. It is
    what a pass costs; `draft_length_mean` counts what of it was judged."""
    return _ratio(*FIGURES["rows_per_round"](rounds))


def draft_length_mean(rounds: Rounds) -> float | None:
    """sum k / R, draft tokens that were judged per round. What stands behind an accepted end token
    is not judged and not counted, though its rows went through the target."""
    return _ratio(*FIGURES["draft_length_mean"](rounds))


def draft_share(rounds: Rounds) -> float | None:
    """Seconds of drafting (feeding the drafter's context included) over all seconds of rounds."""
    return _ratio(*FIGURES["draft_share"](rounds))


def block_efficiency(generations: Sequence[Generation]) -> float | None:
    """Tokens per serial pass of the target, (sum e + 1) / (R + 1), prefill being one pass.

    Sun et al. 2024 and SpecTr (2023) print it. Below tau, towards which it grows with the length of
    the answers.
    """
    counts = [_passes(g) for g in generations]
    return _ratio(sum(tokens for tokens, _ in counts), sum(passes for _, passes in counts))


def _passes(generation: Generation) -> Counts:
    return len(generation.tokens), 1 + len(generation.rounds)


def _conditional(rounds: Rounds, j: int) -> Counts:
    reached = [r for r in rounds if r.accepted >= j - 1 and r.verified >= j]
    return sum(r.accepted >= j for r in reached), len(reached)


def _survived(rounds: Rounds, j: int) -> Counts:
    return sum(r.accepted >= j for r in rounds), sum(r.verified >= j for r in rounds)


def conditional_acceptance(rounds: Rounds) -> list[float | None]:
    """C_j = #(a >= j) / #(a >= j - 1 and k >= j) for j = 1..max k: the paper's Fig. 2.

    The probability that position j is accepted once all before it were. None where no round got
    that far.
    """
    return [_ratio(*_conditional(rounds, j)) for j in range(1, _longest(rounds) + 1)]


def prefix_survival(rounds: Rounds) -> list[float | None]:
    """S_j = #(a >= j) / #(k >= j) for j = 1..max k: DeepSpec's `accept_rate@j`, vLLM's rates.

    When every round verifies the same k and none ends early, tau = 1 + sum_j S_j.
    """
    return [_ratio(*_survived(rounds, j)) for j in range(1, _longest(rounds) + 1)]


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


def accepted_length_ci95(rounds_by_prompt: Sequence[Rounds], *, seed: int = 0) -> Interval | None:
    """95 % interval of tau over prompts."""
    emitted = [sum(r.emitted for r in rounds) for rounds in rounds_by_prompt]
    return ratio_ci95(emitted, [len(rounds) for rounds in rounds_by_prompt], seed=seed)


def estimates(by_prompt: Sequence[Sequence[Generation]], *, seed: int = 0) -> dict[str, Estimate]:
    """Every figure of this file with n, spread over prompts and interval; the answers by prompt."""
    rounds = [pool(g.rounds for g in answers) for answers in by_prompt]
    counts = {name: [of(held) for held in rounds] for name, of in FIGURES.items()}
    answers = [list(answers) for answers in by_prompt]
    counts["block_efficiency"] = [_sums(map(_passes, held)) for held in answers]
    counts["loop_share"] = [(sum(is_loop(g.tokens) for g in held), len(held)) for held in answers]
    counts["finished_share"] = [
        (sum(g.finish == "end" for g in held), len(held)) for held in answers
    ]
    counts["accepted_length_without_loops"] = [
        FIGURES["accepted_length"](pool(g.rounds for g in held if not is_loop(g.tokens)))
        for held in answers
    ]
    return {
        name: _estimate(pairs, seed, share_of if name in SHARES else estimate)
        for name, pairs in counts.items()
    }


def _sums(counts: Iterable[Counts]) -> Counts:
    pairs = list(counts)
    return sum(top for top, _ in pairs), sum(bottom for _, bottom in pairs)


def _estimate(
    counts: Sequence[Counts], seed: int, how: Callable[..., Estimate] = estimate
) -> Estimate:
    return how([top for top, _ in counts], [bottom for _, bottom in counts], seed=seed)


def position_estimates(
    rounds_by_prompt: Sequence[Rounds], *, seed: int = 0
) -> dict[str, list[Estimate]]:
    """`conditional_acceptance` and `prefix_survival` by position, each with its n and interval."""
    longest = _longest(pool(rounds_by_prompt))
    found: dict[str, list[Estimate]] = {}
    for name, of in (("conditional_acceptance", _conditional), ("prefix_survival", _survived)):
        found[name] = [
            _estimate([of(rounds, j) for rounds in rounds_by_prompt], seed, share_of)
            for j in range(1, longest + 1)
        ]
    return found


def compare(
    ours: Sequence[Rounds], theirs: Sequence[Rounds], figure: str = "accepted_length", seed: int = 0
) -> Paired:
    """One of `FIGURES` of two drafters on the same prompts, in pairs."""
    of = FIGURES[figure]
    return paired([of(rounds) for rounds in ours], [of(rounds) for rounds in theirs], seed=seed)


# ------------------------------------------------------------------ loops


def loop_share(answers: Sequence[Sequence[int]]) -> float | None:
    """Share of answers that loop. A loop is easy to draft and inflates accepted length."""
    return _ratio(sum(is_loop(tokens) for tokens in answers), len(answers))


def accepted_length_without_loops(generations: Sequence[Generation]) -> float | None:
    """tau over the answers that do not loop."""
    return accepted_length(pool(g.rounds for g in generations if not is_loop(g.tokens)))


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
