"""Folders of pruned drafters: what they hold beside the weights, and the settings that fit them.

`pruning.json` lists every pruning a drafter went through, oldest first; it stands in the folder of
the cut drafter and in that of the recovered one. The record of the last pruning is the first of
`training.json` there, as step 0 of what followed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.distill.disk import writing
from dspark.draft.calibration import CALIBRATION_FILE
from dspark.draft.checkpoint import save_drafter
from dspark.draft.config import DraftConfig
from dspark.draft.folder import CONFIG_FILE, WEIGHTS_FILE
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.files import atomic_write_json, json_text, read_json

PRUNED, REPORT, HISTORY, TRAINING = "pruned", "prune.json", "pruning.json", "training.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_prunings(folder: Path) -> list[dict[str, Any]]:
    """The prunings that a drafter went through. Raises UserError for a file that is no list."""
    path = folder / HISTORY
    if not path.is_file():
        return []
    found = read_json(path)
    if not isinstance(found, list):
        raise UserError(f"{path}: a list of prunings was expected")
    return found


def save_pruned(
    folder: Path, origin: Path, drafter: DSparkDrafter, report: Mapping[str, Any]
) -> None:
    """Write the cut drafter with its history, and the tokenizer files that `origin` holds."""
    texts = {
        HISTORY: json_text(report["prunings"]),
        TRAINING: json_text([_record(report)]),
        "README.md": _card(report),
    }
    for name in _TOKENIZER:
        if (origin / name).is_file():
            texts[name] = (origin / name).read_text(encoding="utf-8")
    with writing(folder):
        save_drafter(folder, drafter, texts=texts)


def note_pruning(out: Path, report: Mapping[str, Any]) -> None:
    """Put the history beside a recovered drafter, and the pruning before its training records."""
    records = read_json(out / TRAINING)
    if not any("pruned" in record for record in records):
        records.insert(0, _record(report))
    with writing(out):
        atomic_write_json(out / HISTORY, report["prunings"])
        atomic_write_json(out / TRAINING, records)


def finish_folder(out: Path) -> None:
    """Make the cut drafter the one that `out` holds, `config.json` last: with it, all is there."""
    fresh = out / ".finished"
    with writing(out):
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(out / PRUNED, fresh)
        late = (CALIBRATION_FILE, WEIGHTS_FILE, CONFIG_FILE)
        names = sorted((path.name for path in fresh.iterdir()), key=lambda name: name in late)
        for name in sorted(names, key=lambda name: name == CONFIG_FILE):
            os.replace(fresh / name, out / name)
        shutil.rmtree(fresh)


def drafter_overrides(config: DraftConfig) -> dict[str, Any]:
    """Settings of a run whose drafter has this configuration; what has no key comes by init_from.

    Raises UserError for a shape that no settings describe.
    """
    shape: dict[str, Any] = {
        "backbone": config.backbone,
        "num_layers": config.num_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "head": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "confidence_with_markov": config.confidence_head_with_markov,
        "block_size": config.block_size,
        "tap_ids": list(config.target_layer_ids),
        "tap_kind": config.target_tap_kind,
        "mask_token_id": config.mask_token_id,
        "draft_vocab": None,
        "sliding_window": None,
        "yarn_factor": None,
        "init": "random",
        "init_layers": None,
        "init_from": None,
    }
    if config.kda is not None:
        shape |= {
            "kda_order": str(config.kda.order),
            "kda_conv": config.kda.conv_size,
            "kda_gate_rank": config.kda.gate_rank,
            "kda_block_softmax": config.kda.block_softmax,
        }
    if config.mla is not None:
        shape |= {"mla_q_rank": config.mla.q_lora_rank, "mla_kv_rank": config.mla.kv_lora_rank}
    return {f"drafter.{key}": value for key, value in shape.items()}


def _record(report: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": 0, "pruned": report["prunings"][-1]}


def _card(report: Mapping[str, Any]) -> str:
    before, after = report["before"], report["pruned"]
    lines = [
        "# Pruned DSpark drafter",
        "",
        "Cut and not yet distilled again. `pruning.json` has its history.",
        "",
        "| | parameters | bytes per draft step | accepted length, teacher-forced |",
        "|---|--:|--:|--:|",
    ]
    for name, numbers in (("before", before), ("after", after)):
        length = numbers["accepted_length"]
        lines.append(
            f"| {name} | {numbers['parameters']:,} | {numbers['bytes_per_draft_step']:,} | "
            f"{'-' if length is None else f'{length:.3f}'} |"
        )
    return "\n".join(lines) + "\n"
