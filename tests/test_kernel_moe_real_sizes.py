"""Experts of many rows at real sizes on a GPU: float64, bits, graphs and the static pass."""

from __future__ import annotations

import pytest
import torch

from dspark import ops
from dspark.k3.config import K3Config
from dspark_kernels import moe_grouped_triton as kernel
from tests.test_kernel_moe_decode import EPS, _random, _rows
from tests.test_kernel_moe_grouped import check
from tests.test_static_kernels import WIDE, WIDE_PLAIN, follow

pytestmark = pytest.mark.gpu(gib=24)
TWIN = {"D": 3072, "E": 64, "k": 16, "inner": 3072, "S": 6144, "latent": 1536, "packed": False}
KIMI = {"D": 2304, "E": 32, "k": 8, "inner": 1024, "S": 1024, "latent": None, "packed": False}
K3 = {"D": 7168, "E": 40, "k": 16, "inner": 3072, "S": 6144, "latent": 3584, "packed": True}
LAYERS = pytest.mark.parametrize("sizes", [TWIN, KIMI, K3], ids=["twin", "kimi_linear", "k3"])


@LAYERS
@pytest.mark.parametrize("n", [17, 64, 576])
def test_against_float64(sizes: dict[str, int], n: int, poison: None) -> None:
    moe = _random(**sizes)
    check(moe, n, kernel.block_plan(n, moe), normed=False)


@pytest.mark.parametrize("rows", [32, 64])
def test_every_shape_of_blocks(rows: int, poison: None) -> None:
    """A norm goes into the dense product."""
    for sizes in (TWIN, KIMI):
        moe = _random(**sizes)
        check(moe, 144, kernel.plan_of(144, moe, rows))


@LAYERS
def test_company_and_order_change_no_bit_of_a_row(sizes: dict[str, int], poison: None) -> None:
    """Nor does another run."""
    moe = _random(**sizes)
    x, norm, residual = _rows(576, moe.inputs.shape[1])
    how = kernel.block_plan(576, moe)
    found, chosen = kernel.by_blocks(x, moe, norm, EPS, residual, how)
    again, _ = kernel.by_blocks(x, moe, norm, EPS, residual, how)
    assert torch.equal(found, again)
    order = torch.randperm(576, device="cuda")
    moved, ids = kernel.by_blocks(x[order], moe, norm, EPS, residual[order], how)
    assert torch.equal(ids, chosen[order])
    assert torch.equal(moved, found[order])


@LAYERS
def test_captured_calls_sort_at_replay(sizes: dict[str, int], poison: None) -> None:
    moe = _random(**sizes)
    x, norm, residual = _rows(144, moe.inputs.shape[1])
    kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, chosen = kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        again, ids = kernel.moe_decode(x, moe, norm=norm, eps=EPS, residual=residual)
        assert torch.equal(chosen, ids)
        assert torch.equal(found, again)


@pytest.mark.parametrize("config", [WIDE, WIDE_PLAIN], ids=["k3", "kimi_linear"])
def test_static_pass_of_more_rows_than_a_part_held(config: K3Config) -> None:
    ops.forget()
    follow(config, torch.bfloat16, torch.device("cuda"), (12, 9, 1, 12))
    assert ops.ran()["moe_decode"] == "triton"
