"""What SGLang reads of a calibration: temperatures, and steps per second by tokens in a step.

    STS  {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}     one value a slot
    SPS  {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}

Key names and meaning are those of SGLang 0.5's DSpark loader, read in its source. It has no
sampling setting in the file and no curves, so there is one STS file for each setting, and
`ece_after` there is that of the temperatures alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.draft.calibration import Fitted
from dspark.errors import UserError


def setting_name(setting: Mapping[str, Any]) -> str:
    """For file names: t0, t1, t0.7-p0.95-k50."""
    name = f"t{setting['temperature']:g}"
    if setting["temperature"] > 0:
        name += f"-p{setting['top_p']:g}" if setting["top_p"] < 1 else ""
        name += f"-k{setting['top_k']}" if setting["top_k"] else ""
    return name


def sts_table(entry: Fitted, dataset: str) -> dict[str, Any]:
    """Raises UserError where a slot was never verified: the format has no word for that."""
    if None in entry.ece_before or None in entry.ece_scaled:
        raise UserError(
            f"--sglang: slot {entry.ece_before.index(None) + 1} was never verified at "
            f"{entry.setting}, and its format needs a number; give more prompts or longer answers"
        )
    return {
        "temperatures": list(entry.temperatures),
        "dataset": dataset,
        "num_samples": entry.rounds,
        "ece_before": list(entry.ece_before),
        "ece_after": list(entry.ece_scaled),
    }


def sps_table(seconds: Mapping[int, float]) -> dict[str, Any]:
    """From seconds of a step by its verified rows."""
    rows = sorted(seconds)
    return {
        "sample_batch_tokens": rows,
        "sample_steps_per_sec": [1 / seconds[count] for count in rows],
        "max_batch_tokens": rows[-1],
    }
