"""Attention of anchored blocks: the mask against its rules, kernels against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.draft.flex import mask_predicate
from dspark.draft.sight import Sight
from dspark_kernels import block_attention as reference
from tests.tolerance import assert_close

kernel = pytest.importorskip("dspark_kernels.block_attention_triton", reason="needs Triton")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HALF = torch.bfloat16


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    blocks: int
    slots: int
    heads: int
    key_heads: int
    width: int
    window: int | None = None
    causal: bool = False


SMALL = [
    Size(1, 40, 6, 3, 4, 2, 16),
    Size(2, 37, 5, 4, 6, 2, 16, causal=True),  # three heads to a key: tiles are not full
    Size(2, 50, 7, 5, 2, 2, 32, window=9),
    Size(1, 64, 9, 7, 4, 1, 16, window=20, causal=True),
    Size(2, 5, 1, 2, 1, 1, 16),
]
LARGE = [
    Size(1, 4096, 512, 7, 32, 8, 128),
    Size(2, 1000, 130, 7, 12, 4, 64, window=200, causal=True),
    Size(1, 777, 33, 16, 6, 1, 128),
]


class Case:
    """Random inputs; the last row of several is half padding, and ends with dummy anchors at 0."""

    def __init__(self, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        count = size.blocks * size.slots

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(HALF).to(DEVICE)

        self.size = size
        self.q = normal(size.batch, count, size.heads, size.width)
        shape = size.batch, size.length + count, size.key_heads, size.width
        self.keys, self.values, self.gradient = (
            normal(*shape),
            normal(*shape),
            normal(*self.q.shape),
        )
        anchors = [torch.randperm(size.length, generator=generator)[: size.blocks].sort().values
                   for _ in range(size.batch)]  # fmt: skip
        self.anchors, self.lengths = torch.stack(anchors), torch.full((size.batch,), size.length)
        if size.batch > 1:
            self.anchors[-1, -1], self.lengths[-1] = 0, (size.length + 1) // 2
        self.anchors, self.lengths = self.anchors.to(DEVICE), self.lengths.to(DEVICE)

    def run(self, attend: Any, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients of q, keys and values."""
        size = self.size
        inputs = [x.detach().to(dtype).requires_grad_() for x in (self.q, self.keys, self.values)]
        out = attend(*inputs, self.anchors, self.lengths, size.slots, 0.3, size.window, size.causal)
        gradients = torch.autograd.grad(out, inputs, self.gradient.to(dtype))
        return [out.detach(), *gradients]


def compare(case: Case, dtype: torch.dtype = torch.float64) -> None:
    expected = case.run(reference.block_attention, dtype)
    found = case.run(kernel.block_attention, HALF)
    for name, actual, wanted in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert_close(actual, wanted, what=name)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the rows of a step of `d_keys`, which are no fewer than its own."""
    for name in ("ROWS", "KEYS", "OWN_ROWS", "DQ_ROWS", "DQ_KEYS", "DK_KEYS"):
        monkeypatch.setattr(kernel, name, 16)


@pytest.mark.parametrize("size", SMALL, ids=str)
def test_the_mask_is_that_of_the_model(size: Size) -> None:
    case = Case(size)
    count = size.blocks * size.slots
    valid = torch.arange(size.length, device=DEVICE) < case.lengths[:, None]
    keys = size.length + count
    sees = mask_predicate(Sight(size.window, size.causal), valid, case.anchors, size.slots)
    places = (torch.arange(n, device=DEVICE) for n in (size.batch, count, keys))
    batch, q, k = torch.meshgrid(*places, indexing="ij")
    found = reference.mask(case.anchors, case.lengths, size.slots, keys, size.window, size.causal)
    assert torch.equal(found, sees(batch, batch, q, k))


@pytest.mark.usefixtures("poison", "small_tiles")
@pytest.mark.parametrize("size", SMALL, ids=str)
def test_kernels_agree_with_float64(size: Size) -> None:
    compare(Case(size))


@pytest.mark.usefixtures("poison", "small_tiles")
def test_padding_is_never_used_and_gets_no_gradient() -> None:
    case = Case(SMALL[1])
    expected = case.run(kernel.block_attention, HALF)
    padding = slice(int(case.lengths[1]), case.size.length)
    case.keys[1, padding], case.values[1, padding] = 1e4, -1e4
    found = case.run(kernel.block_attention, HALF)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not found[2][1, padding].any()
    assert not found[3][1, padding].any()


@pytest.mark.usefixtures("small_tiles")
def test_anchors_in_any_order() -> None:
    case = Case(SMALL[0])
    case.anchors = case.anchors.flip(1)
    compare(case)


@pytest.mark.usefixtures("poison", "small_tiles")
def test_ds_of_a_head_at_a_time_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """d s of 4 heads fits at once; one byte less than two holds one of them."""
    case = Case(Size(2, 20, 3, 3, 4, 2, 16))
    whole = case.run(kernel.block_attention, HALF)
    monkeypatch.setattr(kernel, "DS_BYTES", 2 * (32 * 32 * 2) - 1)
    parts = case.run(kernel.block_attention, HALF)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_what_the_kernels_do_not_take_is_said() -> None:
    case = Case(SMALL[0])
    places = case.keys, case.values, case.anchors, case.lengths
    rest = *places, 3, 0.3
    assert kernel.refuses(case.q, *rest) is None
    assert "float32" in (kernel.refuses(case.q.float(), *rest) or "")
    assert "channels" in (kernel.refuses(case.q[..., :12], *rest) or "")
    assert kernel.refuses(case.q, *places, 64, 0.3) is None
    assert "130 rows" in (kernel.refuses(case.q, *places, 65, 0.3) or "")
    assert "scale" in (kernel.refuses(case.q, *places, 3, 0.0) or "")


def test_sums_of_fewer_rows_than_a_copy_begins_at_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A card takes a misaligned address there, which the interpreter does not see."""
    monkeypatch.setattr(kernel, "DK_ROWS", 16)
    with pytest.raises(ValueError, match="DK_ROWS of 16: expected a multiple of 32"):
        Case(SMALL[4]).run(kernel.block_attention, HALF)


def test_operations_count_what_is_seen() -> None:
    """Two blocks of 3 slots after 4 and 10 positions: 3 (4 + 10) + 2 x 9 pairs."""
    forward, backward = reference.cost(torch.tensor([[4, 10]]), 3, 2, 8)
    assert forward == 2 * 2 * 60 * 2 * 8
    assert backward == 2.5 * forward


@pytest.mark.gpu(gib=24)
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("size", LARGE, ids=str)
def test_on_a_gpu(size: Size) -> None:
    """The largest against float32: in float64 its mask alone would take minutes."""
    case = Case(size)
    compare(case, torch.float32 if size is LARGE[0] else torch.float64)
    first, second = (case.run(kernel.block_attention, HALF) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
