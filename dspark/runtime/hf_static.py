"""A transformers model of attention layers as a static pass: its own forward over fixed places.

The model runs as `RowTarget` runs it, told positions and masks; here both are made on the device
out of the seats' lengths, so that a recorded step is right for every later length. A mask spans all
places of a seat: attention reads all of them, whatever the text's length. Norms, rotary
positions, projections and shared heads take fewer launches where that says the same (`hf_norms`,
`hf_rotary`, `hf_packed`, `hf_grouped` beside this file); the rest is the model's, op by op.

What the model itself does in its forward is its own affair: if it reads a value on the host, its
steps cannot be recorded (`dspark.runtime.hf_static_check`).

Letters: B seats, T rows of a step, D hidden, V vocabulary, N taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.k3.static.decode import StepOutput
from dspark.runtime.hf_grouped import GroupedAttention
from dspark.runtime.hf_layer import RowLayer
from dspark.runtime.hf_norms import FusedNorms
from dspark.runtime.hf_packed import PackedProjections
from dspark.runtime.hf_rotary import FusedRotary
from dspark.runtime.hf_static_cache import HFStaticCache, LayerShape
from dspark.runtime.hf_target import RowTarget
from dspark.runtime.static_pass import Reading
from dspark.taps import TapSet

CHUNKS = (64, 256)
"""Rows of the passes that read a prompt. A small model takes as long for the one as for the other,
a large one little longer for 64 than for one row."""


class HFStatic:
    """A `RowTarget` as a static pass; see `dspark.runtime.static_pass.StaticPass`."""

    @torch.inference_mode()
    def __init__(self, target: RowTarget) -> None:
        self.target = target
        self._shapes = _shapes(target)
        self.norms = FusedNorms(target.parts.decoder)
        self.rotary = FusedRotary(target.parts.decoder)
        self.grouped = GroupedAttention()
        self.packed = PackedProjections(target.parts.decoder)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.target.dtype

    def new_cache(
        self, batch: int, max_length: int, rows: int = 1, *, slots: bool = True
    ) -> HFStaticCache:
        """Empty seats for steps of at most ``rows`` rows; with ``slots`` or without, none waits."""
        windows = self.target.mask_windows
        place = (self.dtype, self.device)
        return HFStaticCache(self._shapes, windows, batch, max_length, rows, *place)

    def reading(self, max_length: int) -> Reading | None:
        """A seat for prompts; see `StaticPass.reading`. None where texts may be longer than the
        model has positions for: padding would look behind the end of a table of them."""
        if max_length > self.target.max_positions:
            return None
        rows = CHUNKS[: 1 + sum(size < max_length for size in CHUNKS[:-1])]
        seat = self.new_cache(1, max_length, rows[-1])
        seat.clears = False
        return Reading(seat, rows)

    def step(
        self, tokens: Tensor, cache: HFStaticCache, *, taps: TapSet | None = None
    ) -> StepOutput:
        """Read rows behind what the seats hold; they count as far as ``cache.lengths`` moves.

        Args:
            tokens: [B, T] int64, T no more than the cache's ``rows``.
            taps: which hidden states to return.

        Returns ``last`` [B, T, D] after the final norm, and no chosen experts.
        """
        target, rows = self.target, cache.begin(tokens.shape[1])
        given = {
            "position_ids": rows.positions,
            "attention_mask": target.mask_argument(rows.masks),
        }
        with (
            self.norms.used(),
            self.rotary.used(),
            self.grouped.used(),
            self.packed.used(),
        ):
            last, tapped = target.parts.run(tokens, cache.model_cache, taps, given)
        return StepOutput(last, tapped, [])

    def logits(self, last: Tensor) -> Tensor:
        """[..., D] of `step` -> [..., V] float32, scaled and capped as the model does."""
        return self.target.logits(last)


def _shapes(target: RowTarget) -> list[LayerShape | None]:
    """What each layer keeps of a row, seen in a pass over one token."""
    cache = target.new_cache(1, 1)
    target.forward(torch.zeros(1, 1, dtype=torch.int64, device=target.device), cache, commit=True)
    return [
        LayerShape(
            layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype
        )
        if isinstance(layer, RowLayer) and layer.is_initialized
        else None
        for layer in cache.model_cache.layers
    ]
