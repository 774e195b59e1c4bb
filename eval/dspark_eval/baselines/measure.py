"""What one contender is worth: real rounds, counted prompt by prompt, in a file.

    python -m dspark_eval.baselines measure CONTENDER --out FILE

decodes the held-out prompts of `study.measure` with its settings and seeds, so that drafters of a
study and baselines stand on the same prompts. `--validation` decodes others, which nothing else is
measured on: what is chosen by them is not flattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.distill.chat import ChatFormat
from dspark.files import atomic_write_json
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from dspark_eval.contenders import Contender, open_contender
from dspark_eval.study.measure import MAX_NEW_TOKENS, SEED, SETTINGS
from dspark_eval.suites import VALIDATION, load_suites

VALIDATION_SETTINGS = ((VALIDATION, 1.0),)


def measure(
    name: str,
    out: Path,
    *,
    target: str,
    draft_length: int,
    prompts: int,
    settings: Sequence[tuple[str, float]] = SETTINGS,
) -> dict[str, Any]:
    """Decode prompt sets, each at a temperature, with the contender `name`; written to `out`."""
    loaded = load_target(target)
    contender = open_contender(name, loaded, draft_length)
    document = {
        **contender.facts(),
        "name": Path(name).name,
        "draft_length": draft_length,
        "results": [
            _measure(contender, loaded, suite, temperature, draft_length, prompts)
            for suite, temperature in settings
        ],
    }
    atomic_write_json(out, document)
    return document


def _measure(
    contender: Contender,
    loaded: LoadedTarget,
    suite_name: str,
    temperature: float,
    draft_length: int,
    prompts: int,
) -> dict[str, Any]:
    (suite,) = load_suites(suite_name, n_prompts=prompts, seed=SEED)
    chat = ChatFormat(loaded.tokenizer)
    decode = contender.decode(
        loaded.target,
        SamplingParams(temperature=temperature),
        max_new_tokens=MAX_NEW_TOKENS,
        draft_length=draft_length,
        method="token",
    )
    answers = [
        decode(chat.prompt_ids(row.prompt), SEED + index) for index, row in enumerate(suite.rows)
    ]
    for answer in answers:
        metrics.check_generation(answer)
    rounds = [answer.rounds for answer in answers]
    pooled = metrics.pool(rounds)
    return {
        "suite": suite.name,
        "temperature": temperature,
        "accepted_length": metrics.accepted_length(pooled),
        "acceptance_rate": metrics.acceptance_rate(pooled),
        "conditional_acceptance": metrics.conditional_acceptance(pooled),
        "loop_share": metrics.loop_share([answer.tokens for answer in answers]),
        "emitted": [sum(r.emitted for r in held) for held in rounds],
        "rounds": [len(held) for held in rounds],
    }
