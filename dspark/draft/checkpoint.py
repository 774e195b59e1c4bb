"""Drafter folders: `config.json`, `model.safetensors`, `golden.json` and often `calibration.json`.

Tensor names and config keys are those of DeepSpec; the block `dflash_config` repeats the keys that
SpecForge and SGLang look for there. What no other format records stands beside them, since each
of the three is a silent loss of acceptance when guessed wrong: what a tap holds
(`target_tap_kind`), where layer ids start (`layer_id_origin`), and whether the anchor slot predicts
(`sample_from_anchor`). Embedding and LM head are the target's and are not stored, unless copies are
asked for (`TargetCopies`: DeepSpec's evaluator wants them). Other layouts are `dspark.interop`'s.

Pickles are never opened (`folder.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.draft.calibration import CALIBRATION_FILE, Calibration
from dspark.draft.calibration_file import calibration_from_dict
from dspark.draft.config import DraftConfig
from dspark.draft.config_file import config_from_dict, config_to_dict
from dspark.draft.folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    TensorFolder,
    check_folder,
    check_inside,
    read_object,
    write_folder,
)
from dspark.draft.golden_file import GOLDEN_FILE, golden_text
from dspark.draft.model import DSparkDrafter
from dspark.draft.vocabulary import MEMBERS, OFFSETS, check_maps
from dspark.errors import UserError
from dspark.files import json_text, read_json

if TYPE_CHECKING:
    from dspark.runtime.target import Target

OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, CALIBRATION_FILE, GOLDEN_FILE)
COPY_NAMES = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, eq=False)
class TargetCopies:
    """Frozen target tensors to store along: `embed` and `lm_head`, both [V, D].

    `head_rest` says what the target's logits are beyond hidden @ lm_head.T; empty: nothing.
    """

    embed: Tensor
    lm_head: Tensor
    head_rest: str = ""


def save_drafter(
    folder: Path | str,
    drafter: DSparkDrafter,
    *,
    dtype: torch.dtype = torch.float32,
    target_copies: TargetCopies | None = None,
    texts: Mapping[str, str] | None = None,
    golden: bool = True,
    target: Target | None = None,
) -> None:
    """Writes a drafter folder in one step: after a kill it is the old one or the new one.

    Args:
        folder: Replaced if it exists.
        drafter: Weights, configuration and, if it has one, calibration.
        dtype: Of every stored weight; fp32 keeps training's master copy, bf16 halves the file.
        target_copies: Store embedding and LM head too.
        texts: Further files of the folder, name -> content (`README.md`, `training.json`).
        golden: Keep what the drafter computes, for `dspark doctor`; a run's own checkpoints, of
            which there are many, do without.
        target: Keep what it computes behind this target too.
    """
    tensors = dict(drafter.state_dict())
    if target_copies is not None:
        shape = (drafter.config.vocab_size, drafter.config.hidden_size)
        copies = (target_copies.embed, target_copies.lm_head)
        for name, copy in zip(COPY_NAMES, copies, strict=True):
            if tuple(copy.shape) != shape:
                raise ValueError(f"{name}: shape {tuple(copy.shape)}, expected {shape}")
            tensors[name] = copy
    texts = dict(texts or {})
    for name in texts:
        if Path(name).name != name or name in OWN_FILES:
            raise ValueError(f"{name!r} is not a free file name inside a drafter folder")
    if drafter.calibration is not None:
        texts[CALIBRATION_FILE] = json_text(drafter.calibration.to_dict())
    stored = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    if golden:
        texts |= golden_text(drafter.config, stored, target)
    config = config_to_dict(drafter.config, dtype=dtype, with_copies=target_copies is not None)
    write_folder(folder, config, stored, texts)


def load_drafter(
    folder: Path | str,
    target: Target | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DSparkDrafter:
    """Reads a drafter folder, checking everything that would otherwise only cost acceptance.

    Args:
        folder: As written by `save_drafter`; sharded safetensors with an index are read too.
        target: The model it will draft for; sizes, depth and tap kind must match.
        dtype: Of the loaded weights (fp32 to train on).
        device: Where they go.

    Raises:
        UserError: One line that names the file, the key or tensor, and what was expected.
    """
    folder = Path(folder)
    config = read_config(folder)
    calibration = read_calibration(folder, config)
    if target is not None:
        check_target(folder / CONFIG_FILE, config, target)
    stored = TensorFolder(folder)
    drafter = empty_drafter(folder, stored.entries, config)
    tensors = _read_tensors(stored, drafter)
    drafter.load_state_dict(
        {
            name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in tensors.items()
        },
        assign=True,
    )
    drafter.calibration = calibration
    return drafter


def read_config(folder: Path | str) -> DraftConfig:
    """The configuration of a drafter folder, checked on its own.

    Raises:
        UserError: Missing file, missing or contradictory key, or a value that is not supported.
    """
    check_folder(Path(folder))
    try:
        return config_from_dict(read_object(Path(folder)))
    except ValueError as error:
        raise UserError(f"{Path(folder) / CONFIG_FILE}: {error}") from None


def read_calibration(folder: Path | str, config: DraftConfig) -> Calibration | None:
    """What the folder of that drafter says of its confidence; None if it holds no such file.

    Raises:
        UserError: Not JSON, another schema, or numbers of another block size.
    """
    path = Path(folder) / CALIBRATION_FILE
    if not path.exists():
        return None
    check_inside(Path(folder), path)
    raw = read_json(path)
    slots = raw.get("confidence_per_slot") if isinstance(raw, dict) else None
    if isinstance(slots, list) and len(slots) != config.block_size:
        raise UserError(
            f"{Path(folder) / CONFIG_FILE}: block_size is {config.block_size}, {CALIBRATION_FILE} "
            f"beside it was measured on blocks of {len(slots)}; restore block_size, or delete "
            f"{CALIBRATION_FILE} if it belongs to another drafter"
        )
    try:
        return calibration_from_dict(raw, config.block_size)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def check_target(path: Path, config: DraftConfig, target: Target) -> None:
    """Refuses a target of other sizes than the drafter's, or without its kind of taps."""
    for key, low, high, found in (
        ("hidden_size", target.hidden_size, target.hidden_size, config.hidden_size),
        # Rows that pad the target's tables may be there or not: no token needs them.
        ("vocab_size", target.vocab_size, target.table_size, config.vocab_size),
        ("num_target_layers", target.num_layers, target.num_layers, config.num_target_layers),
    ):
        if not low <= found <= high:
            wanted = str(low) if low == high else f"{low} of {high} rows"
            raise UserError(
                f"{path}: {key} is {found}, the target {target.name} has {wanted}; "
                "a drafter only works with the target it was distilled from"
            )
    if config.target_tap_kind not in target.tap_kinds:
        raise UserError(
            f"{path}: target_tap_kind {config.target_tap_kind!r} is not offered by the target "
            f"{target.name}, which has {', '.join(target.tap_kinds)}"
        )


