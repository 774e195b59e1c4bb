"""The oracle of every test of the hybrid cache: one fresh prefill of the committed tokens.

What is compared: per KDA layer the recurrent state and the q, k and v convolution windows, per MLA
layer the latents, and the hidden state of the next token. Limits are relative, 1e-5 in float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from dspark.k3.cache import K3Cache
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.k3.state import KDAState
from dspark.k3.storage import Kind
from tests.k3_tiny import TINY, tiny_model
from tests.tolerance import assert_close

LIMIT = 1e-5
SMALL = replace(
    TINY, num_hidden_layers=2, full_attention_layers=(1,), first_k_dense_replace=2, kda_num_heads=1
)
"""One layer of each kind, for many rounds."""


@cache
def shared(config: K3Config = TINY) -> K3ForCausalLM:
    """One packed model per configuration, as the runtime uses it."""
    model = tiny_model(config)
    model.pack_()
    return model


@contextmanager
def in_double(config: K3Config = TINY) -> Iterator[K3ForCausalLM]:
    """The same model with every number in float64, also where the code says float32.

    What is left between two ways of computing the same thing is then below 1e-11: an error of the
    method cannot hide behind the rounding of float32, nor rounding look like one.
    """
    model = tiny_model(config).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        model.pack_()
        yield model


def contents(held: K3Cache, row: int) -> dict[str, Tensor]:
    """Everything that one request owns, replay folded, each convolution window by itself."""
    held = copy.deepcopy(held)
    held.fold()
    length = int(held.lengths[row])
    parts = {}
    for i, layer in enumerate(held.layers):
        if isinstance(layer, KDAState):
            parts[f"{i} state"] = layer.state[row]
            for name, window in zip("qkv", layer.window[row].chunk(3, dim=-1), strict=True):
                parts[f"{i} window {name}"] = window
        else:
            parts[f"{i} latents"] = layer.latents[row, :length]
    return parts


def prefill(model: K3ForCausalLM, tokens: Tensor) -> tuple[Tensor, K3Cache]:
    held = model.new_cache(tokens.shape[0], tokens.shape[1] + 8)
    return model(tokens, held)[0], held


class Poisoned:
    """A storage whose memory is full of NaN, as a pool's may be; it knows what is out."""

    def __init__(self) -> None:
        self.out: dict[tuple[Kind, int], Tensor] = {}

    def take(
        self,
        kind: Kind,
        layer: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        self.out[kind, layer] = torch.full(tuple(shape), math.nan, dtype=dtype, device=device)
        return self.out[kind, layer]

    def give_back(self, kind: Kind, layer: int, tensor: Tensor) -> None:
        if self.out[kind, layer] is tensor:  # otherwise its successor has been taken already
            del self.out[kind, layer]
        tensor.fill_(math.nan)


def assert_equal_contents(
    held: K3Cache, row: int, fresh: K3Cache, fresh_row: int, limit: float = LIMIT
) -> None:
    ours = contents(held, row)
    for name, expected in contents(fresh, fresh_row).items():
        assert_close(ours[name], expected, limit=limit, what=name)


def assert_same(
    model: K3ForCausalLM,
    held: K3Cache,
    row: int,
    committed: Tensor,
    following: Tensor,
    limit: float = LIMIT,
) -> None:
    """Batch row ``row`` holds exactly ``committed`` [n]: its state, and what it says to more."""
    assert int(held.lengths[row]) == len(committed)
    fresh = model.new_cache(1, len(committed) + 8)
    if len(committed):
        model(committed.unsqueeze(0), fresh)
    assert_equal_contents(held, row, fresh, 0, limit)
    held = copy.deepcopy(held)
    batch = len(held.lengths)
    ours, _ = model(following.expand(batch, 1), held)
    expected, _ = model(following.view(1, 1), fresh)
    assert_close(ours[row], expected[0], limit=limit, what="next hidden")
