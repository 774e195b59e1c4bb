"""Sliding windows: exactly which positions a block sees, in training and in drafting, at a bounded
cost; the masks of speculators; ring buffers that forget nothing they still need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.draft import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.ring import Ring
from dspark.draft.sight import Sight, block_layout
from tests import oracles
from tests.tiny_drafters import (
    FULL,
    MLA,
    SLIDING,
    TAP_WIDTH,
    WINDOW,
    draft,
    make_drafter,
    train_blocks,
)
from tests.tolerance import assert_close

G, D = FULL.block_size, FULL.hidden_size
ONE_LAYER = replace(FULL, num_layers=1, sliding_window=WINDOW, layer_types=(SLIDING,))
EITHER = pytest.mark.parametrize(
    "config",
    [ONE_LAYER, replace(MLA, num_layers=1, sliding_window=WINDOW, layer_types=(SLIDING,))],
    ids=["attention", "mla"],
)


@EITHER
def test_every_slot_sees_the_last_window_positions_before_the_anchor(config: DraftConfig) -> None:
    """Position by position: a changed feature moves the block, all its slots, if it is inside."""
    drafter, anchor = make_drafter(config), 20
    features, embeds = torch.randn(1, 30, TAP_WIDTH), torch.randn(1, 1, G, D)
    before = train_blocks(drafter, features, embeds, [[anchor]])[0, 0]
    drafted = draft(drafter, features[:, :anchor], embeds[:, 0])[0]
    for position in range(30):
        changed = features.clone()
        changed[:, position] += 1.0
        inside = anchor - WINDOW <= position < anchor
        moved = (train_blocks(drafter, changed, embeds, [[anchor]])[0, 0] != before).any(-1)
        assert moved.tolist() == [inside] * G, position
        if position < anchor:
            again = draft(drafter, changed[:, :anchor], embeds[:, 0])[0]
            assert (again != drafted).any(-1).tolist() == [inside] * G, position


@pytest.mark.parametrize("causal", ["none", "sliding", "all"])
@pytest.mark.parametrize("kinds", [(SLIDING,), ("full_attention",)])
def test_which_slots_of_its_block_a_slot_sees(causal: str, kinds: tuple[str, ...]) -> None:
    window = WINDOW if kinds == (SLIDING,) else None
    config = replace(ONE_LAYER, layer_types=kinds, sliding_window=window, block_causal=causal)
    drafter, features = make_drafter(config), torch.randn(1, 12, TAP_WIDTH)
    embeds = torch.randn(1, 1, G, D)
    before = train_blocks(drafter, features, embeds, [[9]])[0, 0]
    drafted = draft(drafter, features[:, :9], embeds[:, 0])[0]
    is_causal = causal == "all" or (causal == "sliding" and window is not None)
    for slot in range(G):
        changed = embeds.clone()
        changed[:, :, slot] += 1.0
        expected = [not is_causal or other >= slot for other in range(G)]
        moved = train_blocks(drafter, features, changed, [[9]])[0, 0] != before
        assert moved.any(-1).tolist() == expected
        assert (draft(drafter, features[:, :9], changed[:, 0])[0] != drafted).any(-1).tolist() == (
            expected
        )


@pytest.mark.oracle
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_equal_those_of_speculators(window: int | None, causal: bool) -> None:
    """Window and causality of sliding layers, for every query and key, anchors close together."""
    module = oracles.require("speculators.models.dflash.attention")
    anchors, length = [0, 3, 4, 17, 29], 30
    config = replace(
        ONE_LAYER,
        layer_types=None if window is None else (SLIDING,),
        sliding_window=window,
        block_causal="sliding" if causal else "none",
    )
    layout = block_layout(
        config, torch.ones(1, length, dtype=torch.bool), torch.tensor([anchors]),
        anchors_per_group=len(anchors), dtype=torch.float32,
    )  # fmt: skip
    ((_, _, ours),) = layout.groups[Sight.of(config, 0)]
    mask_mod, queries, keys = module.create_anchor_block_mask_mod(
        torch.zeros(length, dtype=torch.long), length, torch.tensor(anchors), G, window, not causal
    )
    q, k = torch.meshgrid(torch.arange(queries), torch.arange(keys), indexing="ij")
    zero = torch.zeros((), dtype=torch.long)  # batch and head, which its masks do not read
    theirs = mask_mod(zero, zero, q, k)
    assert torch.equal(ours[0, 0], theirs)


@EITHER
def test_neither_memory_nor_reads_grow_with_the_text(config: DraftConfig) -> None:
    drafter = make_drafter(config)
    short, long = drafter.new_context(1, 40), drafter.new_context(1, 4000)
    assert short.nbytes == long.nbytes
    drafter.extend(long, torch.randn(1, 3000, TAP_WIDTH))
    ring = Ring(WINDOW, G)
    assert ring.place(long, causal=False).stop == WINDOW + G
    full = make_drafter(replace(config, layer_types=None, sliding_window=None))
    assert full.new_context(1, 4000).nbytes > 100 * long.nbytes


@EITHER
def test_a_window_longer_than_the_text_is_full_attention(config: DraftConfig) -> None:
    full = make_drafter(replace(config, layer_types=None, sliding_window=None))
    wide = make_drafter(replace(config, sliding_window=10_000))
    wide.load_state_dict(full.state_dict())
    features, embeds = torch.randn(1, 30, TAP_WIDTH), torch.randn(1, G, D)
    assert torch.equal(draft(full, features, embeds), draft(wide, features, embeds))


@given(
    size=st.integers(1, 7),
    pieces=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=8
    ),
)
def test_a_ring_holds_the_last_positions_of_every_row(
    size: int, pieces: list[tuple[int, int, bool]]
) -> None:
    """Against a plain list per row; a value is its position, so a wrong slot shows its number."""
    ring, context = Ring(size, slots=2), DraftContext(2, 100, torch.device("cpu"))
    buffer = torch.full((2, 1, ring.capacity, 1), -1.0)
    for first, second, even in pieces:
        kept = [first, first if even else second]
        count = max(kept) + 1  # a rejected row behind the kept ones of every batch row
        rows = context.lengths[:, None] + torch.arange(count)
        rows = rows.float()[:, None, :, None]
        length = context.uniform_length(kept)
        if length is not None:
            ring.append(buffer, rows[:, :, : kept[0]], length)
        else:
            ring.append_ragged([(buffer, rows)], context, kept)
            for slots in ring.ragged_slots(context, count, kept).tolist():
                written = [slot for slot in slots if slot < size]
                assert len(set(written)) == len(written)
        context.move(kept)
        place = ring.place(context, causal=False)
        seen = place.write(buffer, torch.full((2, 1, 2, 1), 1000.0))
        for b, end in enumerate(context.row_lengths):
            mask = torch.ones(place.stop, dtype=torch.bool)
            if place.mask is not None:
                mask = place.mask[b if place.mask.shape[0] > 1 else 0, 0, 0]
            values = sorted(seen[b, 0, :, 0][mask].tolist())
            assert values == [*range(max(0, end - size), end), 1000.0, 1000.0]


def test_wrong_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window: None given"):
        replace(FULL, layer_types=(SLIDING, SLIDING))
    with pytest.raises(ValueError, match="block_causal: 'both' is unknown"):
        replace(FULL, block_causal="both")
    with pytest.raises(ValueError, match="hidden_act: 'gelu' is unknown"):
        replace(FULL, hidden_act="gelu")


def test_situ_is_not_silu() -> None:
    features, embeds = torch.randn(1, 6, TAP_WIDTH), torch.randn(1, G, D)
    silu, situ = make_drafter(FULL), make_drafter(replace(FULL, hidden_act="situ"))
    one, other = draft(silu, features, embeds), draft(situ, features, embeds)
    assert (one - other).abs().max() > 1e-2
    trained = train_blocks(situ, features, embeds[:, None], [[5]])
    assert_close(draft(situ, features[:, :5], embeds), trained[:, 0], limit=1e-5)
