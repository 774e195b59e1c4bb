"""The calibrated confidence of a block in one launch, against float64."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels.calibrate import calibrate
from dspark_kernels.calibrate_triton import calibrate as kernel
from dspark_kernels.calibrate_triton import refuses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def columns(slots: int) -> torch.Tensor:
    """T, a, b, d as fits make them; the last slot's change nothing."""
    found = torch.stack(
        [
            0.5 + 2 * torch.rand(slots),
            2 * torch.rand(slots),
            2 * torch.rand(slots),
            torch.randn(slots),
        ]
    )
    found[:, -1] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    return found.to(DEVICE)


EVERYWHERE = pytest.mark.parametrize(
    "mark", [pytest.param(None), pytest.param("gpu", marks=pytest.mark.gpu)]
)


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "given", "slots"), [(1, 8, 8), (3, 5, 7), (70, 1, 4), (33, 4, 4)])
def test_against_float64(
    rows: int, given: int, slots: int, dtype: torch.dtype, mark: str | None
) -> None:
    """Logits from hopeless to sure, where 1 - P has no digit left in float32."""
    logits = (30 * torch.randn(rows, given)).to(dtype).to(DEVICE)
    logits[0] = torch.linspace(-3, 25, given)
    table = columns(slots)
    assert refuses(logits, table) is None
    found, wanted = kernel(logits, table), calibrate(logits.double(), table.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-7)


def test_sure_slots_keep_their_digits() -> None:
    """One slot, curve (1, 1, 0): the confidence is the head's own, however sure."""
    logits = torch.tensor([[9.0], [12.0], [15.0], [-20.0]], device=DEVICE)
    table = torch.tensor([[1.0], [1.0], [1.0], [0.0]], device=DEVICE)
    doubt = 1 - kernel(logits, table).double()
    wanted = torch.sigmoid(-logits.double()).clamp(1e-7, 1 - 1e-7)
    torch.testing.assert_close(doubt, wanted, rtol=1e-3, atol=6.1e-8)


@EVERYWHERE
def test_a_number_that_is_none_stays_none(mark: str | None) -> None:
    """From its slot on, in its row alone, as in the reference. A GPU's minimum drops NaN where the
    interpreter's keeps it."""
    logits = torch.randn(3, 5, device=DEVICE)
    logits[1, 2] = torch.nan
    found, wanted = kernel(logits, columns(5)), calibrate(logits, columns(5))
    assert torch.equal(found.isnan(), wanted.isnan())
    assert found.isnan().sum() == 3


def test_what_the_kernel_refuses() -> None:
    logits, table = torch.zeros(2, 4), columns(4).cpu()
    assert "float64" in str(refuses(logits.double(), table))
    assert "contiguous" in str(refuses(logits.T, table))
    assert refuses(logits[:0], table) == "no logits"
    assert "backward" in str(refuses(logits.requires_grad_(), table))
