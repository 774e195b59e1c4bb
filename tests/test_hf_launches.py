"""What a step of transformers' models launches less, and that it says the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dspark.runtime.hf_grouped import GroupedAttention
from dspark.runtime.hf_packed import PackedProjections
from dspark.runtime.hf_rotary import FusedRotary
from dspark.runtime.hf_static import HFStatic
from tests.hf_tiny import tiny_hf
from tests.test_hf_norms import stirred
from tests.test_hf_static import row_target
from tests.tolerance import assert_close

LAYERS = 4
COPIES = ("clone", "repeat", "neg", "cat", "roll", "addcmul", "mm")


class Counted(TorchDispatchMode):
    """Operations of aten, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_grouped_heads_attend_as_repeated_ones(rows: int, groups: int) -> None:
    """Against softmax by hand over repeated heads, in float64; two masks in turn, as by layers."""
    torch.manual_seed(rows)
    q = torch.randn(2, 2 * groups, rows, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 7, 8, dtype=torch.float64)
    masks = [torch.randn(2, 1, rows, 7, dtype=torch.float64) for _ in range(2)]
    module = nn.Module()
    module.num_key_value_groups = groups  # type: ignore[assignment]
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with GroupedAttention().used():
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        assert attend is not own
        for mask in (masks[0], masks[1], masks[0]):
            found, _ = attend(module, q, k, v, mask, scaling=0.3, dropout=0.0, sliding_window=4)
            keys, values = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            wanted = (0.3 * q @ keys.transpose(-1, -2) + mask).softmax(-1) @ values
            assert_close(found, wanted.transpose(1, 2), what="attention")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own


def test_what_is_somebodys_own_stays() -> None:
    """An attention put there before is back afterwards, and asked where a mask is not whole."""
    asked = []

    def mine(*args: Any, **given: Any) -> tuple[Tensor, None]:
        asked.append(given)
        return args[1], None

    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 7, 8)
    mask = torch.zeros(1, 1, 2, 7)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        with GroupedAttention().used():
            attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
            attend(nn.Module(), q, k, k, mask)
            assert not asked
            attend(nn.Module(), q, k, k, None)
            attend(nn.Module(), q, k, k, mask.expand(1, 4, 2, 7))
            attend(nn.Module(), q, k, k, mask, position_bias=torch.ones(1, 4, 2, 7))
            attend(nn.Module(), q, k, k, mask, softcap=0.5)
        assert len(asked) == 4
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 1), ("gemma3", 1), ("cohere", 0), ("gpt2", 0)],  # neighbours turned; no positions
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_rotations_that_say_the_same_are_replaced(
    name: str, count: int, dtype: torch.dtype
) -> None:
    model = stirred(name, dtype)
    rotary = FusedRotary(model)
    assert len(rotary) == count
    tokens = torch.arange(3, 40).unsqueeze(0)
    before = model(tokens).logits
    with rotary.used():
        within = model(tokens).logits
    assert torch.equal(model(tokens).logits, before)
    assert torch.equal(within, before) == (count == 0)
    exact = stirred(name, dtype).double()(tokens).logits
    found, own = ((x.double() - exact).norm() / exact.norm() for x in (within, before))
    assert found <= 1.5 * own + 1e-7  # no further from the exact logits than the model's own
    if dtype is torch.float32:
        assert_close(within, before)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama", 2 * LAYERS),
        ("qwen2", 2 * LAYERS),  # with a bias
        ("phi", LAYERS),  # no gate
        ("phi3", 0),  # packed by itself
    ],
)
def test_packed_projections_say_the_same(name: str, count: int) -> None:
    model = stirred(name, torch.float64)
    tokens = torch.arange(3, 40).unsqueeze(0)
    before = model(tokens).logits
    packed = PackedProjections(model)
    assert len(packed) == count
    assert torch.equal(model(tokens).logits, before)  # the model goes on with its own
    with packed.used(), Counted() as counted:
        assert_close(model(tokens).logits, before)
    with Counted() as own:
        assert torch.equal(model(tokens).logits, before)
    products = [c.seen["mm"] + c.seen["addmm"] for c in (own, counted)]
    assert products[0] - products[1] == (2 * LAYERS + LAYERS * (name != "phi")) * (count > 0)


def test_weights_are_moved_once() -> None:
    """Views of one matrix, of which a second pass takes the same; and not in inference mode's."""
    model = tiny_hf("llama")
    with torch.inference_mode():
        first = PackedProjections(model)
    attention = model.base_model.layers[1].self_attn
    query, key = attention.q_proj.weight, attention.k_proj.weight
    assert not query.is_inference()
    assert key.data_ptr() == query.data_ptr() + query.nbytes
    second = PackedProjections(model)
    places = [[g._weight.data_ptr() for g in each._groups] for each in (first, second)]
    assert places[0] == places[1]
    assert query.data_ptr() in places[0]


def test_other_rows_make_their_own_product() -> None:
    """Keys and values of other rows than the queries'; a shared layer is left alone."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n) for n in (6, 4, 4))

    crossed = Crossed().double()
    here, there = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    wanted = [crossed.q_proj(here), crossed.k_proj(there), crossed.v_proj(here)]
    packed = PackedProjections(crossed)
    assert len(packed) == 1
    with packed.used():
        found = [crossed.q_proj(here), crossed.k_proj(there), crossed.v_proj(here)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours, theirs)
    crossed.k_proj = crossed.v_proj
    assert len(PackedProjections(crossed)) == 0
    odd = Crossed()
    odd.k_proj = nn.Linear(8, 4, bias=False)
    assert len(PackedProjections(odd)) == 0


@pytest.mark.parametrize(("rows", "clones"), [(1, 0), (6, 1)])
def test_what_a_layer_launches(rows: int, clones: int) -> None:
    """Copies, products and the parts of a rotation; a mask is repeated once for all layers."""
    static = HFStatic(row_target(tiny_hf("llama").to(torch.bfloat16)))
    cache = static.new_cache(2, 30, rows)
    with torch.no_grad(), Counted() as counted:
        static.step(torch.zeros(2, rows, dtype=torch.int64), cache)
    seen = {name: counted.seen[name] for name in COPIES}
    assert seen["clone"] == clones * LAYERS  # of queries to rows of their key head
    assert seen["mm"] == 4 * LAYERS  # in, out, in, out
    assert seen["repeat"] == 1
    assert seen["neg"] == 1
    assert seen["roll"] == seen["addcmul"] == LAYERS
    assert seen["cat"] == LAYERS + 2  # with the table of angles and the signed sine
