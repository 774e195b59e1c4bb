"""Reading GGUF, as much of it as one small model needs: metadata and four tensor types.

    file     "GGUF" | version | tensors | pairs | pairs... | tensor records... | padding | data
    Q4_1     32 weights in 20 bytes: half d, half m, 16 bytes of nibbles      w = d * q + m
    Q8_0     32 weights in 34 bytes: half d, 32 signed bytes                  w = d * q

All numbers are little-endian; dimensions are listed fastest first; a block's low nibbles are its
first 16 weights. (llama.cpp's ggml documentation.)
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.errors import UserError

_SCALARS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?")))
_SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_1, _Q8_0 = 0, 1, 3, 8
_BLOCK = {_F32: (1, 4), _F16: (1, 2), _Q4_1: (32, 20), _Q8_0: (32, 34)}
"""Tensor type -> weights and bytes of a block."""


@dataclass(frozen=True)
class _Record:
    """One tensor: its shape slowest first, its type, and where its data start."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUF:
    """An open file: `metadata` by key, tensors on demand.

    Raises UserError for a file that is no GGUF of version 2 or 3, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 4
        try:
            if bytes(self._bytes[:4]) != b"GGUF" or self._number("<I") not in (2, 3):
                raise UserError(f"{path}: not a GGUF file of version 2 or 3")
            tensors, pairs = self._number("<Q"), self._number("<Q")
            self.metadata: dict[str, Any] = {}
            for _ in range(pairs):
                key = self._string()
                self.metadata[key] = self._value(self._number("<I"))
            self._records = dict(self._record() for _ in range(tensors))
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: damaged GGUF ({error}) at byte {self._at}") from None
        alignment = self.metadata.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the file's order."""
        return tuple(self._records)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Weights as float32. Raises UserError for a missing tensor or an unknown type."""
        record = self._records.get(name)
        if record is None:
            raise UserError(f"{self.path}: has no tensor {name}")
        if record.kind not in _BLOCK:
            raise UserError(f"{self.path}: {name} is of ggml type {record.kind}, which is not read")
        per, size = _BLOCK[record.kind]
        blocks = math.prod(record.shape) // per
        start = self._data + record.offset
        raw = self._bytes[start : start + blocks * size]
        if len(raw) != blocks * size:
            raise UserError(f"{self.path}: ends within {name}")
        return _weights(record.kind, raw.reshape(blocks, size)).reshape(record.shape)

    def _number(self, form: str) -> Any:
        size = struct.calcsize(form)
        (value,) = struct.unpack(form, self._bytes[self._at : self._at + size].tobytes())
        self._at += size
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        if length > len(self._bytes) - self._at:
            raise struct.error(f"a string of {length} bytes")
        self._at += length
        return self._bytes[self._at - length : self._at].tobytes().decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if count > len(self._bytes):
                raise struct.error(f"a list of {count} values")
            return [self._value(inner) for _ in range(count)]
        return self._number(_SCALARS[kind])

    def _record(self) -> tuple[str, _Record]:
        name = self._string()
        shape = [self._number("<Q") for _ in range(self._number("<I"))]
        kind, offset = self._number("<I"), self._number("<Q")
        return name, _Record(tuple(reversed(shape)), kind, offset)


def _weights(kind: int, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[n, bytes of a block] -> [n, weights of a block]."""
    if kind == _F32:
        return blocks.view("<f4").astype(np.float32)
    if kind == _F16:
        return blocks.view("<f2").astype(np.float32)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    if kind == _Q8_0:
        return scale * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
    lowest = np.ascontiguousarray(blocks[:, 2:4]).view("<f2").astype(np.float32)
    packed = blocks[:, 4:]
    levels = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)
    return scale * levels + lowest
