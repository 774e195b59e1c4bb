"""Flex attention under the block masks: the same masks and the same numbers as in groups."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.draft import flex, sight
from dspark.draft.config import DraftConfig
from dspark.draft.flex import mask_predicate, pays
from dspark.draft.model import DSparkDrafter
from dspark.draft.shapes import MLAShape
from dspark.draft.sight import Sight, block_layout
from tests.tolerance import assert_close

GPU = torch.device("cuda")
SIGHTS = [Sight(None, False), Sight(None, True), Sight(4, False), Sight(1, True)]
CONFIG = DraftConfig(
    hidden_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=96, vocab_size=50, num_target_layers=6, target_layer_ids=(0, 2),
    target_tap_kind="residual", mask_token_id=0, block_size=5, markov_rank=4,
)  # fmt: skip
SLIDING = replace(
    CONFIG, layer_types=("full_attention", "sliding_attention"), sliding_window=6,
    block_causal="sliding",
)  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    """Two rows, one padded, anchors close together, at 0, and dummies, one in the padding."""
    valid = torch.arange(23) < torch.tensor([23, 14])[:, None]
    return valid, torch.tensor([[0, 3, 4, 17, 22], [2, 2, 13, 0, 20]])


@pytest.mark.parametrize("seen", SIGHTS, ids=str)
@pytest.mark.parametrize("per_group", [1, 2, 5])
def test_the_predicate_is_the_mask_of_the_groups(seen: Sight, per_group: int) -> None:
    valid, anchors = batch()
    slots, (rows, length), count = 5, valid.shape, anchors.shape[1]
    sees = mask_predicate(seen, valid, anchors, slots)
    grid = torch.meshgrid(
        torch.arange(rows), torch.arange(count * slots), torch.arange(length + count * slots),
        indexing="ij",
    )  # fmt: skip
    whole = sees(grid[0], torch.zeros(()), grid[1], grid[2])
    assert whole.any(-1).all()
    assert not whole[1, :, 14:length].any()  # padding, whatever anchor comes after it
    for start, stop, mask in sight._groups(seen, valid, anchors, slots, per_group):
        queries = slice(start * slots, stop * slots)
        assert torch.equal(whole[:, queries, :length], mask[:, 0, :, :length])
        own = whole[:, queries, length:]
        assert torch.equal(own[..., queries], mask[:, 0, :, length:])
        own[..., queries] = False
        assert not own.any()


@pytest.mark.parametrize("seen", [*SIGHTS, Sight(20, False)], ids=str)
@pytest.mark.parametrize(("length", "count", "slots"), [(100, 20, 7), (64, 9, 5), (130, 33, 3)])
def test_tiles_miss_nothing_and_claim_nothing_that_is_not_there(
    seen: Sight, length: int, count: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "TILE", 16)
    torch.manual_seed(0)
    valid = torch.arange(length) < torch.tensor([length, length * 2 // 3])[:, None]
    anchors = torch.stack([torch.randperm(length - 1)[:count].sort().values for _ in range(2)])
    anchors[1, -2:] = 0  # dummies
    queries, keys = count * slots, length + count * slots
    grid = torch.meshgrid(torch.arange(2), torch.arange(queries), torch.arange(keys), indexing="ij")
    whole = mask_predicate(seen, valid, anchors, slots)(grid[0], grid[0], grid[1], grid[2])
    some, every = flex.tiles(seen, valid, anchors, slots)
    for filler, claim in ((False, some), (True, every)):
        padded = F.pad(whole, (0, -keys % 16, 0, -queries % 16), value=filler)
        tiled = padded.unflatten(1, (-1, 16)).unflatten(3, (-1, 16)).transpose(2, 3)
        held = tiled.flatten(3).all(-1) if filler else tiled.flatten(3).any(-1)
        assert not (claim & ~held if filler else held & ~claim).any()
        if not filler:
            assert claim.sum() <= 1.4 * held.sum()
    assert every.any() or length < 100 or seen.window is not None


@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])
def test_unfused_flex_attention_gives_the_groups_numbers(config: DraftConfig) -> None:
    torch.manual_seed(0)
    valid, anchors = batch()
    q = torch.randn(2, 4, 25, 16)
    context, block = (
        (torch.randn(2, 2, n, 16), torch.randn(2, 2, n, 16)) for n in (valid.shape[1], 25)
    )
    layouts = [
        block_layout(config, valid, anchors, anchors_per_group=2, dtype=torch.float32, fused=fused)
        for fused in (False, True)
    ]
    for layer in range(2):
        seen = Sight.of(config, layer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it is slow uncompiled
            groups, fused = [each.attend(seen, q, context, block, 0.25) for each in layouts]
        assert_close(fused, groups, limit=1e-5)


class OnDevice(SimpleNamespace):
    """The shape and device of a tensor that need not exist."""

    def __len__(self) -> int:
        return self.shape[0]


def test_large_passes_on_a_gpu_leave_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(rows: int, length: int, anchors: int, channels: int, device: str = "cuda") -> bool:
        shapes = (rows, length), (rows, anchors)
        valid, places = (OnDevice(shape=s, device=torch.device(device)) for s in shapes)
        return pays(valid, places, 7, channels)

    assert chosen(1, 4096, 512, 64)
    assert not chosen(1, 4096, 512, 64, "cpu")
    assert not chosen(1, 4096, 512, 8)  # no kernel for so narrow heads
    # 2^23 elements and one anchor less: 2 x (7 A) x (S + 7 A) with A = 64
    length = 2**23 // (2 * 448) + 1 - 448
    assert chosen(2, length, 64, 16)
    assert not chosen(2, length, 63, 16)
    valid, anchors = batch()
    monkeypatch.setattr(flex, "PAYS_FROM", 0)
    assert not pays(valid, anchors, 5, 64)


def test_the_narrowest_part_of_a_head_counts() -> None:
    assert sight._channels(CONFIG) == 16
    mla = replace(CONFIG, backbone="mla", num_key_value_heads=4, mla=MLAShape(8, 8, 6, 4, 24))
    assert sight._channels(mla) == 10
    assert sight._channels(replace(mla, mla=MLAShape(8, 8, 32, 4, 24))) == 24


def test_queries_in_float32_meet_values_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast; without the cast no version of torch would take them."""
    valid, anchors = batch()
    layout = block_layout(
        CONFIG, valid, anchors, anchors_per_group=2, dtype=torch.float32, fused=True
    )
    seen = []
    monkeypatch.setattr(
        flex, "_attention", lambda _: lambda q, k, v, **_: seen.append((q, k, v)) or v[:, :, :25]
    )
    parts = [
        (torch.randn(2, 2, n, 16), torch.randn(2, 2, n, 16).bfloat16())
        for n in (valid.shape[1], 25)
    ]
    layout.attend(Sight(None, False), torch.randn(2, 4, 25, 16), *parts, 0.25)
    assert [each.dtype for each in seen[0]] == [torch.bfloat16] * 3


