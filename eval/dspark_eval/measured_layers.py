"""What a pass of Kimi K3 takes beside its bytes, from layers that were measured one by one.

    wait(n) = sum over layers of  max(0, time(n) - bytes(n) / rate)        rate of the same card

`dspark_eval.k3_layers` measured the times on one GPU. Where several share a layer's bytes they may
share this too (a kernel that reads slower than a copy does) or not (launches, sums that meet): a
projection says both. What GPUs tell each other is in neither, nor is the head.

Letters: n rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark.files import read_json
from dspark.k3.config import K3Config


@dataclass(frozen=True)
class MeasuredLayers:
    """rate  bytes per second of the card's large copies;  wait_s  seconds of a pass by its rows"""

    rate: float
    wait_s: Mapping[int, float]


def load_layers(path: Path, config: K3Config) -> MeasuredLayers:
    """Read the file of `dspark_eval.k3_layers --json`.

    Raises UserError for anything else, and for a file that was measured at another shape.
    """
    raw = read_json(path)
    try:
        if raw["shape"] != "k3":
            raise UserError(f"{path}: measured at shape {raw['shape']!r}; expected k3")
        rate = float(raw["copy_bytes_per_s"])
        waits = {kind: _waits(rows, rate) for kind, rows in raw["layers"].items()}
        full, linear = waits["mla"], waits["kda"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"{path}: expected what `python -m dspark_eval.k3_layers --json FILE` writes"
        ) from None
    if full.keys() != linear.keys() or not full:
        raise UserError(f"{path}: expected the same rows of kda and mla layers, one at least")
    many = len(config.full_attention_layers)
    rest = config.num_hidden_layers - many
    return MeasuredLayers(rate, {n: many * full[n] + rest * linear[n] for n in full})


def _waits(rows: list[dict[str, Any]], rate: float) -> dict[int, float]:
    return {row["rows"]: max(0.0, row["seconds"] - row["bytes"] / rate) for row in rows}
