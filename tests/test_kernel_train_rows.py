"""What lies between the products of a layer: references against autograd, kernels against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.draft.attention import rms_norm
from dspark.draft.rotary import Rotation
from dspark_kernels import train_rows as reference
from tests.tolerance import assert_close

kernel = pytest.importorskip("dspark_kernels.train_rows_triton", reason="needs Triton")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HALF, EPS = torch.bfloat16, 1e-6


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def wide(inputs: list[Any]) -> list[Any]:
    return [x.double() if isinstance(x, Tensor) else x for x in inputs]


def tables(batch: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    angle = normal(batch, rows, width // 2, seed=9)
    return torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)


def compare(name: str, inputs: list[Any], *, wide_inputs: list[Any] | None = None) -> None:
    """A kernel on these inputs against the reference in float64."""
    found = getattr(kernel, name)(*inputs)
    wanted = getattr(reference, name)(*(wide_inputs or wide(inputs)))
    found, wanted = ((x,) if isinstance(x, Tensor) else x for x in (found, wanted))
    for at, (mine, exact) in enumerate(zip(found, wanted, strict=True)):
        assert mine.shape == exact.shape
        assert_close(mine, exact, what=f"{name} {at}")


NORMS = [(5, 24), (3, 256), (40, 8)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("rows", "width"), NORMS)
def test_norm(rows: int, width: int) -> None:
    hidden, added = normal(rows, width, seed=0), normal(rows, width, seed=1, dtype=HALF)
    weight, gradient = normal(width, seed=2), normal(rows, width, seed=3, dtype=HALF)
    for more in (added, None):
        inputs = [hidden, more, weight, EPS, HALF]
        compare("norm_rows", inputs, wide_inputs=[*wide(inputs[:4]), torch.float64])
    root = (hidden.square().mean(-1) + EPS).rsqrt()
    compare("norm_rows_back", [hidden, weight, root, gradient, normal(rows, width, seed=4)])
    inputs = [added, None, weight, EPS, torch.float32]
    compare("norm_rows", inputs, wide_inputs=[*wide(inputs[:4]), torch.float64])
    compare("norm_half_back", [added, weight, root, hidden])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "width"), [(1, 5, 3, 16), (2, 7, 2, 32), (2, 40, 1, 8)]
)
def test_turn(batch: int, rows: int, heads: int, width: int) -> None:
    x, gradient = (normal(batch, rows, heads, width, seed=s, dtype=HALF) for s in (0, 1))
    weight, start = normal(width, seed=2), 3
    inputs = [x, weight, *tables(batch, rows + 4, width), start, EPS]
    compare("turn_heads", inputs)
    compare("turn_heads_back", [*inputs, gradient])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("rows", "width"), [(3, 40), (70, 128)])
def test_gate(rows: int, width: int) -> None:
    gate, up, gradient = (normal(rows, width, seed=s, dtype=HALF) for s in range(3))
    compare("gate_silu", [gate, up])
    compare("gate_silu_back", [gate, up, gradient])


def test_more_tiles_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PARTS", 2)
    monkeypatch.setattr(kernel, "HEAD_PARTS", 2)
    test_norm(5, 24)
    test_turn(2, 90, 3, 16)


def agree(found: Any, call: Callable[..., Tensor], inputs: list[Tensor], pulled: Tensor) -> None:
    """`found` are the gradients of `call` at `inputs` for a gradient `pulled` of its result."""
    leaves = [x.double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(call(*leaves), leaves, pulled)
    for mine, exact in zip(found, wanted, strict=True):
        assert_close(mine, exact)


def test_references_are_the_layers_own_operations_and_their_gradients() -> None:
    """float64: the norms, rotation and gate of `attention.py` under autograd."""
    x, weight, pulled, through = (normal(*s, seed=i).double() for i, s in enumerate(
        ((6, 16), (16,), (6, 16), (6, 16))))  # fmt: skip
    total, normed, _ = reference.norm_rows(x, pulled, weight, EPS, torch.float64)
    assert torch.equal(total, x + pulled)
    assert_close(normed, rms_norm(total, weight, EPS))
    d_x, _, d_weight = reference.norm_rows_back(x, weight, _root(x), pulled, through)
    agree((d_x - through, d_weight), lambda a, w: rms_norm(a, w, EPS), [x, weight], pulled)

    x, pulled = (normal(2, 5, 3, 16, seed=s).double() for s in (5, 6))
    cos, sin = (t.double() for t in tables(2, 9, 16))
    turn = Rotation(cos[:, 4:, None], sin[:, 4:, None], False).turn
    assert_close(reference.turn_heads(x, weight, cos, sin, 4, EPS), turn(rms_norm(x, weight, EPS)))
    found = reference.turn_heads_back(x, weight, cos, sin, 4, EPS, pulled)
    agree(found, lambda a, w: turn(rms_norm(a, w, EPS)), [x, weight], pulled)

    gate, up, pulled = (normal(4, 10, seed=s).double() for s in (7, 8, 9))
    product = reference.gate_silu(gate, up)
    *gradients, again = reference.gate_silu_back(gate, up, pulled)
    assert_close(again, product)
    agree(gradients, lambda g, u: F.silu(g) * u, [gate, up], pulled)


def _root(x: Tensor) -> Tensor:
    return (x.square().mean(-1) + EPS).rsqrt()


def test_what_the_kernels_do_not_take_is_said() -> None:
    x = normal(2, 5, 3, 16, seed=0, dtype=HALF)
    assert kernel.refuses(x, normal(16, seed=1)) is None
    assert "contiguous" in (kernel.refuses(x.transpose(1, 2)) or "")
    assert "float64" in (kernel.refuses(x.double()) or "")
    assert "power of two" in (kernel.refuses(x[..., :12].contiguous()) or "")


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
def test_on_a_gpu() -> None:
    test_norm(3584, 2560)
    test_turn(1, 3584, 32, 128)
    test_gate(1024, 9728)
