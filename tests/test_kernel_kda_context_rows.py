"""Rows that a kda drafter's context folds, in one launch, against float64 and training's code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark import ops
from dspark.draft import kda as layer
from dspark_kernels.kda_context_rows import kda_context_rows
from dspark_kernels.kda_context_rows_triton import kda_context_rows as kernel
from dspark_kernels.kda_context_rows_triton import refuses
from tests.test_draft_kda import draw, make_drafter
from tests.tolerance import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = -5.0
SMALL = [
    (1, 8, 2, 3, 16, 4, 4),
    (2, 1, 1, 2, 8, 5, 4),
    (3, 5, 3, 2, 24, 8, 3),
    (1, 16, 2, 1, 32, 9, 2),
]
REAL = [(1, 9, 4, 64, 128, 128, 4), (4, 9, 4, 64, 128, 128, 4), (1, 16, 5, 96, 128, 128, 4)]
NAMES = ("k", "v", "g", "beta", "window")


def arguments(
    batch: int, n: int, layers: int, heads: int, width: int, rank: int, taps: int, dtype: Any
) -> dict[str, Any]:
    """Of small sizes."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, device=DEVICE)

    every, channels = layers * heads, 3 * layers * heads * width
    return {
        "inputs": normal(batch, n, channels + layers * rank + every).to(dtype),
        "window": normal(batch, taps - 1, channels).to(dtype),
        "conv": normal(taps, channels, scale=0.5),
        "decay": normal(layers, rank, heads * width, scale=rank**-0.5).to(dtype),
        "dt_bias": normal(every, width),
        "rate": normal(every, 1).exp(),
        "lower_bound": BOUND,
    }


def check(sizes: tuple[int, ...], dtype: torch.dtype, ragged: bool) -> None:
    given = arguments(*sizes, dtype=dtype)  # type: ignore[arg-type]
    batch, n = sizes[:2]
    keep = (torch.arange(batch, device=DEVICE) * 3 + n - 1) % (n + 1) if ragged else None
    assert refuses(**given, keep=keep) is None
    found = kernel(**given, keep=keep)
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}
    wanted = kda_context_rows(**wide, keep=keep)
    assert found[-1].dtype == dtype
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert_close(one.double(), other, dtype=torch.float32, limit=1e-5, what=name)
    assert torch.equal(found[-1].double(), wanted[-1])  # moved, not computed


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SMALL)
def test_against_float64(
    sizes: tuple[int, ...], dtype: torch.dtype, ragged: bool, poison: None
) -> None:
    check(sizes, dtype, ragged)


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("sizes", REAL)
def test_at_real_sizes(sizes: tuple[int, ...], ragged: bool, poison: None) -> None:
    check(sizes, torch.bfloat16, ragged)


def test_reference_is_what_layers_train_with() -> None:
    """Two layers one by one, by the training code."""
    batch, n, layers, heads, width, rank, taps = 2, 6, 2, 3, 8, 5, 4
    given = arguments(batch, n, layers, heads, width, rank, taps, dtype=torch.float64)
    given = {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}
    k, v, g, beta, window = kda_context_rows(**given)
    part, every = heads * width, layers * heads
    channels = 3 * layers * part
    rows, low, logits = given["inputs"].split((channels, layers * rank, every), -1)
    rows = torch.cat((given["window"], rows), 1)
    assert torch.equal(window, rows[:, n:])
    for at in range(layers):
        own = [slice((p * layers + at) * part, (p * layers + at + 1) * part) for p in range(3)]
        keys = torch.cat([rows[..., own[1]], rows[..., own[2]]], -1)
        conv = torch.cat([given["conv"][:, s] for s in own], -1)
        here = slice(at * heads, (at + 1) * heads)
        wanted_k, wanted_v = layer.context_heads(keys, conv, heads)
        torch.testing.assert_close(k[:, :, here], wanted_k)
        torch.testing.assert_close(v[:, :, here], wanted_v)
        f = (low[..., at * rank : (at + 1) * rank] @ given["decay"][at]).unflatten(-1, (heads, -1))
        wanted = layer.log_decay(f, given["dt_bias"][here], given["rate"][here], BOUND)
        torch.testing.assert_close(g[:, :, here], wanted)
        torch.testing.assert_close(beta[:, :, here], logits[..., here].sigmoid())


def test_a_context_reads_by_the_kernel_what_it_reads_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two seats of different counts, in memory of its own and in place."""
    drafter = make_drafter().float()
    features = draw(2, 5, drafter.fc.in_features).float()
    found = []
    for how in ("torch", "triton"):
        context = drafter.new_context(2, 64)
        drafter.extend(context, features)
        with monkeypatch.context() as patch, torch.no_grad():
            if how == "triton":
                patch.setattr(ops, "kda_context_rows", kernel)
            drafter.extend(context, features, torch.tensor([2, 5]))
            drafter.extend(context, features, torch.tensor([0, 3]))
        found.append((context.state, context.window))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, limit=1e-5)


def test_what_the_kernel_refuses() -> None:
    given = arguments(1, 4, 2, 2, 16, 4, 4, dtype=torch.float32)
    assert refuses(**given) is None
    assert "17 rows" in str(refuses(**arguments(1, 17, 1, 1, 8, 4, 4, dtype=torch.float32)))
    assert "130 channels" in str(refuses(**arguments(1, 2, 1, 1, 130, 4, 4, dtype=torch.float32)))
    assert "window of" in str(refuses(**{**given, "window": given["window"].bfloat16()}))
    assert "one row" in str(refuses(**arguments(1, 4, 1, 1, 8, 4, 1, dtype=torch.float32)))
    turned = given["inputs"].transpose(1, 2).contiguous().transpose(1, 2)
    assert "contiguous" in str(refuses(**{**given, "inputs": turned}))
    same = torch.tensor([4], device=DEVICE).expand(2)
    two = arguments(2, 4, 1, 1, 8, 4, 4, dtype=torch.float32)
    assert "contiguous" in str(refuses(**two, keep=same))
    decay = given["decay"].requires_grad_()
    assert "backward" in str(refuses(**{**given, "decay": decay}))
