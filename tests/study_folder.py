"""A finished study on disk, written by hand: what a table and a report are built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.files import atomic_write_json

Counts = tuple[Sequence[int], Sequence[int]]
"""Emitted tokens and rounds, prompt by prompt."""


def write_study(
    out: Path, counts: Mapping[str, Sequence[Counts]], *, prompts: int = 2, long: bool = False
) -> Path:
    """Arms with one entry of counts per seed; the first arm is the reference."""
    arms = list(counts)
    atomic_write_json(
        out / "study.json",
        {
            "study": "hand",
            "question": "Which hand?",
            "reference": arms[0],
            "matched": True,
            "arms": [{"name": arm, "note": f"the {arm} one", "settings": {}} for arm in arms],
            "steps": 10,
            "seeds": list(range(len(counts[arms[0]]))),
            "draft_length": 2,
            "prompts": prompts,
            "equal_seconds": False,
        },
    )
    for place, (arm, seeds) in enumerate(counts.items()):
        for seed, (emitted, rounds) in enumerate(seeds):
            _write_run(out / arm / f"seed-{seed}", emitted, rounds, 1000 + place, long)
    return out


def _write_run(
    folder: Path, emitted: Sequence[int], rounds: Sequence[int], parameters: int, long: bool
) -> None:
    result = {
        "suite": "nano-problems",
        "temperature": 0.0,
        "accepted_length": sum(emitted) / sum(rounds),
        "acceptance_rate": 0.5,
        "conditional_acceptance": [1.0, None],
        "emitted": list(emitted),
        "rounds": list(rounds),
    }
    atomic_write_json(
        folder / "measure.json", {"draft_length": 2, "parameters": parameters, "results": [result]}
    )
    history = [
        {"step": 5, "train_s": 2.0, "loss": 3.0, "accepted_length": 1.1, "lr": 1e-3},
        {
            "step": 10, "train_s": 4.0, "loss": 2.0, "accepted_length": 1.2, "lr": 0.0,
            "held_out": {"loss": 2.5, "accepted_length": 1.5},
        },
    ]  # fmt: skip
    atomic_write_json(folder / "training.json", history)
    timing = {"draft_ms": 1.0, "draft_ms_p10": 0.9, "draft_ms_p90": 1.2, "weight_bytes": 2_000_000}
    atomic_write_json(
        folder / "drafting.json",
        [
            {"context": n, **timing, "context_bytes": 1000 * n, "held_bytes": n}
            for n in (1000, 4096)
        ],
    )
    if long:
        atomic_write_json(folder / "long.json", {"prompts": 2, "results": _long(emitted, rounds)})


def _long(emitted: Sequence[int], rounds: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "context": kind, "tokens": tokens, "emitted": list(emitted), "rounds": list(rounds),
            "accepted_length": sum(emitted) / sum(rounds), "exact_answers": exact,
        }
        for kind, tokens, exact in (("none", 0, 1.0), ("chat", 512, 0.25), ("padded", 512, 1.0))
    ]  # fmt: skip
