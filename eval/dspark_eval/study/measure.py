"""What one trained drafter of a study is worth: real rounds, counted prompt by prompt.

    python -m dspark_eval.study.measure RUN

decodes the shipped held-out prompts with the loop that serves and writes RUN/measure.json. Counts
stay apart per prompt, so that two drafters can be compared on the same prompts: an interval for a
ratio of accepted lengths resamples prompts and keeps both drafters' counts of a prompt together.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from dspark.distill.chat import ChatFormat
from dspark.draft.checkpoint import load_drafter
from dspark.files import atomic_write_json
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.loading import load_target
from dspark.runtime.records import RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from dspark_eval.environment import describe_environment
from dspark_eval.suites import Suite, load_suites

MEASURE_FILE = "measure.json"
PROMPTS = 60
MAX_NEW_TOKENS = 160
SEED = 980406
SETTINGS = (("nano-problems", 0.0), ("nano-problems", 1.0), ("nano-instructions", 1.0))
"""Prompt set and temperature of each measurement."""


def measure_run(run: Path, *, target: str, draft_length: int, prompts: int = PROMPTS) -> Path:
    """Decode with the drafter in `run`; returns the file written."""
    loaded = load_target(target)
    drafter = load_drafter(run, loaded.target).eval()
    chat = ChatFormat(loaded.tokenizer)
    decoder = SpeculativeDecoder(loaded.target, drafter)
    results = []
    for name, temperature in SETTINGS:
        (suite,) = load_suites(name, n_prompts=prompts, seed=SEED)
        results.append(_decode(decoder, chat, suite, temperature, draft_length))
    path = run / MEASURE_FILE
    atomic_write_json(
        path,
        {
            "draft_length": draft_length,
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "results": results,
            "environment": describe_environment(loaded.target.device, loaded.target.dtype),
        },
    )
    return path


def _decode(
    decoder: SpeculativeDecoder, chat: ChatFormat, suite: Suite, temperature: float, length: int
) -> dict[str, Any]:
    by_prompt: list[list[RoundRecord]] = []
    sampling = SamplingParams(temperature=temperature)
    for index, row in enumerate(suite.rows):
        answer = decoder.generate(
            chat.prompt_ids(row.prompt),
            max_new_tokens=MAX_NEW_TOKENS,
            sampling=sampling,
            draft_length=length,
            seed=SEED + index,
        )
        metrics.check_generation(answer)
        by_prompt.append(answer.rounds)
    pooled = metrics.pool(by_prompt)
    return {
        "suite": suite.name,
        "temperature": temperature,
        "accepted_length": metrics.accepted_length(pooled),
        "acceptance_rate": metrics.acceptance_rate(pooled),
        "conditional_acceptance": metrics.conditional_acceptance(pooled),
        "emitted": [sum(r.emitted for r in rounds) for rounds in by_prompt],
        "rounds": [len(rounds) for rounds in by_prompt],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, target_name, gamma, count = sys.argv[1:]
    measure_run(Path(folder), target=target_name, draft_length=int(gamma), prompts=int(count))
