"""Token against block verification: the same drafter, prompts, lengths and temperature.

At temperature 0 the two are one rule, so they are compared where they differ: sampling at 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark.runtime.judge import Method
from dspark.runtime.policies import Fixed
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from dspark_eval.drafting import Drafted
from dspark_eval.pair import Pair
from dspark_eval.report import progress
from dspark_eval.suites import Suite

if TYPE_CHECKING:
    from dspark_eval.policies.report import ReportOptions

SAMPLING = SamplingParams(1.0)
LENGTHS = (3, 8)


def compare_methods(pair: Pair, suite: Suite, options: ReportOptions) -> list[dict[str, Any]]:
    """Accepted length by draft length and method, with intervals over prompts."""
    prompts = pair.prompt_ids(suite)
    lengths = [length for length in LENGTHS if length <= pair.drafter.config.block_size]
    found = []
    with progress("block verification", 2 * len(lengths), options.quiet) as advance:
        for length in lengths:
            for method in ("token", "block"):
                rounds = _rounds(pair, prompts, length, method, options)
                found.append(
                    {
                        "prompts": suite.name,
                        "draft_length": length,
                        "verification": method,
                        "accepted_length": metrics.accepted_length(metrics.pool(rounds)),
                        "accepted_length_ci95": metrics.accepted_length_ci95(
                            rounds, seed=options.seed
                        ),
                        "acceptance_rate": metrics.acceptance_rate(metrics.pool(rounds)),
                    }
                )
                advance()
    return found


def _rounds(
    pair: Pair, prompts: list[list[int]], length: int, method: Method, options: ReportOptions
) -> list[metrics.Rounds]:
    drafted = Drafted(Fixed(length), method)
    decode = drafted.decode(pair.target, pair.drafter, SAMPLING, options.max_new_tokens)
    return [decode(prompt, options.seed + i).rounds for i, prompt in enumerate(prompts)]
