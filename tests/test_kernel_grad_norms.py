"""Norms of many gradients at once, against torch's in float64."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels import grad_norms as reference

kernel = pytest.importorskip("dspark_kernels.grad_norms_triton", reason="needs Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = pytest.mark.parametrize(
    "rule", [reference.grad_norms, kernel.grad_norms], ids=["torch", "triton"]
)
PART = kernel.TILE * kernel.TILES


@RULES
def test_norms_are_those_of_float64(rule) -> None:
    """Sizes around a tile and a part, both dtypes, values whose squares leave half precision."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1,), (kernel.TILE,), (kernel.TILE + 1,), (PART - 8,), (2, PART), (0,), (3, 5)]
    gradients = [(torch.randn(size, generator=generator) * 1e-5).to(DEVICE) for size in sizes]
    gradients = [g.bfloat16() if at % 2 else g for at, g in enumerate(gradients)]
    expected = torch.stack([g.double().square().sum().sqrt() for g in gradients])
    found = rule(gradients)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(rule(gradients), found)


@pytest.mark.gpu(gib=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms_of_real_sizes(dtype: torch.dtype) -> None:
    """A table of the sequential head and a layer's matrices, of Qwen3-4B's sizes."""
    sizes = [(151_936, 256), (2560, 9728), (4096, 2560), (2560,), (128,)]
    gradients = [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]
    assert kernel.refuses(gradients) is None
    expected = torch.stack([g.double().square().sum().sqrt() for g in gradients])
    torch.testing.assert_close(kernel.grad_norms(gradients).double(), expected, rtol=1e-6, atol=0)


@RULES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_where_it_is(rule, bad: float) -> None:
    gradients = [torch.ones(300, device=DEVICE) for _ in range(3)]
    gradients[1][299] = bad
    assert torch.isfinite(rule(gradients)).tolist() == [True, False, True]


@RULES
def test_none_at_all_is_refused(rule) -> None:
    with pytest.raises(ValueError, match="at least one"):
        rule([])


def test_what_the_kernel_does_not_take_is_said() -> None:
    g = torch.zeros(16, device=DEVICE)
    assert kernel.refuses([g, g.bfloat16()]) is None
    assert "float16" in (kernel.refuses([g, g.half()]) or "")
    assert "16 bytes" in (kernel.refuses([g[1:]]) or "")
    assert "contiguous" in (kernel.refuses([g.view(4, 4).T]) or "")


def test_bytes() -> None:
    g = torch.zeros(10)
    assert reference.cost([g, g.bfloat16()]) == (60, 40)
