"""Folders of a configuration and safetensors: what is checked before a byte of them is believed.

Only safetensors are opened. A pickle, a file that links out of the folder, an index that leads
elsewhere, names a shard that is not there or a tensor that its shard does not hold: each is refused
in one line. Headers are read at once, values when they are asked for, so a copy of a large
embedding that nobody needs is never loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.errors import UserError
from dspark.files import atomic_folder, atomic_write_json, atomic_write_text, read_json

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")

CARRIED_FILES = ("calibration.json", "golden.json")
"""Files that belong to the weights and go along, byte for byte, when a drafter changes layout."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of safetensors; what is not here (8-bit floats, packed formats) is not read."""


@dataclass(frozen=True)
class Stored:
    """One tensor in a file, not loaded: `dtype` is safetensors' name of an unknown one."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | str


class TensorFolder:
    """The tensors of a folder by name.

    Attributes:
        folder: Where they lie.
        entries: Name -> shape, dtype and file of every tensor.

    Raises:
        UserError: A file that is missing, damaged, outside the folder or no safetensors file, and
            an index that does not agree with its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Stored] = {}
        owners = _index(folder)
        files = [folder / WEIGHTS_FILE] if owners is None else _shards(folder, owners)
        for path in files:
            _check_file(folder, path)
            for name, entry in _headers(path).items():
                if name in self.entries:
                    raise UserError(f"{path}: {name} is also in {self.entries[name].path.name}")
                self.entries[name] = entry
        for name, shard in (owners or {}).items():
            held = self.entries.get(name)
            if held is None or held.path.name != shard:
                raise UserError(
                    f"{folder / INDEX_FILE}: weight_map says that {name} is in {shard}, which does "
                    "not hold it"
                )

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The values of those tensors, on the CPU, as they are stored."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].path, []).append(name)
        found: dict[str, Tensor] = {}
        for path, wanted in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    found.update({name: file.get_tensor(name) for name in wanted})
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from None
        return found


def check_folder(folder: Path) -> None:
    """Raises UserError unless this is a folder that could hold a drafter."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; a drafter folder was expected")
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder}: no {CONFIG_FILE}; a drafter folder was expected")


def read_object(folder: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """A JSON object of the folder. Raises UserError naming the file."""
    path = folder / name
    check_inside(folder, path)
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a JSON object was expected")
    return raw


def write_folder(
    folder: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, str] | None = None,
    files: Iterable[Path] = (),
) -> None:
    """Write a folder in one step: after a kill it is the old one or the new one.

    Args:
        folder: Replaced if it exists.
        config: Content of `config.json`.
        tensors: Written as they are; those that share memory are written apart, since safetensors
            refuses aliases and other savers drop one of the names.
        texts: Further files of the folder, name -> content.
        files: Further files of it, copied under their names.
    """
    plain = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    with atomic_folder(folder) as fresh:
        save_file(plain, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        (fresh / WEIGHTS_FILE).chmod(0o666 & fresh.stat().st_mode)  # safetensors makes it private
        atomic_write_json(fresh / CONFIG_FILE, config)
        for name, text in (texts or {}).items():
            if Path(name).name != name or name in (CONFIG_FILE, WEIGHTS_FILE):
                raise ValueError(f"{name!r} is not a free file name inside a drafter folder")
            atomic_write_text(fresh / name, text)
        for path in files:
            shutil.copyfile(path, fresh / path.name)


def carried_files(folder: Path) -> list[Path]:
    """Those of `CARRIED_FILES` that a folder holds. Raises UserError if one links out of it."""
    found = [folder / name for name in CARRIED_FILES if (folder / name).exists()]
    for path in found:
        check_inside(folder, path)
    return found


def check_inside(folder: Path, path: Path) -> None:
    """Refuses links that leave the folder, except into the blob store of a Hugging Face cache."""
    home, real = folder.resolve(), path.resolve()
    inside = home in real.parents
    in_cache = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not (inside or in_cache):
        raise UserError(f"{path}: links to {real}, outside the drafter folder")


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor -> shard, or None where one file holds everything."""
    path = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists() or not path.exists():
        return None
    weight_map = read_object(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: weight_map: an object of tensor -> file was expected")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{path}: weight_map: {name!r} is not a file name in this folder")
    return weight_map


def _shards(folder: Path, owners: Mapping[str, str]) -> list[Path]:
    return [folder / name for name in sorted(set(owners.values()))]


def _check_file(folder: Path, path: Path) -> None:
    if not path.exists():
        _refuse_absent(folder, path)
    check_inside(folder, path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: only .safetensors files are read")


def _refuse_absent(folder: Path, path: Path) -> None:
    pickles = sorted(found.name for pattern in PICKLES for found in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder / pickles[0]}: pickled weights can run code and are never opened; "
            f"convert them to {path.name}"
        )
    raise UserError(f"{path}: no such file; the drafter's weights were expected")


def _headers(path: Path) -> dict[str, Stored]:
    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                code = part.get_dtype()
                found[name] = Stored(path, tuple(part.get_shape()), DTYPES.get(code, code))
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None
    return found


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: not a readable safetensors file: {error}")
