"""What a pruning reports: a stage's numbers, the entry of its history, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.draft.pruning.sizes import Size

_DECODED = ("temperature", "rounds", "accepted_length", "conditional_acceptance")


def lengths_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The two accepted lengths of an evaluation, as the report has them."""
    held_out = record.get("held_out") or {}
    return {
        "accepted_length": held_out.get("accepted_length"),
        "decoded": [
            {key: result[key] for key in _DECODED if key in result}
            for result in record.get("decoded", ())
        ],
    }


def history_entry(report: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """One pruning in the history that travels with a drafter."""
    options = report["options"]
    return {
        "from": options["draft"],
        "importance": options["importance"],
        "budget": options["budget"],
        "vocab": options["vocab"],
        "layers": len(size.layers),
        "heads": size.heads,
        "mlp": size.mlp,
        "rank": size.rank,
        "parameters": [report["before"]["parameters"], report["pruned"]["parameters"]],
        "accepted_length": [
            report["before"]["accepted_length"], report["pruned"]["accepted_length"]
        ],
    }  # fmt: skip


def summary(report: Mapping[str, Any]) -> str:
    """The stages as a table, for people."""
    columns = f"{'parameters':>12} {'bytes a step':>14} {'draft ms':>9} {'accepted length':>16}"
    lines = [f"{'':10} {columns}  decoded"]
    for name in ("before", "pruned", "recovered"):
        stage = report[name]
        if stage is None:
            continue
        length = stage["accepted_length"]
        decoded = "  ".join(
            f"T={result['temperature']:g}: {result['accepted_length']:.3f}"
            for result in stage["decoded"]
            if result["accepted_length"] is not None
        )
        lines.append(
            f"{name:10} {stage['parameters']:12,} {stage['bytes_per_draft_step']:14,} "
            f"{stage['draft_ms']:9.2f} {'-' if length is None else f'{length:.3f}':>16}  {decoded}"
        )
    return "\n".join(lines)
