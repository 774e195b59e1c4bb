"""What a captured frame knows of its requests, in tensors that stay where they are.

    anchor, left [B] int64     last token, not yet read by the target; tokens that may still come
    sent [B] int64             primaries of the next frame, min(left - 1, L)
    ends [B, V] bool           marks the ids that end the text
    seed [B] int64             names the request's random numbers

A seat with ``left`` = 0 is idle: whatever a frame computes for it is dropped. Random numbers are a
function of seed, place in the text and what they are for, so a text depends neither on its seat nor
on its neighbours.

Letters: B seats, L primaries, V vocab.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from dspark import ops
from dspark.runtime.frame_step import marks
from dspark.runtime.sampling import SamplingParams, in_float32, request_seed

MOST = 2**31 - 1
"""Beyond any vocabulary."""


class GraphSeats:
    """B seats for texts over `vocab` ids and frames of `length` primaries."""

    def __init__(self, batch: int, vocab: int, device: torch.device, length: int = 0) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.length = length
        self.anchor, self.left, self.seed = zeros(batch), zeros(batch), zeros(batch)
        self.sent = zeros(batch)
        self.ends = torch.zeros(batch, vocab, dtype=torch.bool, device=device)

    @property
    def batch(self) -> int:
        """B."""
        return len(self.anchor)

    def join(
        self, seat: int, anchor: Tensor, left: int, ends: Collection[int], seed: int, index: int
    ) -> None:
        """A request whose first token is known takes a seat."""
        self.anchor[seat] = anchor[0]
        self.left[seat] = left
        self.sent[seat] = max(0, min(left - 1, self.length))
        self.seed[seat] = request_seed(seed, index)
        self.ends[seat] = marks(ends, self.ends[seat])

    def limit(self, most: int) -> None:
        """The frame that is being queued sends at most so many primaries."""
        if most == 0:
            self.sent.zero_()
            return
        torch.sub(self.left, 1, out=self.sent)
        self.sent.clamp_(0, most)

    def leave(self, seat: int) -> None:
        """The seat is idle from the next frame on."""
        self.left[seat] = 0
        self.sent[seat] = 0


class Chances:
    """Sampling settings as the ops of a frame take them: one number per seat, or nothing.

    At temperature 0 nothing is drawn and every field is None.
    """

    def __init__(self, sampling: SamplingParams, batch: int, device: torch.device) -> None:
        self.sampling = sampling
        self.temperature = self.top_k = self.top_p = None
        if sampling.greedy:
            return

        def of_all(number: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((batch,), number, dtype=dtype, device=device)

        self.temperature = of_all(in_float32(sampling.temperature))
        if sampling.top_k:
            self.top_k = of_all(min(sampling.top_k, MOST), torch.int64)
        if sampling.top_p < 1:
            self.top_p = of_all(in_float32(sampling.top_p))

    def coins(self, seed: Tensor, position: Tensor, stream: int, count: int) -> Tensor | None:
        """[B, count] uniforms of one round, or None where nothing is drawn."""
        return None if self.temperature is None else ops.uniform(seed, position, stream, count)
