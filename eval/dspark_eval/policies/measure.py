"""Real runs of every arm on one prompt set, and what their rounds come to.

Prompt by prompt all arms decode in turn, starting with another arm each time, plain decoding among
them, so that a machine that slows down slows all alike. Tokens per second after the first token:

    measured   by the clock of `step_times`: the thread's own time for one CPU thread, else the wall
    modelled   the same rounds on the step-time curve: sum of tokens / sum of T(drafted, rows)

The second is free of the machine's noise, and of what a round costs beside its three parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dspark.runtime.cost_model import CostModel
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import Fixed
from dspark.runtime.policies.replay import Blocks, whole_blocks
from dspark.runtime.records import Generation
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from dspark_eval.pair import Pair
from dspark_eval.policies.arms import Arm
from dspark_eval.step_times import seconds

PLAIN = "plain"


@dataclass
class Runs:
    """Answers of one arm and the seconds of decoding each, in the order of the prompts."""

    name: str
    constant: bool = False
    answers: list[Generation] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)


def collect_blocks(
    pair: Pair,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    max_new_tokens: int,
    seed: int,
    advance: Callable[[], None],
) -> Blocks:
    """Every prompt decoded with whole blocks."""
    decoder = SpeculativeDecoder(pair.target, pair.drafter)
    by_prompt = []
    for index, prompt in enumerate(prompts):
        made = decoder.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            policy=Fixed(),
            seed=seed + index,
        )
        by_prompt.append(made.rounds)
        advance()
    return whole_blocks(by_prompt, pair.drafter.config.block_size)


def run_arms(
    pair: Pair,
    prompts: Sequence[list[int]],
    arms: Sequence[Arm],
    sampling: SamplingParams,
    max_new_tokens: int,
    seed: int,
    advance: Callable[[], None],
) -> list[Runs]:
    """Plain decoding, then every arm, on every prompt; one call of `advance` for each prompt."""
    decoder = SpeculativeDecoder(pair.target, pair.drafter)
    ways: list[Callable[..., Generation]] = [
        partial(plain_generate, pair.target, max_new_tokens=max_new_tokens, sampling=sampling)
    ]
    for arm in arms:
        ways.append(
            partial(
                decoder.generate,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                policy=arm.policy,
            )
        )
    runs = [Runs(PLAIN), *(Runs(arm.name, arm.constant) for arm in arms)]
    for way in ways:
        _timed(pair, way, prompts[0], seed)  # whole answers before the clock counts
    for index, prompt in enumerate(prompts):
        for turn in range(len(ways)):
            which = (index + turn) % len(ways)
            answer, spent = _timed(pair, ways[which], prompt, seed + index)
            if which:
                metrics.check_generation(answer)
            runs[which].answers.append(answer)
            runs[which].spent.append(spent)
        advance()
    return runs


def _timed(
    pair: Pair, way: Callable[..., Generation], prompt: list[int], seed: int
) -> tuple[Generation, float]:
    """The answer, and the seconds after its first token."""
    device = pair.target.device
    marks: list[float] = []

    def mark(tokens: list[int]) -> None:
        if not marks:
            marks.append(seconds(device))

    answer = way(prompt, seed=seed, on_tokens=mark)
    return answer, seconds(device) - marks[0]


def figures(runs: Runs, plain: Runs, cost: CostModel, *, greedy: bool, seed: int) -> dict[str, Any]:
    """One row of the table."""
    tokens = [len(answer.tokens) - 1 for answer in runs.answers]
    by_prompt = [answer.rounds for answer in runs.answers]
    rounds = metrics.pool(by_prompt)
    modelled = sum(cost.round_s(r.drafted, r.target_rows) for r in rounds)
    if runs is plain:
        modelled = sum(tokens) * cost.plain_s()
    others = list(zip(runs.answers, plain.answers, strict=True))
    return {
        "policy": runs.name,
        "constant": runs.constant,
        "accepted_length": metrics.accepted_length(rounds),
        "accepted_length_ci95": metrics.accepted_length_ci95(by_prompt, seed=seed),
        "acceptance_rate": metrics.acceptance_rate(rounds),
        "drafted": sum(r.drafted for r in rounds) / len(rounds) if rounds else None,
        "verified": metrics.draft_length_mean(rounds),
        "rows_per_round": metrics.rows_per_round(rounds),
        "sibling_rate": metrics.sibling_rate(rounds),
        "plain_rounds": sum(r.drafted == 0 for r in rounds) / len(rounds) if rounds else None,
        "tokens_per_s": sum(tokens) / sum(runs.spent),
        "tokens_per_s_ci95": metrics.ratio_ci95(tokens, runs.spent, seed=seed),
        "modelled_tokens_per_s": sum(tokens) / modelled,
        "mismatches": sum(a.tokens != b.tokens for a, b in others) if greedy else None,
    }
