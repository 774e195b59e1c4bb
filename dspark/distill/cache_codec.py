"""How target states lie on disk: as they are, as bfloat16, or as float8 with a scale.

float8 is e4m3 (largest value 448) with one float32 scale for every token and tap, so that the few
loud taps of a token do not silence the others:

    scale = max |x| / 448        stored = x / scale        read = stored * scale

A stored value is off by at most 1/16 of itself, or by scale / 1024 where it is that small.

Letters: T tokens, N taps, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.distill.taps import Features

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}
_LARGEST = 448.0
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """N taps of D channels as `stored`, a key of DTYPES, from and to a target's `native` dtype."""

    taps: int
    hidden: int
    stored: str
    native: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of taps and post-norm hidden state together."""
        vectors = self.taps + 1
        scale = _SCALE_BYTES if self.stored == "float8" else 0
        return vectors * (self.hidden * DTYPES[self.stored].itemsize + scale)

    def encode(self, features: Features) -> dict[str, Tensor]:
        """Features of one row ([1, T, N*D] and [1, T, D]) -> named tensors of T entries, on CPU."""
        length = features.hidden.shape[1]
        vectors = {
            "taps": features.taps.reshape(length, self.taps, self.hidden),
            "hidden": features.hidden.reshape(length, self.hidden),
        }
        out: dict[str, Tensor] = {}
        for name, values in vectors.items():
            if self.stored == "float8":
                scale = values.float().abs().amax(-1) / _LARGEST
                scale = torch.where(scale == 0, 1.0, scale)
                out[f"{name}_scale"] = scale.cpu()
                values = (values.float() / scale[..., None]).clamp(-_LARGEST, _LARGEST)
            out[name] = values.to(DTYPES[self.stored]).cpu()
        return out

    def decode(self, parts: dict[str, Tensor]) -> Features:
        """The inverse of `encode`, in the native dtype."""
        length = len(parts["hidden"])
        vectors = {}
        for name in ("taps", "hidden"):
            values = parts[name]
            if self.stored == "float8":
                values = values.float() * parts[f"{name}_scale"][..., None]
            vectors[name] = values.to(self.native).reshape(1, length, -1)
        return Features(vectors["taps"], vectors["hidden"])

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors of a shard."""
        return ("taps", "hidden") + (
            ("taps_scale", "hidden_scale") if self.stored == "float8" else ()
        )
