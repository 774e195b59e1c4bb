"""How a drafter of a study fares in contexts longer than its rows: accepted length by length.

The same few problems, greedy, after no context, after chats and after padding of several lengths
(`dspark_eval.long_context` says what these are and which of them the shipped target can read). The
share of exact answers is the target's own, and the same for every drafter.

    python -m dspark_eval.study.long RUN TARGET DRAFT_LENGTH PROMPTS
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.distill.chat import ChatFormat
from dspark.draft.checkpoint import load_drafter
from dspark.files import atomic_write_json
from dspark.runtime.loading import load_target
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from dspark_eval.grading import exact_answers
from dspark_eval.long_context import CHAT, LENGTHS, PADDED, LongContext
from dspark_eval.pair import Pair
from dspark_eval.study.measure import MAX_NEW_TOKENS, SEED
from dspark_eval.suites import Suite, load_suites

LONG_FILE = "long.json"


def measure_long(
    run: Path,
    *,
    target: str,
    draft_length: int,
    prompts: int,
    lengths: Sequence[int] = LENGTHS,
) -> Path:
    """Decode after contexts of `lengths` tokens; returns the file written in `run`."""
    loaded = load_target(target)
    drafter = load_drafter(run, loaded.target).eval()
    pair = Pair(loaded.target, drafter, ChatFormat(loaded.tokenizer), str(run), draft_length)
    (asked,) = load_suites("nano-problems", n_prompts=prompts, seed=SEED)
    contexts = [None, *(LongContext(kind, n) for kind in (CHAT, PADDED) for n in lengths)]
    path = run / LONG_FILE
    atomic_write_json(
        path,
        {
            "draft_length": draft_length,
            "prompts": len(asked.rows),
            "results": [_decode(pair, asked, context) for context in contexts],
        },
    )
    return path


def _decode(pair: Pair, asked: Suite, context: LongContext | None) -> dict[str, Any]:
    suite = replace(asked, context=context)
    prompts = pair.prompt_ids(suite)
    decode = pair.speculative_after(prompts, SamplingParams(), MAX_NEW_TOKENS)
    answers = [decode(prompt, SEED + index) for index, prompt in enumerate(prompts)]
    for answer in answers:
        metrics.check_generation(answer)
    by_prompt = [answer.rounds for answer in answers]
    return {
        "context": "none" if context is None else context.kind,
        "tokens": 0 if context is None else context.tokens,
        "accepted_length": metrics.accepted_length(metrics.pool(by_prompt)),
        "emitted": [sum(r.emitted for r in rounds) for rounds in by_prompt],
        "rounds": [len(rounds) for rounds in by_prompt],
        "exact_answers": exact_answers(pair, suite, answers),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, name, gamma, count = sys.argv[1:]
    measure_long(Path(folder), target=name, draft_length=int(gamma), prompts=int(count))