def _states_and_gradients(drafter: DSparkDrafter, device: torch.device) -> list[Tensor]:
    torch.manual_seed(1)
    valid, anchors = batch()
    features, embeds = torch.randn(2, 23, 128), torch.randn(2, 5, 5, 64)
    out = drafter.train_hidden(
        features.to(device), valid.to(device), embeds.to(device), anchors.to(device),
        torch.ones(2, 5, dtype=torch.bool, device=device),
    )  # fmt: skip
    drafter.zero_grad()
    (out * torch.linspace(-1, 1, 64, device=device)).sum().backward()
    layers = [p for n, p in drafter.named_parameters() if n.startswith(("layers", "fc"))]
    # Copies: a gradient follows its module to another device.
    return [
        each.detach().cpu().clone() for each in (out, *(p.grad for p in layers)) if each is not None
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])
def test_compiled_flex_attention_trains_as_groups_do(
    config: DraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    drafter = DSparkDrafter(config)
    reference = _states_and_gradients(drafter, torch.device("cpu"))
    drafter.to(GPU)
    monkeypatch.setattr(flex, "PAYS_FROM", 0)
    used = []
    attend = flex.attend_whole
    monkeypatch.setattr(flex, "attend_whole", lambda *a: used.append(1) or attend(*a))
    for tensor, expected in zip(_states_and_gradients(drafter, GPU), reference, strict=True):
        assert_close(tensor, expected)
    assert len(used) == config.num_layers
