"""Seconds of a decode step by the rows it verifies, at batch 1.

    1 row       a plain step
    1 + k rows  a whole round with draft length k: draft, verify, commit, feed the drafter

Median over the steps of a few prompts. Every prompt runs at every size before the next one does,
so that a machine that slows down slows all sizes alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median

from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.plain import plain_generate
from dspark.runtime.sampling import SamplingParams
from dspark_eval.pair import Pair
from dspark_eval.report import progress
from dspark_eval.settings import CalibrateOptions

PROMPTS = 4
NEW_TOKENS = 32


def round_costs(
    pair: Pair, prompts: Sequence[Sequence[int]], options: CalibrateOptions
) -> dict[int, float]:
    """Rows -> median seconds, for 1 .. block size + 1 rows, greedy; sizes never met left out."""
    block = pair.drafter.config.block_size
    times: dict[int, list[float]] = {rows: [] for rows in range(1, block + 2)}
    chosen = prompts[:PROMPTS]
    with progress("step times", len(chosen) * (block + 1), options.quiet) as advance:
        for prompt, rows in product(chosen, times):
            times[rows] += _plain_step(pair, prompt) if rows == 1 else _rounds(pair, prompt, rows)
            advance()
    return {rows: median(seconds) for rows, seconds in times.items() if seconds}


def _plain_step(pair: Pair, prompt: Sequence[int]) -> list[float]:
    """Mean seconds of the plain steps of one answer, if it had any."""
    answer = plain_generate(
        pair.target, prompt, max_new_tokens=NEW_TOKENS, sampling=SamplingParams()
    )
    steps = len(answer.tokens) - 1
    return [answer.decode_s / steps] if steps else []


def _rounds(pair: Pair, prompt: Sequence[int], rows: int) -> list[float]:
    """Seconds of every round of one answer that drafted as much as was asked."""
    answer = SpeculativeDecoder(pair.target, pair.drafter).generate(
        prompt, max_new_tokens=NEW_TOKENS, sampling=SamplingParams(), draft_length=rows - 1
    )
    return [
        record.draft_s + record.verify_s + record.other_s
        for record in answer.rounds
        if record.drafted == rows - 1
    ]
