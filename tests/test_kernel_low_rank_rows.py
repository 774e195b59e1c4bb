"""Second factors of low-rank projections against float64, rows cut out of a wider product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_kernels import low_rank_rows as reference
from dspark_kernels import low_rank_rows_triton as kernel
from dspark_kernels.interpreted_floats import exact_floats
from tests.tolerance import assert_close

exact_floats()
SIZES = [(1, 2, 16, 40), (1, 1, 64, 96), (3, 2, 32, 33), (16, 2, 16, 70)]


def inputs(
    n: int, factors: int, rank: int, outputs: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    wide = torch.randn(n, factors * rank + 24, device=device).to(dtype)
    wide[:, :8] = torch.nan  # what stands beside the rows is not read
    wide[:, 8 + factors * rank :] = torch.nan
    x = wide[:, 8 : 8 + factors * rank].unflatten(1, (factors, rank))
    weight = torch.randn(factors, outputs, rank, device=device) * rank**-0.5
    return x, weight.to(dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("nfr,for->fno", x.double(), weight.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_interpreted(size: tuple[int, ...], dtype: torch.dtype, poison: None) -> None:
    given = inputs(*size, dtype)
    assert kernel.refuses(*given) is None
    assert_close(kernel.low_rank_rows(*given), exact(*given), dtype=dtype)
    assert_close(reference.low_rank_rows(*given), exact(*given), dtype=dtype)


def test_what_the_kernel_refuses() -> None:
    x, weight = inputs(17, 2, 16, 8, torch.float32)
    assert "17 rows" in (kernel.refuses(x, weight) or "")
    x, weight = inputs(2, 2, 24, 8, torch.float32)
    assert "rank of 24" in (kernel.refuses(x, weight) or "")
    x, weight = inputs(2, 2, 16, 8, torch.float32)
    assert "contiguous" in (kernel.refuses(x, weight[:, ::2]) or "")
    assert "weights" in (kernel.refuses(x, weight.bfloat16()) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 8, 16])
def test_on_a_gpu(n: int, dtype: torch.dtype) -> None:
    given = inputs(n, 2, 128, 4096, dtype, "cuda")
    assert_close(kernel.low_rank_rows(*given), exact(*given), dtype=dtype)
