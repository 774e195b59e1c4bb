"""The fused read of Attention Residuals: the kernel against float64, the reference against K3."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dspark.k3.attn_res import mix
from dspark.k3.layers import RMSNorm, rms_norm
from dspark_kernels import attn_res
from tests.tolerance import assert_close

FLOAT32 = 2e-6
KEY_EPS, EPS = 1e-5, 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def kernel():  # type: ignore[no-untyped-def]
    from dspark_kernels import attn_res_triton

    return attn_res_triton


def check(
    shape: tuple[int, ...],
    count: int,
    dtype: torch.dtype,
    *,
    added: bool = False,
    append: bool = False,
    device: str = "cpu",
) -> None:
    """Outputs, the prefix and the bank afterwards; entries that do not exist hold NaN."""
    prefix = torch.randn(shape, device=device).to(dtype)
    bank = torch.randn(count + 2, *shape, device=device).to(dtype)
    bank[count:] = torch.nan
    key = torch.randn(shape[-1], device=device) * shape[-1] ** -0.5
    weight = (torch.rand(shape[-1], device=device) + 0.5).to(dtype)
    more = torch.randn(shape, device=device).to(dtype) if added else None
    wide_prefix, wide_bank = prefix.double(), bank.double()
    args = (count, key, KEY_EPS, weight, EPS, more, append)
    assert kernel().refuses(prefix, bank, *args) is None
    mixed, normed = kernel().attn_res_mix(prefix, bank, *args)
    wide = (count, key.double(), KEY_EPS, weight.double(), EPS)
    expected = attn_res.attn_res_mix(
        wide_prefix, wide_bank, *wide, None if more is None else more.double(), append
    )
    limit = FLOAT32 if dtype == torch.float32 else None
    assert_close(mixed, expected[0], limit=limit, what="mixed")
    assert_close(normed, expected[1], limit=limit, what="normed")
    assert_close(prefix, wide_prefix, limit=limit, what="prefix")
    held = count + append
    if held:
        assert_close(bank[:held], wide_bank[:held], limit=limit, what="bank")
    assert bank[held:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_read(poison: None, count: int, dtype: torch.dtype) -> None:
    check((2, 3, 40), count, dtype)


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("append", [True, False])
def test_prefix_grows_and_joins_the_bank(poison: None, added: bool, append: bool) -> None:
    check((5, 72), 2, torch.float32, added=added, append=append)
    check((2, 72), 0, torch.bfloat16, added=added, append=append)


def test_width_beyond_a_tile(poison: None) -> None:
    check((1, 2100), 5, torch.float32, added=True, append=True)


@pytest.mark.parametrize("count", [0, 4])
def test_reference_is_the_model(count: int) -> None:
    norm, query = RMSNorm(24, KEY_EPS), nn.Linear(24, 1, bias=False)
    nn.init.normal_(norm.weight)
    prefix, out = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    bank, weight = torch.randn(6, 2, 3, 24), torch.rand(24)
    with torch.no_grad():
        expected = mix(prefix + out, list(bank[:count].unbind()), norm, query)
        key = query.weight[0] * norm.weight
        mixed, normed = attn_res.attn_res_mix(
            prefix, bank, count, key, KEY_EPS, weight, EPS, out, append=True
        )
    assert_close(mixed, expected, limit=1e-6)
    assert_close(normed, rms_norm(expected, weight, EPS), limit=1e-6)
    assert torch.equal(bank[count], prefix)


CHANGES = ["float64", "mixed", "bank", "view", "strided key", "strided weight", "grad"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_kernel_refuses(change: str) -> None:
    prefix, bank, key, weight = (torch.zeros(s) for s in ((4, 32), (3, 4, 32), (32,), (32,)))
    if change == "float64":
        prefix, bank, weight = prefix.double(), bank.double(), weight.double()
    elif change == "mixed":
        weight = weight.bfloat16()
    elif change == "bank":
        bank = bank[:, :2].contiguous()
    elif change == "view":
        bank = bank.transpose(0, 1).contiguous().transpose(0, 1)
    elif change == "strided key":
        key = torch.zeros(64)[::2]
    elif change == "strided weight":
        weight = torch.zeros(64)[::2]
    else:
        key = key.requires_grad_()
    assert kernel().refuses(prefix, bank, 2, key, KEY_EPS, weight, EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7168, 2304, 1000])
def test_on_a_gpu(poison: None, width: int, dtype: torch.dtype) -> None:
    for rows, count in ((1, 8), (8, 5), (16, 1), (64, 0), (200, 3)):
        check((rows, width), count, dtype, device="cuda")
        check((rows, width), count, dtype, added=True, append=True, device="cuda")


@pytest.mark.gpu
def test_runs_agree_to_the_bit(poison: None) -> None:
    """A missing barrier shows as a difference between runs."""
    prefix = torch.randn(16, 7168, device="cuda", dtype=torch.bfloat16)
    bank = torch.randn(9, 16, 7168, device="cuda", dtype=torch.bfloat16)
    key, weight = torch.randn(7168, device="cuda"), torch.rand(7168, device="cuda").bfloat16()
    more = torch.randn_like(prefix)
    first = None
    for _ in range(200):
        mine = prefix.clone()
        out = torch.stack(kernel().attn_res_mix(mine, bank, 8, key, 1e-5, weight, 1e-5, more))
        first = out if first is None else first
        assert torch.equal(out, first)
