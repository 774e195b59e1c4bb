"""The fused block of a `kda` drafter: the layer's own functions, then the kernel in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.draft import kda as layer
from dspark_kernels import linear_kda
from dspark_kernels.kda_linear import kda_linear
from dspark_kernels.kda_linear_triton import kda_linear as kernel
from dspark_kernels.kda_linear_triton import refuses
from tests.tolerance import assert_close

BOUND, EPS = -5.0, 1e-5
ORDERS: list[linear_kda.Order] = ["gla", 0, 1, 3, 7]


def block(
    batch: int, slots: int, heads: int, width: int, rank: int, *, taps: int = 4,
    softmax: bool = False, dtype: Any = torch.float32, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Arguments of one layer; states and windows are views of those of several layers."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, device=device)

    channels = heads * width
    states = normal(batch, 3 * heads, width, width)
    windows = normal(batch, taps - 1, 3, 2, channels).to(dtype)
    return {
        "inputs": normal(batch, slots, 4 * channels + rank + heads).to(dtype),
        "window": windows[:, :, :, 1],
        "conv": normal(taps, 3 * channels, scale=0.5),
        "decay": normal(rank, channels, scale=rank**-0.5).to(dtype),
        "dt_bias": normal(heads, width),
        "rate": normal(heads, 1).exp(),
        "norm": 1 + normal(width, scale=0.2).to(dtype),
        "state": states[:, heads : 2 * heads],
        "lower_bound": BOUND,
        "eps": EPS,
        "sharpness": normal(heads) if softmax else None,
        "gain": normal(heads, 1) if softmax else None,
    }


def double(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_reference_is_the_layer_that_is_trained(order: linear_kda.Order, softmax: bool) -> None:
    given = double(block(2, 8, 3, 6, 5, softmax=softmax))
    heads, channels = 3, 18
    rows, gate, low, beta = given["inputs"].split((3 * channels, channels, 5, heads), -1)
    rows = torch.cat((given["window"].flatten(2), rows), 1)
    q, k, v = layer.block_heads(rows, given["conv"], heads)
    f = (low @ given["decay"]).view(k.shape)
    g = layer.log_decay(f, given["dt_bias"], given["rate"], BOUND)
    state = given["state"]
    out = linear_kda.block(q, k, v, g, beta.sigmoid(), state, order, None, BOUND)
    if softmax:
        out = out + given["gain"] * layer.slot_softmax(q, k, v, given["sharpness"])
    wanted = layer.gated_norm(out, given["norm"], gate.reshape(out.shape), EPS)
    assert_close(kda_linear(order=order, **given), wanted.flatten(2))


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_kernel(order: linear_kda.Order, softmax: bool, poison: None) -> None:
    given = block(2, 8, 2, 24, 20, softmax=softmax)
    assert refuses(order=order, **given) is None
    found = kernel(order=order, **given)
    assert found.dtype == torch.float32
    assert_close(found.double(), kda_linear(order=order, **double(given)), dtype=torch.float32)


@pytest.mark.parametrize(("slots", "width", "rank", "taps"), [(1, 16, 8, 2), (5, 10, 3, 4)])
def test_kernel_of_other_sizes(slots: int, width: int, rank: int, taps: int, poison: None) -> None:
    given = block(1, slots, 2, width, rank, taps=taps)
    found = kernel(order=0, **given)
    assert_close(found.double(), kda_linear(order=0, **double(given)), dtype=torch.float32)


def test_kernel_of_narrow_rows(poison: None) -> None:
    given = block(1, 8, 2, 16, 16, dtype=torch.bfloat16)
    found = kernel(order=1, **given)
    assert found.dtype == torch.bfloat16
    assert_close(found.double(), kda_linear(order=1, **double(given)), dtype=torch.bfloat16)


def test_the_strongest_and_the_weakest_decay(poison: None) -> None:
    """Factors of exp(40) between the first slot and the last, and of one."""
    for bias in (30.0, -30.0):
        given = block(1, 8, 2, 16, 8)
        given["dt_bias"] = torch.full_like(given["dt_bias"], bias)
        given["rate"] = torch.ones_like(given["rate"])
        found = kernel(order=2, **given)
        assert_close(found.double(), kda_linear(order=2, **double(given)), dtype=torch.float32)


def test_state_and_window_are_only_read() -> None:
    given = block(2, 4, 2, 16, 8)
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
    kernel(order=1, **given)
    for name, x in before.items():
        assert torch.equal(given[name], x), name


def test_refused_in_words() -> None:
    given = block(2, 8, 2, 16, 8)
    for change, reason in (
        ({"inputs": given["inputs"].double()}, "float64"),
        ({"state": given["state"].bfloat16()}, "float32"),
        ({"lower_bound": -20.0}, "overflow"),
        ({"decay": given["decay"].t().contiguous().t()}, "contiguous"),
        ({"sharpness": torch.zeros(4)[::2], "gain": torch.zeros(2)}, "contiguous"),
        ({"sharpness": torch.zeros(2), "gain": torch.zeros(4)[::2]}, "contiguous"),
        ({"inputs": given["inputs"].repeat(1, 3, 1)}, "slots"),
        ({"norm": given["norm"].clone().requires_grad_()}, "backward"),
    ):
        assert reason in (refuses(order=0, **{**given, **change}) or "taken")
    with pytest.raises(ValueError, match="order"):
        kernel(order=8, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("batch", "width"), [(1, 128), (5, 128), (2, 80), (3, 64)])
def test_gpu(
    batch: int, width: int, order: linear_kda.Order, dtype: torch.dtype, poison: None
) -> None:
    for softmax in (False, True):
        given = block(batch, 8, 7, width, 128, softmax=softmax, dtype=dtype, device="cuda")
        assert refuses(order=order, **given) is None
        found = kernel(order=order, **given)
        assert_close(found.double(), kda_linear(order=order, **double(given)), dtype=dtype)
