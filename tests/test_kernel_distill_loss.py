"""The distillation loss over logits: reference against autograd, kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dspark_kernels import distill_loss
from tests.tolerance import assert_close

kernel = pytest.importorskip("dspark_kernels.distill_loss_triton", reason="needs Triton")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HALF, WIDE = torch.bfloat16, torch.float32


class Case:
    """Logits of some slots and of the positions they imitate; labels; coefficients of terms."""

    def __init__(
        self, slots: int, positions: int, vocab: int, dtype: torch.dtype, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).mul(3).to(dtype).to(DEVICE)

        def below(limit: int) -> Tensor:
            return torch.randint(limit, (slots,), generator=generator).to(DEVICE)

        self.z, self.target = normal(slots, vocab), normal(positions, vocab)
        self.rows, self.labels = below(positions), below(vocab)
        self.coefficients = torch.rand(5, slots, generator=generator).to(DEVICE)

    def inputs(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z, target = (x if dtype is None else x.to(dtype) for x in (self.z, self.target))
        return z, target, self.rows, self.labels


def compare(case: Case, divergences: bool) -> None:
    """Both calls of the kernel against the reference in float64."""
    exact = case.inputs(torch.float64)
    expected = distill_loss.terms(*exact, divergences)
    found = kernel.terms(*case.inputs(), divergences)
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, wanted)
    wide = case.coefficients.double()
    gradient = distill_loss.pull(*exact, divergences, expected, wide)
    z, *others = case.inputs()
    pulled = kernel.pull(z, *others, divergences, found, case.coefficients)
    assert pulled.data_ptr() == z.data_ptr()
    assert_close(pulled, gradient)


@pytest.mark.parametrize("divergences", [False, True])
def test_the_reference_is_the_gradient_of_its_own_terms(divergences: bool) -> None:
    case = Case(7, 4, 33, torch.float64)
    z, target, rows, labels = case.inputs()
    leaf = z.clone().requires_grad_(True)
    values, _ = distill_loss.terms(leaf, target, rows, labels, divergences)
    (values * case.coefficients).sum().backward()
    found = distill_loss.terms(z, target, rows, labels, divergences)
    pulled = distill_loss.pull(
        z.clone(), target, rows, labels, divergences, found, case.coefficients.double()
    )
    assert_close(pulled, leaf.grad, limit=1e-9)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("divergences", [False, True])
@pytest.mark.parametrize("dtype", [WIDE, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("slots", "positions", "vocab"), [(5, 3, 301), (3, 3, 64), (1, 1, 5)])
def test_kernels_agree_with_float64(
    slots: int, positions: int, vocab: int, dtype: torch.dtype, divergences: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernel, "TILE", 128)
    monkeypatch.setattr(kernel, "PULL_TILE", 64)
    compare(Case(slots, positions, vocab, dtype, seed=slots), divergences)


def test_equal_logits_are_at_no_distance() -> None:
    case = Case(4, 4, 200, HALF)
    case.target, case.rows = case.z.clone(), torch.arange(4, device=DEVICE)
    values, _ = kernel.terms(*case.inputs(), False)
    assert values[1].eq(0).all()
    torch.testing.assert_close(values[2], torch.zeros(4, device=DEVICE), rtol=0, atol=1e-6)


def test_rows_apart_in_memory_and_what_lies_between_is_not_read() -> None:
    case = Case(4, 3, 100, HALF)
    padded = [torch.full((len(x), 128), torch.nan, dtype=HALF, device=DEVICE) for x in (
        case.z, case.target
    )]  # fmt: skip
    for wide, x in zip(padded, (case.z, case.target), strict=True):
        wide[:, :100] = x
    case.z, case.target = (wide[:, :100] for wide in padded)
    compare(case, True)
    assert padded[0][:, 100:].isnan().all()


def test_what_the_kernel_does_not_take_is_said() -> None:
    z, target, rows, labels = Case(2, 2, 8, torch.float64).inputs()
    assert "float64" in (kernel.refuses(z, target, rows, labels, False) or "")
    half = z.to(HALF)
    assert kernel.refuses(half, half, rows, labels, False) is None
    assert "contiguous" in (kernel.refuses(half.T, half, rows, labels, False) or "")


def test_bytes_count_a_shared_position_once() -> None:
    """Two reads and a write of z, two reads of the target, two bytes each."""
    moved, operations = distill_loss.cost(10, 4, 100)
    assert moved == (3 * 10 + 2 * 4) * 100 * 2
    assert operations > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("divergences", [False, True])
def test_the_vocabulary_of_qwen3_on_a_gpu(divergences: bool) -> None:
    compare(Case(96, 61, 151_936, HALF), divergences)
    first, second = (kernel.terms(*Case(40, 9, 151_936, HALF).inputs(), True) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_axis_of_a_launch_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a small vocabulary has more slots than the second axis of a grid may be long."""
    grids: list[tuple[int, ...]] = []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    for name in ("_terms", "_pull"):
        monkeypatch.setattr(kernel, name, Launches())
    z, rows = torch.zeros(70_000, 1), torch.zeros(70_000, dtype=torch.int64)
    found = kernel.terms(z, z[:1], rows, rows, False)
    kernel.pull(z, z[:1], rows, rows, False, found, torch.zeros(5, 70_000))
    assert len(grids) == 2
    assert all(max((*grid[1:], 1)) <= 65_535 for grid in grids)
