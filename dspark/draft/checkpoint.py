"""Drafter folders: `config.json`, `model.safetensors` and, if there is one, `calibration.json`.

Tensor names and config keys are those of DeepSpec; the block `dflash_config` repeats the keys that
SpecForge and SGLang look for there. What no other format records stands beside them, since each
of the three is a silent loss of acceptance when guessed wrong: what a tap holds
(`target_tap_kind`), where layer ids start (`layer_id_origin`), and whether the anchor slot predicts
(`sample_from_anchor`). Embedding and LM head are the target's and are not stored, unless copies are
asked for (`TargetCopies`: DeepSpec's evaluator wants them).

Pickles are never opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.draft.calibration import CALIBRATION_FILE, Calibration, calibration_from_dict
from dspark.draft.config import DraftConfig
from dspark.draft.config_file import config_from_dict, config_to_dict
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.files import atomic_folder, atomic_write_json, atomic_write_text, read_json

if TYPE_CHECKING:
    from dspark.runtime.target import Target

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COPY_NAMES = ("embed_tokens.weight", "lm_head.weight")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


@dataclass(frozen=True, eq=False)
class TargetCopies:
    """Frozen target tensors to store along: `embed` and `lm_head`, both [V, D]."""

    embed: Tensor
    lm_head: Tensor


def save_drafter(
    folder: Path | str,
    drafter: DSparkDrafter,
    *,
    dtype: torch.dtype = torch.float32,
    target_copies: TargetCopies | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Writes a drafter folder in one step: after a kill it is the old one or the new one.

    Args:
        folder: Replaced if it exists.
        drafter: Weights and configuration.
        dtype: Of every stored tensor; fp32 keeps training's master copy, bf16 halves the file.
        target_copies: Store embedding and LM head too.
        texts: Further files of the folder, name -> content (`calibration.json`, `README.md`, ...).
    """
    tensors = dict(drafter.state_dict())
    if target_copies is not None:
        shape = (drafter.config.vocab_size, drafter.config.hidden_size)
        copies = (target_copies.embed, target_copies.lm_head)
        for name, copy in zip(COPY_NAMES, copies, strict=True):
            if tuple(copy.shape) != shape:
                raise ValueError(f"{name}: shape {tuple(copy.shape)}, expected {shape}")
            tensors[name] = copy
    # Clones: safetensors refuses tensors that share memory, such as a tied embedding and head.
    tensors = {
        name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    config = config_to_dict(drafter.config, dtype=dtype, with_copies=target_copies is not None)
    with atomic_folder(folder) as fresh:
        save_file(tensors, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        (fresh / WEIGHTS_FILE).chmod(0o666 & fresh.stat().st_mode)  # safetensors makes it private
        atomic_write_json(fresh / CONFIG_FILE, config)
        for name, text in (texts or {}).items():
            if Path(name).name != name or name in (CONFIG_FILE, WEIGHTS_FILE):
                raise ValueError(f"{name!r} is not a free file name inside a drafter folder")
            atomic_write_text(fresh / name, text)


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
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; a drafter folder was expected")
    config = read_config(folder)
    read_calibration(folder, config)
    if target is not None:
        _check_target(folder / CONFIG_FILE, config, target)
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    tensors = _read_tensors(folder, expected, config)
    drafter.load_state_dict(
        {name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True
    )
    return drafter


def read_config(folder: Path | str) -> DraftConfig:
    """The configuration of a drafter folder, checked on its own.

    Raises:
        UserError: Missing file, missing or contradictory key, or a value that is not supported.
    """
    path = Path(folder) / CONFIG_FILE
    _check_inside(Path(folder), path)
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a JSON object was expected")
    try:
        return config_from_dict(raw)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def read_calibration(folder: Path | str, config: DraftConfig) -> Calibration | None:
    """What the folder of that drafter says of its confidence; None if it holds no such file.

    Raises:
        UserError: Not JSON, another schema, or numbers of another block size.
    """
    path = Path(folder) / CALIBRATION_FILE
    if not path.exists():
        return None
    _check_inside(Path(folder), path)
    try:
        return calibration_from_dict(read_json(path), config.block_size)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _check_target(path: Path, config: DraftConfig, target: Target) -> None:
    for key, wanted, found in (
        ("hidden_size", target.hidden_size, config.hidden_size),
        ("vocab_size", target.vocab_size, config.vocab_size),
        ("num_target_layers", target.num_layers, config.num_target_layers),
    ):
        if wanted != found:
            raise UserError(
                f"{path}: {key} is {found}, the target {target.name} has {wanted}; "
                "a drafter only works with the target it was distilled from"
            )
    if config.target_tap_kind not in target.tap_kinds:
        raise UserError(
            f"{path}: target_tap_kind {config.target_tap_kind!r} is not offered by the target "
            f"{target.name}, which has {', '.join(target.tap_kinds)}"
        )


def _read_tensors(
    folder: Path, expected: Mapping[str, tuple[int, ...]], config: DraftConfig
) -> dict[str, Tensor]:
    """All expected tensors, and no others; copies of target tensors are checked and skipped."""
    copies = dict.fromkeys(COPY_NAMES, (config.vocab_size, config.hidden_size))
    tensors: dict[str, Tensor] = {}
    unexpected: list[str] = []
    for path in _weight_files(folder):
        try:
            _read_file(path, expected, copies, tensors, unexpected)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a readable safetensors file: {error}") from None
    missing = [name for name in expected if name not in tensors]
    if missing or unexpected:
        problems = [
            f"{kind} tensors: {', '.join(names)}"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise UserError(f"{folder}: {'; '.join(problems)}")
    return tensors


def _read_file(
    path: Path,
    expected: Mapping[str, tuple[int, ...]],
    copies: Mapping[str, tuple[int, ...]],
    tensors: dict[str, Tensor],
    unexpected: list[str],
) -> None:
    """Add the file's expected tensors to `tensors`, and the names nobody asked for to the list."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            shape = tuple(file.get_slice(name).get_shape())
            wanted = expected.get(name, copies.get(name))
            if wanted is None:
                unexpected.append(name)
            elif shape != wanted:
                raise UserError(f"{path}: {name} has shape {shape}, expected {wanted}")
            elif name in expected:
                tensors[name] = _floats(path, name, file.get_tensor(name))


def _floats(path: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor; integers are refused, since a cast would load a quantised file as noise."""
    if not tensor.is_floating_point():
        raise UserError(f"{path}: {name} is stored as {tensor.dtype}, floats were expected")
    return tensor


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder, none of which lies outside it."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists() or not index.exists():
        files = [single]
    else:
        _check_inside(folder, index)
        raw = read_json(index)
        weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: weight_map: an object of tensor -> file was expected")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise UserError(f"{index}: weight_map: {name!r} is not a file name in this folder")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    for path in files:
        if not path.exists():
            _refuse_absent(folder, path)
        _check_inside(folder, path)
        if path.suffix != ".safetensors":
            raise UserError(f"{path}: only .safetensors files are read")
    return files


def _refuse_absent(folder: Path, path: Path) -> None:
    pickles = sorted(found.name for pattern in PICKLES for found in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder / pickles[0]}: pickled weights can run code and are never opened; "
            f"convert them to {path.name}"
        )
    raise UserError(f"{path}: no such file; the drafter's weights were expected")


def _check_inside(folder: Path, path: Path) -> None:
    """Refuses links that leave the folder, except into the blob store of a Hugging Face cache."""
    home, real = folder.resolve(), path.resolve()
    inside = home in real.parents
    in_cache = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not (inside or in_cache):
        raise UserError(f"{path}: links to {real}, outside the drafter folder")