def empty_drafter(folder: Path, names: Collection[str], config: DraftConfig) -> DSparkDrafter:
    """A drafter without weights (on the meta device), for those that the folder holds.

    Args:
        folder: For messages.
        names: Of the stored tensors, by our names.
        config: What the folder's `config.json` says.

    Raises:
        UserError: Another number of layers than the weights have, or sizes that no tensor can have.
    """
    path = folder / CONFIG_FILE
    if not any(name.startswith(f"layers.{config.num_layers - 1}.") for name in names):
        held = {name.split(".")[1] for name in names if name.startswith("layers.")}
        raise UserError(
            f"{path}: num_hidden_layers is {config.num_layers}, the missing tensors say "
            f"otherwise: {len(held)} layers are stored"
        )
    try:
        with torch.device("meta"):
            return DSparkDrafter(config)
    except (OverflowError, RuntimeError, TypeError) as error:  # torch counts in 64 bits
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: has a size that no tensor can have ({reason})") from None


def _read_tensors(stored: TensorFolder, drafter: DSparkDrafter) -> dict[str, Tensor]:
    """All tensors of the drafter, and no others; copies of target tensors are checked, not read."""
    folder, expected = stored.folder, drafter.state_dict()
    copy = (drafter.config.vocab_size, drafter.config.hidden_size)
    allowed = {
        **dict.fromkeys(COPY_NAMES, copy),
        **{name: tuple(tensor.shape) for name, tensor in expected.items()},
    }
    problems = {
        "missing": [name for name in expected if name not in stored.entries],
        "unexpected": [name for name in stored.entries if name not in allowed],
    }
    if any(problems.values()):
        listed = [
            f"{kind} tensors: {', '.join(names)}" for kind, names in problems.items() if names
        ]
        raise UserError(f"{folder}: {'; '.join(listed)}")
    for name, entry in stored.entries.items():
        if entry.shape != allowed[name]:
            raise UserError(
                f"{entry.path}: {name} has shape {entry.shape}, expected {allowed[name]}"
            )
        wanted = expected[name].dtype if name in expected else torch.float32
        check_dtype(entry.path, name, entry.dtype, wanted)
    tensors = stored.read(expected)
    if OFFSETS in tensors:
        check_vocabulary(folder, tensors)
    return tensors


def check_dtype(path: Path, name: str, found: torch.dtype | str, wanted: torch.dtype) -> None:
    """Refuses integers where floats belong, since a cast would load a quantised file as noise."""
    floats = isinstance(found, torch.dtype) and found.is_floating_point
    if floats != wanted.is_floating_point or (not floats and found != wanted):
        kind = "floats were" if wanted.is_floating_point else f"{wanted} was"
        raise UserError(f"{path}: {name} is stored as {found}, {kind} expected")


def check_vocabulary(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuses maps of a reduced vocabulary that are none, or contradict each other."""
    try:
        check_maps(tensors[OFFSETS], tensors[MEMBERS])
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
