"""Target states on disk: each row run through the target once, alone, and read in every epoch.

    ROOT/<key>/manifest.json            what the states are of, and how they lie
               shard-00000.safetensors  taps [T, N, D], hidden [T, D] (post-norm) of some rows
               shard-00000.json         its size and SHA-256, written once the shard is safe
               ...

<key> hashes everything that changes the states, so a changed target, template, length, tap set,
row or dtype finds another folder and never another's states. Which rows a shard holds depends on
their lengths alone: any number of processes, and a run that was killed, agree about every shard.

Alone, as in `KeptFeatures`: from a float32 cache a run ends with the very weights that it ends with
when states are kept in memory. With `cache.rows` some go together, which costs those bits and saves
passes: a GPU takes little longer for a hundred short rows than for one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dspark.distill.batches import Batch
from dspark.distill.cache_codec import Codec
from dspark.distill.taps import Features, pad_rows
from dspark.errors import UserError
from dspark.files import read_json

FORMAT = "dspark-target-states-1"
MANIFEST = "manifest.json"
SHARD_BYTES = 256 << 20
"""A shard is closed after this much: one of them is in memory while it is written."""

_FRAME_BYTES = 600  # header of a shard, and its receipt

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """Rows `first` to `last` (exclusive) of the plan, in one file."""

    index: int
    first: int
    last: int
    tokens: int

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"shard-{self.index:05d}.safetensors"

    @property
    def receipt(self) -> str:
        """Name of the file with its size and checksum."""
        return f"shard-{self.index:05d}.json"


@dataclass(frozen=True)
class CachePlan:
    """Distinct rows in their order, cut into shards; the folder they lie in, and its key."""

    folder: Path
    key: Mapping[str, Any]
    codec: Codec
    rows: tuple[Ids, ...]
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return sum(shard.tokens for shard in self.shards)

    def bytes(self, shards: Sequence[Shard]) -> int:
        """What these shards take on disk."""
        per_token = self.codec.bytes_per_token
        return sum(shard.tokens * per_token + _FRAME_BYTES for shard in shards)


def plan_cache(
    root: Path,
    rows: Sequence[Ids],
    codec: Codec,
    origin: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> CachePlan:
    """Where the states of `rows` go; `origin` names all that decides them, as JSON values."""
    distinct = tuple(dict.fromkeys(rows))
    digest = hashlib.sha256()
    for ids in distinct:
        digest.update(repr(ids).encode())
    key = {
        "format": FORMAT,
        **origin,
        "native_dtype": str(codec.native).removeprefix("torch."),
        "dtype": codec.stored,
        "hidden_size": codec.hidden,
        "hidden_is_post_norm": True,
        "shard_bytes": shard_bytes,
        "rows": digest.hexdigest(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    shards = _cut([len(ids) for ids in distinct], max(1, shard_bytes // codec.bytes_per_token))
    return CachePlan(root / name, key, codec, distinct, shards)


def _cut(lengths: Sequence[int], tokens: int) -> tuple[Shard, ...]:
    """Runs of rows of at most `tokens` tokens each, or of one longer row."""
    shards: list[Shard] = []
    first = held = 0
    for at, length in enumerate(lengths):
        if held and held + length > tokens:
            shards.append(Shard(len(shards), first, at, held))
            first, held = at, 0
        held += length
    if held:
        shards.append(Shard(len(shards), first, len(lengths), held))
    return tuple(shards)


def shard_digest(folder: Path, shard: Shard) -> str | None:
    """The checksum that a receipt promises for a file of the size that is there, else None."""
    try:
        receipt = read_json(folder / shard.receipt)
        fits = (folder / shard.file).stat().st_size == receipt["bytes"]
        return receipt["sha256"] if fits else None
    except (UserError, OSError, KeyError, TypeError):
        return None


class CachedFeatures:
    """The states of a complete cache; a `FeatureSource`.

    What was read stays in memory, decoded and on the device, while it fits into `keep` bytes.
    """

    def __init__(self, plan: CachePlan, device: torch.device, keep: int = 0) -> None:
        self._plan, self._device, self._free = plan, device, keep
        self._kept: dict[Ids, Features] = {}
        self._places: dict[Ids, tuple[Shard, int]] = {}
        for shard in plan.shards:
            start = 0
            for ids in plan.rows[shard.first : shard.last]:
                self._places[ids] = (shard, start)
                start += len(ids)

    def __call__(self, batch: Batch) -> Features:
        """Features of a padded batch, zero at padding.

        Raises UserError if a shard cannot be read, KeyError for a row that was not planned.
        """
        counts = batch.valid.sum(1).tolist()
        rows = [self._row(tuple(batch.ids[i, :n].tolist())) for i, n in enumerate(counts)]
        return pad_rows(rows, batch.ids.shape[1])

    def _row(self, ids: Ids) -> Features:
        if not ids:  # a micro-batch without rows
            return self._nothing()
        if ids in self._kept:
            return self._kept[ids]
        features = self._read(ids)
        size = sum(x.numel() * x.element_size() for x in (features.taps, features.hidden))
        if size <= self._free:
            self._free -= size
            self._kept[ids] = features
        return features

    def _read(self, ids: Ids) -> Features:
        shard, start = self._places[ids]
        path = self._plan.folder / shard.file
        try:
            with safe_open(path, framework="pt") as file:
                parts = {
                    name: file.get_slice(name)[start : start + len(ids)]
                    for name in self._plan.codec.names
                }
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path}: target states cannot be read ({error}); continue with --resume, which "
                "makes the shard again"
            ) from None
        features = self._plan.codec.decode(parts)
        return Features(features.taps.to(self._device), features.hidden.to(self._device))

    def _nothing(self) -> Features:
        codec = self._plan.codec
        taps = torch.zeros(1, 1, codec.taps * codec.hidden, dtype=codec.native)
        hidden = torch.zeros(1, 1, codec.hidden, dtype=codec.native)
        return Features(taps.to(self._device), hidden.to(self._device))
