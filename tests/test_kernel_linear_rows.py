"""Projections of a few rows: the reference against the model's layers, the kernel against it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark import ops
from dspark.errors import UserError
from dspark.k3.layers import GatedMLP, rms_norm
from dspark_kernels import linear_rows as plain
from dspark_kernels import linear_rows_triton as kernel
from dspark_kernels.linear_rows_triton import Plan
from tests.k3_tiny import PLAIN, TINY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
ROUNDING = 4e-3
"""bfloat16 rounds to 2^-9 of a number; three roundings meet in a result."""


def _random(n: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, norm and residual inside larger tensors whose other rows are NaN."""

    def inside(rows: int, columns: int, scale: float, centre: float = 0.0) -> Tensor:
        whole = torch.full((rows + 3, columns), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        whole[:rows] = centre + scale * torch.randn(rows, columns, device=DEVICE)
        return whole[:rows]

    x, weight = inside(n, inputs, 3.0), inside(outputs, inputs, inputs**-0.5)
    return x, weight, inside(1, inputs, 0.1, 1.0)[0], inside(n, outputs, 1.0)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def _check(n: int, inputs: int, outputs: int, how: Plan | None, more: bool) -> None:
    x, weight, norm, residual = _random(n, inputs, outputs)
    given = (norm, residual) if more else (None, None)
    if how is None:
        found = kernel.linear_rows(x, weight, norm=given[0], eps=EPS, residual=given[1])
    else:
        found = kernel.project(x, weight, given[0], EPS, given[1], weight.dtype, how)
    norm64, residual64 = (None if t is None else t.double() for t in given)
    wanted = plain.linear_rows(
        x.double(), weight.double(), norm=norm64, eps=EPS, residual=residual64
    )
    assert found.shape == wanted.shape
    assert found.dtype == weight.dtype
    assert _error(found, wanted) < ROUNDING


def test_the_reference_is_the_models_projection() -> None:
    x, weight = torch.randn(3, 24), torch.randn(7, 24)
    norm, residual = torch.randn(24), torch.randn(3, 7)
    found = plain.linear_rows(x, weight, norm=norm, eps=EPS, residual=residual)
    wanted = residual + torch.nn.functional.linear(rms_norm(x, norm, EPS), weight)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["situ", "silu"])
def test_the_reference_is_the_models_gated_mlp(config) -> None:  # type: ignore[no-untyped-def]
    mlp = GatedMLP(config, 20)
    x = 5 * torch.randn(3, config.hidden_size)
    situ = (config.situ_beta, config.situ_linear_beta) if config.hidden_act == "situ" else None
    packed = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    hidden = plain.gated_rows(x, packed, situ=situ)
    torch.testing.assert_close(plain.linear_rows(hidden, mlp.down_proj.weight), mlp(x))


@pytest.mark.parametrize("more", [False, True], ids=["plain", "norm-and-residual"])
@pytest.mark.parametrize("how", [None, Plan(16, 32, 4, 2, split=3)], ids=["default", "split"])
@pytest.mark.parametrize("n", [1, 5, 16])
def test_kernel(n: int, how: Plan | None, more: bool, poison: None) -> None:
    if how is not None:
        how = Plan(how.out, how.step, how.warps, how.stages, how.split, dot=n > 1)
    _check(n, 144, 37, how, more)


@pytest.mark.parametrize("held", [1, 4, 9])
def test_a_row_that_waits_in_registers(held: int, poison: None) -> None:
    """Of nine tiles, some or all."""
    _check(1, 144, 37, Plan(16, 16, 4, 1, held=held), more=True)


