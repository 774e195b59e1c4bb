"""AdamW in one pass: against torch's own, and packed moments against those that they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dspark_kernels import adamw as reference
from dspark_kernels.adamw import Moments, Rates, unpacked
from dspark_kernels.moments import BLOCK
from tests.tolerance import assert_close

kernel = pytest.importorskip("dspark_kernels.adamw_triton", reason="needs Triton")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
COUNT = 1500
RATES = Rates(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, updates=1, seed=77)
RULES = pytest.mark.parametrize("rule", [reference.adamw, kernel.adamw], ids=["torch", "triton"])


def fresh(kind: str, count: int = COUNT) -> Moments:
    if kind == "int8":
        blocks = -(-count // BLOCK)
        sizes = (count, torch.int8), (count, torch.uint8), (blocks, torch.float32)
        first, second, scales = (torch.zeros(n, dtype=d, device=DEVICE) for n, d in sizes)
        return Moments(first, second, scales, scales.clone())
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    return Moments(*(torch.zeros(count, dtype=dtype, device=DEVICE) for _ in range(2)))


def values(moments: Moments) -> tuple[Tensor, Tensor]:
    return (
        unpacked(moments.first, moments.first_scales),
        unpacked(moments.second, moments.second_scales),
    )


class Run:
    """Some updates by a rule, beside torch's AdamW with the scaled gradients."""

    def __init__(
        self,
        rule,
        kind: str,
        updates: int = 6,
        dtype: torch.dtype = torch.float32,
        count: int = COUNT,
    ):
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(count, generator=generator).to(DEVICE)
        spread = torch.linspace(0.1, 2, count)
        self.weight, self.moments = start.clone(), fresh(kind, count)
        self.copy = torch.full((count,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        self.exact = nn.Parameter(start.clone())
        optimiser = torch.optim.AdamW(
            [self.exact], lr=RATES.lr, betas=(RATES.beta1, RATES.beta2), eps=RATES.eps,
            weight_decay=RATES.weight_decay,
        )  # fmt: skip
        for at in range(1, updates + 1):
            gradient = (torch.randn(count, generator=generator) * spread).to(dtype).to(DEVICE)
            scale, rates = torch.tensor(0.25, device=DEVICE), replace(RATES, updates=at, seed=at)
            rule(self.weight, gradient, self.moments, scale, rates, self.copy)
            self.exact.grad = 0.25 * gradient.float()
            optimiser.step()
        self.state = optimiser.state[self.exact]


@RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_float32_moments_give_torchs_own_update(rule, dtype: torch.dtype) -> None:
    run = Run(rule, "fp32", dtype=dtype)
    assert_close(run.weight, run.exact.detach(), limit=1e-6)
    for found, key in zip(values(run.moments), ("exp_avg", "exp_avg_sq"), strict=True):
        assert_close(found, run.state[key], limit=1e-6)
    assert torch.equal(run.copy, run.weight.bfloat16())


@RULES
@pytest.mark.parametrize(("kind", "limit"), [("bf16", 2**-7), ("int8", 0.03)])
def test_packed_moments_stay_near_and_unbiased(rule, kind: str, limit: float) -> None:
    """Neighbours of bf16 lie 2^-7 apart at most; means of 1,500 values are ten times closer."""
    run = Run(rule, kind)
    for found, key in zip(values(run.moments), ("exp_avg", "exp_avg_sq"), strict=True):
        exact = run.state[key]
        assert (found - exact).norm() < limit * exact.norm()
    second, exact = values(run.moments)[1], run.state["exp_avg_sq"]
    assert float(second.mean() / exact.mean()) == pytest.approx(1, abs=limit / 10)
    assert (second > 0).all()
    assert_close(run.weight, run.exact.detach(), dtype=torch.bfloat16)


@pytest.mark.gpu(gib=4)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_a_table_of_real_size(kind: str) -> None:
    """Of a sequential head, 151,936 codes of 256 numbers, gradients in half precision."""
    run = Run(kernel.adamw, kind, updates=3, dtype=torch.bfloat16, count=151_936 * 256)
    limits = {"fp32": 1e-6, "bf16": 2**-7, "int8": 0.03}
    for found, key in zip(values(run.moments), ("exp_avg", "exp_avg_sq"), strict=True):
        exact = run.state[key].double()
        assert (found.double() - exact).norm() < limits[kind] * exact.norm()
    assert torch.equal(run.copy, run.weight.bfloat16())
    packed = None if kind == "fp32" else torch.bfloat16
    assert_close(run.weight, run.exact.detach(), dtype=packed, limit=None if packed else 1e-6)


@RULES
def test_rounding_is_right_in_the_mean(rule) -> None:
    """One moment, 60 times over: bf16 at 1 + 2^-9, a quarter of the way to its neighbour."""
    wanted, count = 1 + 2**-9, 2048
    moments = fresh("bf16", count)
    rates = replace(RATES, beta1=0.0, beta2=0.0, weight_decay=0.0)
    seen = []
    for seed in range(60 if GPU else 20):
        gradient = torch.full((count,), wanted, device=DEVICE)
        one = torch.ones((), device=DEVICE)
        rule(torch.zeros(count, device=DEVICE), gradient, moments, one, replace(rates, seed=seed))
        seen.append(moments.first.double().mean())
    share = (torch.stack(seen).mean() - 1) / 2**-7  # 1/4 of the draws go up
    deviation = (0.25 * 0.75 / (count * len(seen))) ** 0.5
    assert float(share) == pytest.approx(0.25, abs=5 * deviation)


@RULES
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_a_scale_that_is_not_finite_changes_nothing(rule, kind: str, scale: float) -> None:
    run = Run(rule, kind, updates=2)
    weight, state = run.weight.clone(), [x.clone() for x in values(run.moments)]
    gradient = torch.ones(COUNT, device=DEVICE)
    rule(run.weight, gradient, run.moments, torch.tensor(scale, device=DEVICE), RATES)
    assert torch.equal(run.weight, weight)
    assert all(torch.equal(a, b) for a, b in zip(values(run.moments), state, strict=True))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_the_same_seed_rounds_the_same_way(kind: str) -> None:
    first, second = Run(kernel.adamw, kind), Run(kernel.adamw, kind)
    assert torch.equal(first.weight, second.weight)
    assert all(
        torch.equal(a, b)
        for a, b in zip(values(first.moments), values(second.moments), strict=True)
    )


def test_what_the_kernel_does_not_take_is_said() -> None:
    weight, scale = torch.zeros(4, device=DEVICE), torch.ones((), device=DEVICE)
    assert kernel.refuses(weight, weight, fresh("fp32", 4), scale, RATES) is None
    assert "float64" in (
        kernel.refuses(weight.double(), weight, fresh("fp32", 4), scale, RATES) or ""
    )


def test_bytes() -> None:
    """Weight in and out 8, gradient 2, copy 2, codes in and out 4, and 16 for every 256 values."""
    assert reference.cost(512, 2, fresh("int8", 512), True) == 512 * 16 + 2 * 16
    assert reference.cost(512, 4, fresh("fp32", 512)) == 512 * (8 + 4 + 16)
