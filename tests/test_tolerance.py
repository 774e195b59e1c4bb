"""The tolerance policy catches the errors it is there for, and lets rounding through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tolerance import LIMITS, assert_close


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _zeroed_row(x: Tensor) -> Tensor:
    x = x.clone()
    x[3] = 0
    return x


def _one_percent(x: Tensor) -> Tensor:
    return x * 1.01


def _one_element(x: Tensor) -> Tensor:
    x = x.clone()
    flat = x.view(-1)
    flat[flat.abs().argmax()] *= 1.1
    return x


def _one_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0] = float("nan")
    return x


PLANTED = [_zeros, _zeroed_row, _one_percent, _one_element, _one_nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plant", PLANTED)
def test_planted_errors_are_caught(plant: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    reference = torch.randn(37, 60, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_close(plant(reference).to(dtype), reference)


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_rounding_passes(dtype: torch.dtype) -> None:
    reference = torch.randn(37, 60, dtype=torch.float64)
    assert_close(reference.to(dtype), reference)


def test_shape_and_looser_limit_are_refused() -> None:
    reference = torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(reference[:1].float(), reference)  # would broadcast
    with pytest.raises(AssertionError, match="looser"):
        assert_close(reference.float(), reference, limit=1e-2)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close((reference * (1 + 2e-5)).float(), reference, limit=1e-5)


def test_zero_reference_asks_for_exact_zeros() -> None:
    zero = torch.zeros(3)
    assert_close(zero.clone(), zero)
    with pytest.raises(AssertionError):
        assert_close(zero + 1e-30, zero)
    assert_close(torch.empty(0, 4), torch.empty(0, 4))


def test_poison_reaches_every_allocation(poison: None) -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(2)).isnan().all()
    assert torch.ones(2).new_empty(4).isnan().all()
    assert (torch.empty(2, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
