"""A checkpoint folder as a mapping from tensor names to safetensors files.

Reading opens one file at a time and only files that hold a wanted tensor; every tensor is handed
on before the next one is read. Writing plans all files first (their names carry the total), then
holds the tensors of one file at a time. Pickles are refused by name, never opened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dspark.errors import UserError
from dspark.files import atomic_write_json, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")


@dataclass
class ShardReader:
    """The tensors of ``folder`` by name; counts the files opened and the bytes handed out.

    Raises UserError when there are no safetensors, when the index is malformed, names a file
    that is missing or outside the folder, or when a file does not hold what the index says.
    """

    folder: Path
    files: dict[str, str] = field(init=False)
    """Tensor name -> file name."""
    opened: list[str] = field(default_factory=list, init=False)
    bytes_read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        index = self.folder / INDEX_FILE
        if index.is_file():
            self.files = _read_index(index)
        elif (self.folder / SINGLE_FILE).is_file():
            with self._open(SINGLE_FILE) as file:
                self.files = dict.fromkeys(file.keys(), SINGLE_FILE)
        else:
            raise UserError(_no_weights(self.folder))

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the named tensors, file by file; each is valid until the next one is asked for."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.files[name]].append(name)
        for file_name in sorted(by_file):
            with self._open(file_name) as file:
                self._check_held(file_name, by_file[file_name], set(file.keys()))
                for name in by_file[file_name]:
                    tensor = file.get_tensor(name)
                    self.bytes_read += tensor.nbytes
                    yield name, tensor

    def _check_held(self, file_name: str, names: Sequence[str], held: set[str]) -> None:
        absent = [name for name in names if name not in held]
        if absent:
            raise UserError(
                f"{self.folder / file_name}: {absent[0]} is not in this file although "
                f"{INDEX_FILE} says so; download the file again"
            )

    def _open(self, name: str) -> Any:
        if name not in self.opened:
            self.opened.append(name)
        path = self.folder / name
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a readable safetensors file ({error})") from None


@dataclass(frozen=True)
class Piece:
    """Tensors made together and stored in one file: their total size, and how to make them."""

    nbytes: int
    make: Callable[[], Mapping[str, torch.Tensor]]


def write_shards(folder: Path, pieces: Sequence[Piece], shard_bytes: int) -> None:
    """Write all pieces in order into files of at most ``shard_bytes`` (one piece may exceed it).

    One file is called ``model.safetensors``, several ``model-00001-of-0000N.safetensors``; the
    index is written last, so that a torn folder has none.
    """
    if shard_bytes <= 0:
        raise UserError(f"shard_bytes is {shard_bytes}; expected a positive number of bytes")
    shards = _plan(pieces, shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: t.contiguous() for piece in shard for key, t in piece.make().items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    atomic_write_json(folder / INDEX_FILE, index)


def _plan(pieces: Sequence[Piece], shard_bytes: int) -> list[list[Piece]]:
    shards: list[list[Piece]] = [[]]
    used = 0
    for piece in pieces:
        if shards[-1] and used + piece.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(piece)
        used += piece.nbytes
    return shards


def _read_index(index: Path) -> dict[str, str]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: expected an object with a weight_map of tensor names to files")
    for name in weight_map.values():
        # A bare name cannot leave the folder. Links inside it are fine: download caches use them.
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise UserError(
                f"{index}: {name!r} is not a plain file name; shards lie beside the index"
            )
        if not name.endswith(".safetensors"):
            raise UserError(f"{index}: {name} is refused; only safetensors files are loaded")
    for name in sorted(set(weight_map.values())):
        if not (index.parent / name).is_file():
            raise UserError(f"{index}: the shard {name} is missing; download it again")
    return weight_map


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder; expected a checkpoint folder"
    names = sorted(entry.name for entry in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{folder}: {pickles[0]} may be a pickle, which can run code when opened; "
            "convert the weights to safetensors"
        )
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"{folder}: has {shards[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}"
    return f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither"
