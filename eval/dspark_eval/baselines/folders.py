"""Folders of trained baselines: what kind they are, how they are written and opened.

    baseline.json   {"kind": "dflash" | "eagle3" | "ar", "trained": ..., ...}
    dflash          an ordinary drafter folder, whose head adds zero
    eagle3          config.json and model.safetensors under the names of released heads
    ar              a causal LM of transformers, with the target's tokenizer

Only safetensors are read.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.folder import CONFIG_FILE, WEIGHTS_FILE, read_object, write_folder
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.files import atomic_folder, atomic_write_json, json_text, read_json
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.runtime.target import Target
from dspark_eval.baselines.autoregressive import Autoregressive
from dspark_eval.baselines.base import Baseline
from dspark_eval.baselines.dflash import DFlash
from dspark_eval.baselines.eagle import EagleConfig, EagleModel
from dspark_eval.baselines.eagle_drafter import Eagle

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BASELINE_FILE = "baseline.json"
KINDS = ("dflash", "eagle3", "ar")


def kind_of(folder: Path) -> str | None:
    """What baseline a folder holds; None: none. Raises UserError for a kind nobody knows."""
    path = folder / BASELINE_FILE
    if not path.is_file():
        return None
    kind = read_json(path).get("kind")
    if kind not in KINDS:
        raise UserError(f"{path}: kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return str(kind)


def save_dflash(folder: Path, drafter: DSparkDrafter, facts: dict[str, Any]) -> None:
    """Write a DFlash drafter."""
    texts = {BASELINE_FILE: json_text({"kind": "dflash", **facts})}
    save_drafter(folder, drafter.cpu().eval(), texts=texts)


def save_eagle(folder: Path, model: EagleModel, facts: dict[str, Any]) -> None:
    """Write an EAGLE-3 layer."""
    texts = {BASELINE_FILE: json_text({"kind": "eagle3", **facts})}
    write_folder(folder, asdict(model.config), model.state_dict(), texts)


def save_ar(
    folder: Path, model: LlamaForCausalLM, loaded: LoadedTarget, facts: dict[str, Any]
) -> None:
    """Write a small causal LM with the tokenizer of the target it drafts for."""
    with atomic_folder(folder) as fresh:
        model.to("cpu", torch.float32).save_pretrained(fresh)
        loaded.tokenizer.save_pretrained(fresh)
        atomic_write_json(fresh / BASELINE_FILE, {"kind": "ar", **facts})


def open_baseline(folder: Path, kind: str, target: Target, block_size: int | None) -> Baseline:
    """A trained baseline, ready to draft for `target`.

    `block_size`: longest proposal of a causal LM, which knows no block; None: 7.
    Raises UserError for a folder that is not whole or was made for another target.
    """
    if kind == "dflash":
        drafter = load_drafter(folder, target, dtype=target.dtype, device=target.device)
        return DFlash(drafter.eval(), target)
    if kind == "ar":
        return open_ar(str(folder), target, block_size)
    return Eagle(load_eagle(folder, target), target)


def open_ar(name: str, target: Target, block_size: int | None) -> Autoregressive:
    """Any causal LM of the target's vocabulary as its drafter."""
    model = load_target(name, dtype=target.dtype, device=target.device).target
    return Autoregressive(model, target, block_size or 7)


def load_eagle(folder: Path, target: Target) -> EagleModel:
    """An EAGLE-3 layer in the target's dtype. Raises UserError naming what does not fit."""
    path = folder / CONFIG_FILE
    values = read_object(folder)
    names = {field.name for field in fields(EagleConfig)}
    if set(values) != names:
        wrong = ", ".join(sorted(set(values) ^ names))
        raise UserError(f"{path}: keys {wrong}; expected exactly {', '.join(sorted(names))}")
    config = EagleConfig(**values)
    for key, found, wanted in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise UserError(
                f"{path}: {key} is {found}, that of target {target.name} is {wanted}; use the "
                "drafter with the target it was made for"
            )
    model = EagleModel(config)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise UserError(f"{weights}: missing; the folder is not whole")
    try:
        model.load_state_dict(load_file(weights))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{weights}: does not fit config.json ({error})") from None
    return model.to(target.device, target.dtype).eval().requires_grad_(False)
