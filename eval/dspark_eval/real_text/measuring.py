"""What a drafter of the study is worth on the prompts that nobody trained on.

Real rounds, many prompts side by side, draft length 7. Counts stay apart per prompt, so that two
drafters can be compared on the same ones. Confidence is calibrated on rounds of prompts that were
held out of training and are not measured on; `ece` is of the survival product, mean over slots.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.distill.chat import ChatFormat
from dspark.distill.prompts import read_prompts
from dspark.draft.calibration import Fitted
from dspark.draft.checkpoint import load_drafter
from dspark.draft.curves import curved_survival
from dspark.draft.model import DSparkDrafter
from dspark.draft.reliability import ConfidenceRounds, average, reliability, survival
from dspark.draft.scaling import fit_setting
from dspark.files import atomic_write_json, read_json
from dspark.loops import is_loop
from dspark.runtime.confidence import confidence_rounds, raw_confidence
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.loading import LoadedTarget
from dspark.runtime.records import Generation
from dspark.runtime.requests import Request
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from dspark_eval.environment import describe_environment
from dspark_eval.real_text.answers import prompt_ids
from dspark_eval.real_text.prompts import test_files, training_prompts
from dspark_eval.real_text.reuse import ASKED

TEMPERATURES = (0.0, 1.0)
SEED = 980406


def measured_path(folder: Path, temperature: float) -> Path:
    """What was measured of a drafter at a temperature."""
    return folder / f"measured-t{temperature:g}.json"


def read_measured(folder: Path) -> dict[str, Any] | None:
    """What was measured of a drafter at all temperatures; None where nothing was yet."""
    paths = [measured_path(folder, temperature) for temperature in TEMPERATURES]
    found = [read_json(path) for path in paths if path.is_file()]
    if not found:
        return None
    lists = {key: [each for part in found for each in part[key]] for key in ("cells", "fits")}
    return {**found[0], **lists}


def measure(
    loaded: LoadedTarget,
    folder: Path,
    prompts: Path,
    temperature: float,
    *,
    asked: Mapping[str, Any],
    per_set: int | None,
    max_new_tokens: int,
    batch: int,
) -> dict[str, Any]:
    """Decode every test prompt at a temperature; writes FOLDER/measured-tT.json and returns it.

    `asked` is what decided it, for those that would repeat it.
    """
    drafter = load_drafter(folder, loaded.target).to(loaded.target.device).eval()
    chat = ChatFormat(loaded.tokenizer)
    sets = {
        path.stem: prompt_ids(read_prompts([path]).rows[:per_set], chat)
        for path in test_files(prompts)
    }
    held_out = prompt_ids(training_prompts(prompts, 1, 0).held_out[:per_set], chat)
    player = _Player(loaded, drafter, max_new_tokens, batch)
    started = time.perf_counter()
    kept = player.play(held_out, temperature)
    played = player.play([ids for each in sets.values() for ids in each], temperature)
    seconds = time.perf_counter() - started
    rounds = _rounds(kept, drafter)
    fitted = None
    if rounds.prompts >= 2:
        fitted, _ = fit_setting(rounds, SamplingParams(temperature))
    fit = {
        "temperature": temperature,
        "held_out_prompts": len(held_out),
        "held_out_accepted_length": metrics.accepted_length(
            metrics.pool(each.rounds for each in kept)
        ),
        "seconds": seconds,
        "tokens": sum(len(each.tokens) for each in (*kept, *played)),
    }
    cells = []
    for name, each in sets.items():
        cells.append(_cell(name, temperature, each, played[: len(each)], drafter, fitted))
        played = played[len(each) :]
    document = {
        ASKED: dict(asked),
        "drafter": folder.name,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "max_new_tokens": max_new_tokens,
        "environment": describe_environment(loaded.target.device, loaded.target.dtype),
        "cells": cells,
        "fits": [fit],
    }
    atomic_write_json(measured_path(folder, temperature), document)
    return document


class _Player:
    def __init__(
        self, loaded: LoadedTarget, drafter: DSparkDrafter, max_new_tokens: int, batch: int
    ) -> None:
        self._decoder = SpeculativeDecoder(loaded.target, drafter)
        self._drafter, self._new, self._batch = drafter, max_new_tokens, batch

    def play(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[Generation]:
        """Answers to all prompts, raw confidence in their records."""
        # like lengths side by side: a batch's buffers are as wide as its longest text
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        requests = [Request(prompts[at], self._new, seed=SEED, index=at) for at in order]
        found = self._decode(requests, temperature)
        for generation in found:
            if generation.fault is not None:
                raise generation.fault
            metrics.check_generation(generation)
        by_prompt = dict(zip(order, found, strict=True))
        return [by_prompt[at] for at in range(len(prompts))]

    def _decode(self, requests: Sequence[Request], temperature: float) -> list[Generation]:
        """All of them, in smaller batches where memory does not do."""
        while True:
            try:
                with raw_confidence(self._drafter):
                    return self._decoder.generate_many(
                        requests,
                        sampling=SamplingParams(temperature),
                        batch=self._batch,
                        draft_length=self._drafter.config.block_size,
                    )
            except torch.OutOfMemoryError:
                if self._batch == 1:
                    raise
                self._batch //= 2
            torch.cuda.empty_cache()
            print(f"out of memory: {self._batch} prompts at a time from here on", flush=True)


def _rounds(generations: Sequence[Generation], drafter: DSparkDrafter) -> ConfidenceRounds:
    return confidence_rounds([each.rounds for each in generations], drafter.config.block_size)


def _cell(
    name: str,
    temperature: float,
    prompts: Sequence[Sequence[int]],
    played: Sequence[Generation],
    drafter: DSparkDrafter,
    fitted: Fitted | None,
) -> dict[str, Any]:
    """One set at one temperature: figures, and the counts of each prompt behind them."""
    by_prompt = [each.rounds for each in played]
    pooled = metrics.pool(by_prompt)
    return {
        "set": name,
        "temperature": temperature,
        "prompts": len(played),
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "accepted_length": metrics.accepted_length(pooled),
        "ci95": metrics.accepted_length_ci95(by_prompt),
        "without_loops": metrics.accepted_length_without_loops(played),
        "loop_share": metrics.loop_share([each.tokens for each in played]),
        "acceptance_rate": metrics.acceptance_rate(pooled),
        "conditional_acceptance": metrics.conditional_acceptance(pooled),
        "ece": _ece(_rounds(played, drafter), fitted),
        "emitted": [sum(r.emitted for r in rounds) for rounds in by_prompt],
        "rounds": [len(rounds) for rounds in by_prompt],
        "loops": [is_loop(each.tokens) for each in played],
    }


def _ece(rounds: ConfidenceRounds, fitted: Fitted | None) -> dict[str, float | None]:
    """Mean over slots of the calibration error, of the raw confidence and of the calibrated one."""
    if not len(rounds):
        return {"before": None, "after": None, "floor": None}
    raw = reliability(survival(rounds.logits, [1.0] * rounds.slots), rounds)
    if fitted is None:
        return {"before": raw.average_ece, "after": None, "floor": average(raw.ece_floor)}
    scores = curved_survival(rounds.logits, fitted.temperatures, fitted.curves)
    after = reliability(scores, rounds)
    return {
        "before": raw.average_ece,
        "after": after.average_ece,
        "floor": average(after.ece_floor),
    }
