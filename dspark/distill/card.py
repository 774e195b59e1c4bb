"""The model card: what a drafter was made from, and what it measured, in one page of Markdown."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dspark.wording import counted

_LIBRARIES = ("torch", "transformers", "safetensors", "accelerate")


@dataclass(frozen=True)
class Provenance:
    """What decided the weights, next to the configuration in run.yaml."""

    target: str
    target_digest: str
    tokenizer_hash: str
    template_hash: str
    prompt_files: Sequence[tuple[str, str]]
    """(name, SHA-256) of every prompt file."""
    rows_digest: str
    training_rows: int
    supervised_tokens: int
    held_out_rows: int
    parameters: int
    steps: int
    epochs: int
    seed: int
    processes: int
    started_with: str
    """Fresh weights, layers of the target, or another drafter's weights."""


def model_card(provenance: Provenance, history: Sequence[Mapping[str, Any]]) -> str:
    """README.md of a drafter folder; `history` is the content of training.json."""
    evaluated = [record for record in history if record.get("held_out")]
    last = evaluated[-1] if evaluated else None
    return "\n".join(
        [
            "---",
            "library_name: dspark",
            "tags: [dspark, speculative-decoding, draft-model]",
            "---",
            "",
            f"# DSpark drafter for {provenance.target}",
            "",
            "A drafter for lossless speculative decoding: it proposes tokens, the target decides. "
            "It shares the target's embedding and LM head and is of use with this target only.",
            "",
            *(_numbers(last) if last else ["Not evaluated: no rows were held out.", ""]),
            *_origin(provenance),
        ]
    )


def _numbers(record: Mapping[str, Any]) -> list[str]:
    lines = [
        f"## Held-out numbers after step {record['step']}",
        "",
        "Accepted length: tokens per round, the target's own token included.",
        "",
        "| measured | accepted length | acceptance per slot, given all before |",
        "|---|--:|---|",
    ]
    for result in record["decoded"]:
        lines.append(
            f"| decoded, temperature {result['temperature']:g}, "
            f"{counted(result['rounds'], 'round')} "
            f"| {_number(result['accepted_length'])} "
            f"| {_list(result['conditional_acceptance'])} |"
        )
    held_out = record["held_out"]
    lines.append(
        f"| teacher-forced, 1 - TV | {_number(held_out['accepted_length'])} "
        f"| {_list(held_out['acceptance'])} |"
    )
    return [
        *lines,
        "",
        "Settings are in `run.yaml`, the whole history in `training.json`. The confidence is "
        "calibrated for the sampling settings in `calibration.json`, and the head's own if it has "
        "none.",
        "",
    ]


def _origin(provenance: Provenance) -> list[str]:
    facts = [
        ("target", f"{provenance.target}, sha256 `{provenance.target_digest}`"),
        ("tokenizer", f"sha256 `{provenance.tokenizer_hash}`"),
        ("chat template", f"sha256 `{provenance.template_hash}`"),
        *((f"prompts {name}", f"sha256 `{digest}`") for name, digest in provenance.prompt_files),
        ("rows", f"sha256 `{provenance.rows_digest}`"),
        (
            "data",
            f"{counted(provenance.training_rows, 'row')}, "
            f"{counted(provenance.supervised_tokens, 'supervised token')}, "
            f"{counted(provenance.held_out_rows, 'row')} held out",
        ),
        ("parameters", f"{provenance.parameters}"),
        ("steps", f"{provenance.steps} in {counted(provenance.epochs, 'epoch')}, "
                  f"{provenance.processes} "
         "process(es)"),
        ("seed", f"{provenance.seed}"),
        ("started with", provenance.started_with),
        ("software", software()),
        ("finished", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
    ]  # fmt: skip
    return ["## Origin", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in facts), ""]


def software() -> str:
    """Versions of what computes, in one line."""
    import dspark

    names = [f"dspark {dspark.__version__}", f"Python {platform.python_version()}"]
    for library in _LIBRARIES:
        try:
            names.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            continue
    return ", ".join(names)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _list(values: Sequence[float | None]) -> str:
    return " ".join("-" if value is None else f"{value:.2f}" for value in values)
