"""Caches of the tiny K3 decoder in the middle of their work, and the texts that they hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.k3.cache import K3Cache
from tests.k3_fresh import Poisoned, assert_same, shared
from tests.k3_tiny import tiny_tokens

SEVEN = torch.tensor(7)


def busy(batch: int = 3, max_length: int = 48) -> tuple[K3Cache, list[Tensor]]:
    """A cache between two rounds, with a replay to fold, rows of different lengths; the texts."""
    model = shared()
    held = model.new_cache(batch, max_length, Poisoned())
    lengths = [6, 1, 11, 4][:batch]
    tokens = tiny_tokens(batch, max(lengths), seed=3)
    valid = torch.arange(tokens.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    model(tokens, held, valid=valid)
    draft, accepted = tiny_tokens(batch, 4, seed=4), [3, 1, 4, 0][:batch]
    model(draft, held, commit=False)
    held.commit(torch.tensor(accepted))
    rows = zip(tokens, lengths, draft, accepted, strict=True)
    return held, [torch.cat((text[:n], more[:a])) for text, n, more, a in rows]


def single(length: int, seed: int = 9) -> tuple[K3Cache, Tensor]:
    """A request by itself, with a replay to fold."""
    model, text = shared(), tiny_tokens(1, length + 2, seed=seed)
    held = model.new_cache(1, length + 4, Poisoned())
    model(text[:, :length], held)
    model(tiny_tokens(1, 3, seed=seed)[:, :2], held, commit=False)
    held.rollback()
    model(text[:, length:], held, commit=False)
    held.commit(2)
    return held, text[0]


def assert_texts(held: K3Cache, texts: Sequence[Tensor]) -> None:
    assert held.lengths.tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        assert_same(shared(), held, row, text, SEVEN)
