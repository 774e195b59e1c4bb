"""The last step of a run: what the finished drafter's confidence is worth.

Every held-out prompt is decoded once more, with whole blocks, at each temperature that evaluations
use; the fit is `dspark.draft.scaling`. A few dozen prompts take the worst off and no more: `dspark
calibrate` on some hundreds does better, and replaces these entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dspark.distill.chat import TrainingRow
from dspark.distill.config import DistillConfig
from dspark.distill.evaluate import decoding_prompts
from dspark.distill.processes import Processes
from dspark.draft.calibration import Fitted
from dspark.draft.model import DSparkDrafter
from dspark.draft.reliability import ConfidenceRounds
from dspark.draft.scaling import fit_setting
from dspark.runtime.confidence import collect_rounds
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target

MIN_PROMPTS = 16
"""Below, nothing is fitted: two halves of fewer prompts agree on nothing but their topics."""


@torch.no_grad()
def calibrate_held_out(
    config: DistillConfig,
    target: Target,
    drafter: DSparkDrafter,
    held_out: Sequence[TrainingRow],
    processes: Processes,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Fitted, ...]:
    """One entry for each of `eval.temperatures`, the same on every process.

    `say` is told before each temperature: decoding every prompt may take longer than training did.

    None where `eval.calibrate` is off, the drafter has no confidence head, or fewer than
    `MIN_PROMPTS` of the held-out prompts lead to a round.
    """
    prompts = decoding_prompts(held_out, len(held_out))
    if not config.eval.calibrate or drafter.confidence_head is None or len(prompts) < MIN_PROMPTS:
        return ()
    mine = range(processes.rank, len(prompts), processes.world)
    training = drafter.training
    drafter.eval()
    entries = []
    for temperature in config.eval.temperatures:
        sampling = SamplingParams(temperature=temperature)
        say(
            f"confidence: decoding {len(prompts)} held-out prompts at temperature {temperature:g} "
            "to fit it (eval.calibrate)"
        )
        own = collect_rounds(
            target,
            drafter,
            [prompts[index] for index in mine],
            sampling=sampling,
            max_new_tokens=config.data.max_new_tokens,
            seed=config.train.seed,
            numbers=mine,
        )
        rounds = _together(own, processes)
        if rounds.prompts >= MIN_PROMPTS:
            entry, _ = fit_setting(rounds, sampling, seed=config.train.seed)
            entries.append(entry)
    drafter.train(training)
    return tuple(entries)


def _together(own: ConfidenceRounds, processes: Processes) -> ConfidenceRounds:
    """The rounds of all processes in the order of their prompts, however many processes ran."""
    columns = (own.logits, own.accepted, own.verified, own.prompt)
    texts = processes.texts(json.dumps([column.tolist() for column in columns]))
    parts = [json.loads(text) for text in texts]
    logits, *counts = (
        [value for part in parts for value in part[index]] for index in range(len(columns))
    )
    accepted, verified, prompt = (np.array(values, dtype=np.int64) for values in counts)
    table = np.array(logits, dtype=np.float64).reshape(-1, own.slots)
    order = np.argsort(prompt, kind="stable")
    return ConfidenceRounds(table, accepted, verified, prompt).take(order)
