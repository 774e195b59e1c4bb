"""Requests of a K3 cache as wholes: snapshots, joining, leaving, forks, wrong states.

The oracle is a fresh prefill (``tests.k3_fresh``); "the others" must not change by one bit. All
memory comes from a storage that fills it with NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dspark.k3.cache import K3Cache
from dspark.k3.snapshot import Snapshot
from tests.k3_fresh import Poisoned, assert_same, contents, prefill, shared
from tests.k3_requests_setup import SEVEN, assert_texts, busy, single
from tests.k3_tiny import PLAIN, TINY, tiny_tokens


class Others:
    """The contents of all rows but one, to be found unchanged to the bit."""

    def __init__(self, held: K3Cache, row: int) -> None:
        self.rows = [other for other in range(len(held.lengths)) if other != row]
        self.before = [contents(held, other) for other in self.rows]

    def check(self, held: K3Cache) -> None:
        for other, before in zip(self.rows, self.before, strict=True):
            for name, part in contents(held, other).items():
                assert torch.equal(part, before[name]), f"row {other} {name}"


@pytest.mark.parametrize("length", [1, 2, 9, 20])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_request_joins_and_the_others_do_not_notice(row: int, length: int):
    held, texts = busy()
    joining, text = single(length)
    mine, others = contents(joining, 0), Others(held, row)
    held.put(row, joining)
    others.check(held)
    for name, part in contents(held, row).items():
        assert torch.equal(part, mine[name]), name
    texts[row] = text
    assert_texts(held, texts)
    assert_same(shared(), joining, 0, text, SEVEN)  # the cache it came from goes on


@pytest.mark.parametrize("row", [0, 2])
def test_a_request_leaves_and_its_row_is_a_new_one(row: int):
    """Nothing of it stays, not even NaN, whether the row idles or is prefilled again."""
    held, texts = busy()
    for mla in held._mla():
        mla.latents[row, : int(held.lengths[row])] = torch.nan  # as an overflow leaves it
    for kda in held._kda():
        kda.state[row] = kda.window[row] = torch.nan
    others = Others(held, row)
    held.reset(row)
    others.check(held)
    texts[row] = texts[row][:0]
    assert_texts(held, texts)
    again = tiny_tokens(1, 5, seed=6)[0]
    valid = torch.zeros(3, 5, dtype=torch.bool)
    valid[row] = True
    shared()(again.expand(3, -1), held, valid=valid)
    texts[row] = again
    assert_texts(held, texts)


def test_select_keeps_what_is_to_be_replayed():
    held, texts = busy(4)
    held.select(torch.tensor([3, 0, 1]))
    assert_texts(held, [texts[3], texts[0], texts[1]])
    held.select(torch.tensor([1]))
    assert_texts(held, [texts[0]])


@pytest.mark.parametrize("rows", [[], [0, 0], [3], [-1]])
def test_rows_that_cannot_be_selected(rows: list[int]):
    held, texts = busy()
    with pytest.raises(ValueError, match=r"distinct ones of 0\.\.2"):
        held.select(torch.tensor(rows, dtype=torch.int64))
    assert_texts(held, texts)


def test_a_snapshot_is_frozen_and_restores_anywhere():
    model = shared()
    held, texts = busy()
    taken = [held.snapshot(row) for row in range(3)]
    assert [s.length for s in taken] == [len(text) for text in texts]
    play = tiny_tokens(3, 5, seed=8)
    model(play, held)
    others = Others(held, 1)
    held.restore(1, taken[2])
    others.check(held)
    went_on = [torch.cat((text, more)) for text, more in zip(texts, play, strict=True)]
    assert_texts(held, [went_on[0], texts[2], went_on[2]])
    for row in (0, 2):
        held.restore(row, taken[row].to("cpu"))
    assert_texts(held, [texts[0], texts[2], texts[2]])
    alone = model.new_cache(1, 20, Poisoned())
    alone.restore(0, taken[0])
    assert_texts(alone, [texts[0]])


def test_snapshots_along_one_text_share_its_latents():
    """Each holds the latents of its own stretch; the bytes say so, and together they restore."""
    model, text = shared(), tiny_tokens(1, 20, seed=3)
    held = model.new_cache(1, 24)
    pieces, done = [], 0
    for end in (7, 8, 20):
        model(text[:, done:end], held)
        pieces.append(held.snapshot(0, start=done))
        done = end
    width = TINY.kv_lora_rank + TINY.qk_rope_head_dim
    per_token = 4 * width * len(TINY.full_attention_layers)
    fixed = pieces[0].nbytes - 7 * per_token
    assert [p.nbytes for p in pieces] == [fixed + n * per_token for n in (7, 1, 12)]
    for depth in (1, 2, 3):
        other, texts = busy()
        *before, last = pieces[:depth]
        other.restore(1, last, *before)
        texts[1] = text[0, : last.length]
        assert_texts(other, texts)
    for wrong in ((pieces[1],), (pieces[2], pieces[0]), (pieces[1], pieces[0], pieces[0])):
        with pytest.raises(ValueError, match="cannot follow"):
            held.restore(0, *wrong)
    assert_texts(held, [text[0]])


def test_a_fork_goes_its_own_way():
    model = shared()
    held, texts = busy()
    twin = held.fork(Poisoned())
    for one, seed in ((held, 11), (twin, 12)):
        model(tiny_tokens(3, 4, seed=seed), one, commit=False)
        one.commit(torch.tensor([1, 4, 2]))
    for one, seed in ((held, 11), (twin, 12)):
        more = tiny_tokens(3, 4, seed=seed)
        lines = zip(texts, more, (1, 4, 2), strict=True)
        assert_texts(one, [torch.cat((text, m[:n])) for text, m, n in lines])


def test_a_cut_further_back_than_the_last_round_restores_a_snapshot():
    """A stop string ends two rounds back: what is kept is fed again from a snapshot before it."""
    model = shared()
    held, texts = busy()
    before = held.snapshot(0)
    line = texts[0]
    for seed in (1, 2):
        draft = tiny_tokens(3, 4, seed=seed)
        model(draft, held, commit=False)
        held.commit(torch.tensor([3, 2, 4]))
        line = torch.cat((line, draft[0, :3]))
    with pytest.raises(ValueError, match="nothing to commit"):
        held.rollback()
    held.restore(0, before)
    kept = line[: len(texts[0]) + 2]
    valid = torch.tensor([[True, True], [False, False], [False, False]])
    model(kept[-2:].expand(3, -1), held, valid=valid)
    assert_same(model, held, 0, kept, SEVEN)


OPERATIONS: dict[str, Callable[[K3Cache], object]] = {
    "forward": lambda held: shared()(tiny_tokens(3, 1), held),
    "snapshot": lambda held: held.snapshot(0),
    "restore": lambda held: held.restore(0, single(3)[0].snapshot(0)),
    "put": lambda held: held.put(0, single(3)[0]),
    "reset": lambda held: held.reset(0),
    "select": lambda held: held.select(torch.tensor([0])),
    "fork": lambda held: held.fork(),
    "offload": lambda held: held.offload(),
}


every_operation = pytest.mark.parametrize("name", OPERATIONS)


@every_operation
def test_a_pending_block_is_settled_first(name: str):
    held, texts = busy()
    shared()(tiny_tokens(3, 2), held, commit=False)
    with pytest.raises(RuntimeError, match="a block is pending"):
        OPERATIONS[name](held)
    held.rollback()
    assert_texts(held, texts)


@every_operation
def test_an_offloaded_cache_is_onloaded_first(name: str):
    held, texts = busy()
    held.offload()
    with pytest.raises(RuntimeError, match="onload it"):
        OPERATIONS[name](held)
    held.onload()
    assert_texts(held, texts)


@every_operation
def test_a_forward_that_broke_off_is_not_taken_for_a_whole_one(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    held, _ = busy()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shared().model.layers[4], "transform", fail)
        shared()(tiny_tokens(3, 2), held)
    with pytest.raises(RuntimeError, match="broke off"):
        OPERATIONS[name](held)


def snapshot_of(change: str) -> Snapshot:
    taken = single(5)[0].snapshot(0)
    if change == "another configuration":
        return replace(taken, config=replace(TINY, vocab_size=62))
    if change == "bfloat16":
        half = tuple((s, w.bfloat16()) for s, w in taken.recurrent)
        return replace(taken, recurrent=half, latents=tuple(x.bfloat16() for x in taken.latents))
    return single(60)[0].snapshot(0)


@pytest.mark.parametrize("change", ["another configuration", "bfloat16", "max_length 48"])
def test_snapshots_that_do_not_belong_are_refused_before_anything_changes(change: str):
    held, texts = busy()
    before = copy.deepcopy(held)
    with pytest.raises(ValueError, match=change):
        held.restore(0, snapshot_of(change))
    for row in range(3):
        ours = contents(before, row)
        assert all(torch.equal(part, ours[name]) for name, part in contents(held, row).items())
    assert_texts(held, texts)


def test_wrong_rows_and_wrong_kinds_are_named():
    held, texts = busy()
    _, fresh = prefill(shared(), tiny_tokens(2, 3))
    for row in (-1, 3):
        missing = f"no row {row} in a batch of 3"
        with pytest.raises(ValueError, match=missing):
            held.snapshot(row)
        with pytest.raises(ValueError, match=missing):
            held.reset(row)
        with pytest.raises(ValueError, match=missing):
            held.put(row, single(3)[0])
        with pytest.raises(ValueError, match=missing):
            held.restore(row, single(3)[0].snapshot(0))
    with pytest.raises(ValueError, match="of another configuration"):
        shared(PLAIN)(tiny_tokens(3, 1), held)
    with pytest.raises(ValueError, match="a cache of one request, this one has 2"):
        held.put(0, fresh)
    with pytest.raises(TypeError, match="expected a K3 cache, got dict"):
        held.put(0, {})
    with pytest.raises(TypeError, match="expected a snapshot of a K3 cache, got dict"):
        held.restore(0, {})
    for start in (-1, 10):
        with pytest.raises(ValueError, match="expected 0 to that many"):
            held.snapshot(0, start=start)
    with pytest.raises(ValueError, match="counts for a batch of 3"):
        shared()(tiny_tokens(3, 2), held, commit=False)
        held.commit(torch.tensor([1, 1]))
    held.rollback()
    assert_texts(held, texts)
