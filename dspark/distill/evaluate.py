"""Is what training measures what decoding gets? Real rounds beside teacher-forced ones.

Teacher forcing sees perfect context and never runs the incremental path, so a wrong mask, layer id
or slot layout can leave it at 0.98 while real acceptance is 1.0. Every evaluation therefore decodes
held-out prompts with the loop that serves, and compares

    decoded        sum of emitted tokens / rounds
    teacher-forced 1 + sum_k prod_{i<=k} (1 - TV_i), averaged over held-out blocks

Definitions per slot (a accepted of k verified tokens in a round):
    conditional acceptance at j = #(a >= j) / #(a >= j-1 and k >= j)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.distill.chat import TrainingRow
from dspark.distill.processes import Processes
from dspark.distill.settings import EvalSettings
from dspark.draft.model import DSparkDrafter
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.records import RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target

SUSPICIOUS_RATIO = 0.7
"""Decoded accepted length below this share of the teacher-forced one is called out."""


@dataclass(frozen=True)
class Decoded:
    """Real rounds at one temperature. `conditional_acceptance` is None where never measured."""

    temperature: float
    rounds: int
    accepted_length: float | None
    conditional_acceptance: tuple[float | None, ...]

    def record(self) -> dict[str, object]:
        """As it stands in training.json."""
        return {
            "temperature": self.temperature,
            "rounds": self.rounds,
            "accepted_length": self.accepted_length,
            "conditional_acceptance": list(self.conditional_acceptance),
        }


def decoding_prompts(rows: Sequence[TrainingRow], count: int) -> list[list[int]]:
    """The first `count` prompts of held-out rows: their tokens before the first supervised one."""
    prompts = [list(row.ids[: row.loss_mask.index(True)]) for row in rows if any(row.loss_mask)]
    return [prompt for prompt in prompts if prompt][:count]


@torch.no_grad()
def decode_held_out(
    target: Target,
    drafter: DSparkDrafter,
    prompts: Sequence[Sequence[int]],
    settings: EvalSettings,
    *,
    seed: int,
    processes: Processes,
) -> list[Decoded]:
    """Decode the prompts, shared out over processes, at every temperature of the settings."""
    decoder = SpeculativeDecoder(target, drafter)
    training = drafter.training
    drafter.eval()
    results = []
    for temperature in settings.temperatures:
        counts = torch.zeros(2, settings.draft_length + 1, dtype=torch.float64)
        for index in range(processes.rank, len(prompts), processes.world):
            generation = decoder.generate(
                prompts[index],
                max_new_tokens=settings.max_new_tokens,
                sampling=SamplingParams(temperature=temperature),
                draft_length=settings.draft_length,
                seed=seed + index,
            )
            counts += count_rounds(generation.rounds, settings.draft_length)
        counts = processes.sum(counts.to(processes.device)).cpu()
        results.append(_summary(temperature, counts))
    drafter.train(training)
    return results


def count_rounds(rounds: Sequence[RoundRecord], draft_length: int) -> Tensor:
    """[2, G+1] float64: (rounds, times slot j was judged) over (emitted, times it was accepted)."""
    counts = torch.zeros(2, draft_length + 1, dtype=torch.float64)
    counts[0, 0] = len(rounds)
    counts[1, 0] = sum(entry.emitted for entry in rounds)
    for entry in rounds:
        judged = min(entry.accepted + 1, entry.verified)
        counts[0, 1 : judged + 1] += 1
        counts[1, 1 : entry.accepted + 1] += 1
    return counts


def _summary(temperature: float, counts: Tensor) -> Decoded:
    seen, passed = counts.tolist()
    ratios = tuple(p / s if s else None for s, p in zip(seen, passed, strict=True))
    return Decoded(temperature, int(seen[0]), ratios[0], ratios[1:])


def disagreement(decoded: Sequence[Decoded], teacher_forced: float | None) -> str | None:
    """A warning with likely causes when real acceptance falls far behind the teacher-forced one.

    None too where one of the two was not measured: no held-out block, or no prompt that decoded.

    1 - TV is acceptance at temperature 1, so the rounds decoded nearest to it are compared: a
    greedy walk through text of high entropy is accepted less for no fault of anything.
    """
    measured = [result for result in decoded if result.accepted_length is not None]
    if not measured or teacher_forced is None:
        return None
    nearest = min(measured, key=lambda result: abs(result.temperature - 1.0))
    length = nearest.accepted_length
    if length is None or length >= SUSPICIOUS_RATIO * teacher_forced:
        return None
    return (
        f"decoded accepted length {length:.2f} at temperature {nearest.temperature:g}, but "
        f"{teacher_forced:.2f} under teacher forcing at temperature 1: look at the loss mask and "
        "chat template (do prompts end where answers begin?), the tap layer ids and kind, and the "
        "slot layout (slot 0, the anchor, already predicts)"
    )