@pytest.mark.parametrize("size", [0, 1 << 10, 1 << 30])
def test_what_is_read_soon_changes_nothing(
    size: int, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of the other weight is asked for, and NaN in it harms nobody."""
    monkeypatch.setattr(kernel, "SOON_BYTES", size)
    x, weight, norm, residual = _random(1, 1024, 24)
    soon = torch.full((9, 48), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    more = {"norm": norm, "eps": EPS, "residual": residual}
    assert kernel.refuses(x, weight, soon=soon, **more) is None
    found = kernel.linear_rows(x, weight, soon=soon, **more)
    assert torch.equal(found, kernel.linear_rows(x, weight, **more))


@pytest.mark.parametrize("situ", [None, (4.0, 25.0)], ids=["silu", "situ"])
@pytest.mark.parametrize("n", [1, 3])
def test_gated_kernel(n: int, situ: plain.Situ, poison: None) -> None:
    x, weight, norm, _ = _random(n, 96, 26)
    found = kernel.gated_rows(x, weight, norm=norm, eps=EPS, situ=situ)
    wanted = plain.gated_rows(x.double(), weight.double(), norm=norm.double(), eps=EPS, situ=situ)
    assert _error(found, wanted) < ROUNDING


def test_small_arguments_of_the_activation_keep_their_digits() -> None:
    """tanh by exponentials cancels near zero; there the kernel takes the series."""
    x = torch.full((1, 16), 2.0**-10, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.zeros(32, 16, dtype=torch.bfloat16, device=DEVICE)
    weight[:, 0] = torch.logspace(-6, 3, 32, base=2).bfloat16()
    found = kernel.gated_rows(x, weight, situ=(4.0, 25.0)).double()
    wanted = plain.gated_rows(x.double(), weight.double(), situ=(4.0, 25.0))
    torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=0.0)


def test_a_row_does_not_depend_on_its_batch() -> None:
    x, weight, norm, _ = _random(7, 64, 24)
    how = Plan(16, 32, 4, 2, dot=True)
    alone = kernel.project(x[:2], weight, norm, EPS, None, weight.dtype, how)
    among = kernel.project(x, weight, norm, EPS, None, weight.dtype, how)
    assert torch.equal(alone, among[:2])


def test_what_the_kernel_refuses() -> None:
    x, weight, norm, residual = _random(2, 32, 8)
    assert kernel.refuses(x, weight, norm=norm, eps=EPS, residual=residual) is None
    assert "float32" in str(kernel.refuses(x, weight.float()))
    assert "dtype" in str(kernel.refuses(x.float(), weight))
    assert "rows" in str(kernel.refuses(x.repeat(9, 1), weight))
    assert "contiguous" in str(kernel.refuses(x, weight.t().contiguous().t()))
    assert "multiple" in str(kernel.refuses(x[:, :8].contiguous(), weight[:, :8].contiguous()))
    weight.requires_grad_()
    assert "backward" in str(kernel.refuses(x, weight))
    with torch.no_grad():
        assert kernel.refuses(x, weight) is None


def test_asked_for_by_name_it_runs_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS", "triton")
    x, weight, _, _ = _random(1, 32, 8)
    ops.forget()
    ops.linear_rows(x, weight)
    assert ops.ran()["linear_rows"] == "triton"
    with pytest.raises(UserError, match="linear_rows does not take this: weights are"):
        ops.linear_rows(x.float(), weight.float())


SIZES = [(2304, 12576), (4096, 2304), (2304, 2080), (7168, 16768), (576, 200)]


@pytest.mark.gpu
@pytest.mark.parametrize("more", [False, True], ids=["plain", "norm-and-residual"])
@pytest.mark.parametrize("n", [1, 2, 8, 16])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_kernel_at_real_sizes(n: int, inputs: int, outputs: int, more: bool, poison: None) -> None:
    _check(n, inputs, outputs, None, more)


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize("n", [1, 8])
def test_offsets_beyond_32_bits(n: int) -> None:
    """The last rows of a weight of more than 2^31 numbers."""
    x = torch.randn(n, 7168, device=DEVICE).bfloat16()
    weight = torch.zeros(300_032, 7168, dtype=torch.bfloat16, device=DEVICE)
    weight[-16:] = torch.randn(16, 7168, device=DEVICE) * 7168**-0.5
    found = kernel.project(x, weight, None, 0.0, None, weight.dtype, Plan(64, 256, 4, 3, dot=n > 1))
    assert not found[:, :-16].any()
    assert _error(found[:, -16:], x.double() @ weight[-16:].double().t()) < ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8])
def test_captured_calls_read_what_is_there_at_replay(n: int) -> None:
    x, weight, norm, residual = _random(n, 2304, 4096)
    call = lambda: kernel.linear_rows(x, weight, norm=norm, eps=EPS, residual=residual)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(found, call(), rtol=0, atol=0)
