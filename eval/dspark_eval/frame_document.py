"""What the JSON of recorded frames holds beside the times: enough to check its figures by.

    schema_version, command, seed, environment    `environment.heading`
    n_prompts   of every set
    by_prompt   tokens after the first, rounds, tokens that the rounds gave
    by_batch    tokens after the first, seconds; with one seat a batch is a prompt

    speed-up = (sum tokens / sum seconds) / (sum tokens / sum seconds of plain frames)

Its interval resamples batches, since the seats of one share every frame's time: `speedup` computes
both from such a document, and is what they are computed with in the first place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_eval.intervals import Interval, bootstrap_ci95, ratio_of_ratios, sample_size_warnings


def speedup(way: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[float, Interval | None]:
    """A way over plain frames of the same batches, and the 95 % interval."""
    ours, theirs = way["by_batch"], plain["by_batch"]
    columns = (ours["tokens"], ours["seconds"], theirs["tokens"], theirs["seconds"])
    rows = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
    return float(ratio_of_ratios(rows.sum(0))), bootstrap_ci95(rows, ratio_of_ratios)


def few_warnings(name: str, n_prompts: int, seats: int) -> list[str]:
    """What is too few for an interval: prompts of a set or, with several seats, its batches."""
    batches = -(-n_prompts // seats)
    found = [f"{name}: {text}" for text in sample_size_warnings(n_prompts)]
    if not found and sample_size_warnings(batches):
        found.append(
            f"{name}: few batches ({batches} of {seats} seats): the interval resamples them and "
            "is not to be relied on"
        )
    return found


def lines(target: str, batch: int, temperature: float, name: str, entry: dict[str, Any]) -> str:
    """One set of prompts, a line for each way."""
    told = []
    for way, result in entry["sets"][name].items():
        low, high = result["speedup_ci95"] or (float("nan"),) * 2
        text = (
            f"{target}, batch {batch}, T={temperature:g}, {name}, "
            f"n={result['n_prompts']}: {way:12} "
            f"{result['tokens_per_s']:8.0f} tok/s {result['speedup']:.2f}x [{low:.2f}, {high:.2f}]"
            f", frames p50/p99 {result['frame_ms_p50']:.3f}/{result['frame_ms_p99']:.3f} ms"
        )
        if result.get("accepted_length") is not None:
            low, high = result["accepted_length_ci95"] or (float("nan"),) * 2
            text += f", accepted length {result['accepted_length']:.2f} [{low:.2f}, {high:.2f}]"
            text += f", sizes {result['sizes']}"
        if result["experts"] is not None:
            text += f", experts {result['experts']:.1f} (n={result['experts_prompts']})"
        if result["energy"] is not None:
            text += f", J/token {result['energy']['joules_per_token']:.3f} at "
            text += f"{result['energy']['watts']:.0f} W"
        for d in result.get("divergences", ()):
            text += (
                f"; prompt {d['prompt']} differs at {d['position']}, gap {d['top2_gap']:.4f} "
                f"= {d['rounding_steps']:.1f} roundings"
            )
        told.append(text)
    return "\n".join(told)
