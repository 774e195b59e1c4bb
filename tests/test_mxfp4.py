"""MXFP4: the table of the format by hand, exactness, the rounding rule, and two other decoders."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.k3.mxfp4 import dequantise, quantise
from tests.oracles import require

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_packed(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and scales from far below to far above one."""
    generator = torch.Generator().manual_seed(seed)
    *rows, groups = shape
    packed = torch.randint(0, 256, (*rows, groups * 16), generator=generator, dtype=torch.uint8)
    scale = torch.randint(90, 165, (*rows, groups), generator=generator, dtype=torch.uint8)
    return packed, scale


def bits(x: torch.Tensor) -> torch.Tensor:
    """Float32 as integers: -0.0 differs from 0.0, and equal means equal."""
    return x.float().view(torch.int32)


def test_known_bytes_low_nibble_first_and_bias_127():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x2F  # input 0: code 15 = -6; input 1: code 2 = 1
    packed[0, 15] = 0x90  # input 30: code 0; input 31: code 9 = -0.5
    w = dequantise(packed, torch.tensor([[128]], dtype=torch.uint8), torch.float32)
    assert w[0, [0, 1, 30, 31]].tolist() == [-12.0, 2.0, 0.0, -1.0]


def test_every_code_at_every_scale_is_exact():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[0::2] | codes[1::2] << 4).expand(255, 16)
    scale = torch.arange(255, dtype=torch.uint8).unsqueeze(1)
    values = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64).repeat(2)
    exact = values * torch.pow(torch.tensor(2.0, dtype=torch.float64), scale.double() - 127)
    assert torch.equal(bits(dequantise(packed, scale, torch.float32)), bits(exact.float()))
    assert torch.equal(bits(dequantise(packed, scale, torch.bfloat16)), bits(exact.bfloat16()))


def test_scale_byte_255_is_nan():
    packed, scale = random_packed(1, 2)
    scale[0, 0] = 255
    w = dequantise(packed, scale, torch.float32)
    assert w[0, :32].isnan().all()
    assert w[0, 32:].isfinite().all()


def test_what_mxfp4_holds_comes_back_bit_for_bit():
    w = dequantise(*random_packed(3, 40, 5), torch.float32)
    packed, scale = quantise(w)
    assert torch.equal(bits(dequantise(packed, scale, torch.float32)), bits(w))
    # and from there on the bytes themselves stand still
    again = quantise(dequantise(packed, scale, torch.bfloat16))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


def test_groups_of_zeros_keep_their_signs():
    w = torch.zeros(2, 64)
    w[0, 3] = w[1, 40] = -0.0
    packed, scale = quantise(w)
    assert scale.max() == 0
    assert torch.equal(bits(dequantise(packed, scale, torch.float32)), bits(w))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=32, max_size=32))
def test_nearest_of_the_grid_nothing_clipped(group: list[float]):
    """The scale rule and the rounding, against a search over the whole grid."""
    w = torch.tensor(group)
    packed, scale = quantise(w)
    largest = w.abs().max().double().item()
    step = 2.0 ** (int(scale) - 127)
    assert largest <= 6 * step
    assert int(scale) == 0 or largest > 3 * step  # half the scale would clip
    grid = torch.tensor(sorted({s * v for s, v in itertools.product((1, -1), E2M1)})).double()
    back = dequantise(packed, scale, torch.float32).double()
    nearest = (w.double().unsqueeze(1) - grid * step).abs().amin(dim=1)
    assert torch.equal((back - w.double()).abs(), nearest)


def test_ties_go_to_the_even_code():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    w = torch.zeros(32)
    w[:7], w[7:14], w[14] = middles, -middles, 6.0
    back = dequantise(*quantise(w), torch.float32)
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(back[:7], even)
    assert torch.equal(back[7:14], -even)


def test_bfloat16_and_float32_weights_pack_alike():
    w = torch.randn(8, 64).bfloat16()
    for a, b in zip(quantise(w), quantise(w.float()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [torch.zeros(4, 33), torch.full((1, 32), float("inf"))])
def test_what_cannot_be_packed_is_refused(bad: torch.Tensor):
    with pytest.raises(ValueError):
        quantise(bad)


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    packed, scale = random_packed(4, 3)
    with pytest.raises(ValueError, match="does not go with"):
        dequantise(packed, scale[:, :2], torch.float32)
    with pytest.raises(ValueError, match="uint8"):
        dequantise(packed.int(), scale, torch.float32)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nemo_decodes_the_same_values(dtype: torch.dtype):
    nemo = require("nemo_automodel.components.models.kimi_k3.state_dict_adapter")
    packed, scale = random_packed(48, 6)
    theirs = nemo.dequantize_mxfp4(packed, scale, dtype=dtype)
    assert torch.equal(bits(dequantise(packed, scale, dtype)), bits(theirs))


@pytest.mark.oracle
def test_compressed_tensors_decodes_the_same_values():
    helpers = require("compressed_tensors.compressors.nvfp4.helpers")
    packed, scale = random_packed(48, 6)
    codes = helpers.unpack_fp4_from_uint8(packed, 48, 192, dtype=torch.float32)
    theirs = codes * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
    assert torch.equal(dequantise(packed, scale, torch.float32), theirs)
