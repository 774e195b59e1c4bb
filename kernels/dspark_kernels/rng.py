"""Random numbers that are a function of where they are used, not of what ran before.

A request's draws are Philox-4x32-10 of a key and a counter (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"):

    key      seed                                         64 bits, the request's own
    counter  (pair, stream, position low, position high)  4 x 32 bits
    output   four words w_0..w_3 -> two uniforms          u = (w >> 11) 2^-53, w = w_hi 2^32 + w_lo

`position` is a place in the request's text and `stream` says what the numbers are for. Nothing else
enters, so a text does not depend on its batch, on its slot in it or on when it joined, and a graph
that is replayed needs no generator state.

Letters: B requests, n uniforms each.
"""

from __future__ import annotations

import torch
from torch import Tensor

DRAFT, JUDGE = 0, 1
"""Streams: what a drafter chooses with, and what its proposal is judged with."""

_ROUNDS = 10
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_RAISE = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four words of every counter, as int64 in 0..2^32-1; so are the words of key and counter."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps in int64, but its bits are those of the full one.
        a, b = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        c0, c1 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW
        c2, c3 = ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _RAISE[0]) & _LOW, (k1 + _RAISE[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, stream: int, count: int) -> Tensor:
    """Uniforms [B, count] float64 in [0, 1) with 53 bits.

    Args:
        seed: [B] int64, all 64 bits count.
        position: [B] int64.
        stream: What they are for, 0..2^32-1. Different streams are independent.
        count: n; the first n of a longer row are the same numbers.
    """
    pair = torch.arange((count + 1) // 2, device=seed.device)
    key = (seed & _LOW, (seed >> 32) & _LOW)
    place = (position & _LOW, (position >> 32) & _LOW)
    counter = (pair, torch.full_like(pair, stream), *(word.unsqueeze(1) for word in place))
    w0, w1, w2, w3 = philox((key[0].unsqueeze(1), key[1].unsqueeze(1)), counter)
    words = torch.stack((w0 << 32 | w1, w2 << 32 | w3), dim=-1).flatten(1)[:, :count]
    # A shift of int64 keeps the sign; what is left of it above 53 bits goes.
    return ((words >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def moved_bytes(batch: int, count: int) -> int:
    """Bytes of one call: seeds and positions read, numbers written. It is a launch that counts."""
    return 8 * batch * (2 + count)
