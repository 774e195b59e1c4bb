"""The cache of a transformers model against a fresh prefill of what was committed.

The oracle of every test is the same: whatever was proposed, taken back, moved, copied or put aside
before, lengths, slots and next logits are those of a cache that has read the committed tokens and
nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.runtime.hf_cache import RowCache
from dspark.runtime.hf_layer import ROOM
from dspark.runtime.hf_mask import Ring, new_rows, visible
from dspark.runtime.hf_open import hf_target
from dspark.runtime.hf_replay import ReplayTarget
from dspark.runtime.hf_target import RowTarget
from tests.hf_tiny import tiny_hf

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
KINDS = ("llama", "gemma3", "mistral-window", "kimi-linear", "mamba2", "bloom")
TREES = ("llama", "gemma3", "mistral-window")
Target = RowTarget | ReplayTarget


@pytest.fixture(scope="module")
def opened() -> Callable[[str], Target]:
    made: dict[str, Target] = {}

    def find(name: str) -> Target:
        if name not in made:
            made[name] = hf_target(tiny_hf(name), name=name, end_token_ids=())
        return made[name]

    return find


def _text(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 120, (count,), generator=torch.Generator().manual_seed(seed))


def _next_logits(target: Target, cache: object, probe: Tensor) -> Tensor:
    """Logits after one more token per row, which is taken back."""
    out = target.forward(probe.unsqueeze(1), cache, commit=False)
    cache.rollback()
    return target.logits(out.hidden[:, -1])


def _check(target: Target, cache: object, texts: list[Tensor]) -> None:
    """Each batch row holds its text, as a fresh prefill would."""
    assert cache.lengths.tolist() == [len(text) for text in texts]
    probe = torch.full((len(texts),), 77)
    found = _next_logits(target, cache, probe)
    for row, text in enumerate(texts):
        fresh = target.new_cache(1, 64)
        if len(text):
            target.forward(text.unsqueeze(0), fresh, commit=True)
        torch.testing.assert_close(
            found[row], _next_logits(target, fresh, probe[:1])[0], **TOLERANCE
        )
        if isinstance(cache, RowCache):
            ours, theirs = cache.snapshot(row), fresh.snapshot(0)
            for mine, other in zip(ours.layers, theirs.layers, strict=True):
                if other is not None:
                    torch.testing.assert_close(mine, other, **TOLERANCE)


@pytest.mark.parametrize("name", KINDS)
def test_after_any_accept_counts_the_cache_is_a_fresh_prefill(name: str, opened: Callable) -> None:
    """Three rows at lengths of their own through 3 windows: none, some or all of a block kept."""
    target = opened(name)
    texts = [_text(n, seed=n) for n in (1, 4, 7)]
    cache = target.new_cache(3, 64)
    width = 7
    tokens = torch.stack([torch.cat((torch.zeros(width - len(t)).long(), t)) for t in texts])
    valid = torch.arange(width) >= torch.tensor([[width - len(t)] for t in texts])
    target.forward(tokens, cache, valid=valid, commit=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        block = torch.randint(3, 120, (3, 5), generator=generator)
        target.forward(block, cache, commit=False)
        counts = torch.randint(0, 6, (3,), generator=generator)
        cache.commit(counts)
        texts = [
            torch.cat((text, row[:n]))
            for text, row, n in zip(texts, block, counts.tolist(), strict=True)
        ]
    _check(target, cache, texts)


@pytest.mark.parametrize("name", KINDS)
def test_none_one_and_all_of_a_block_after_a_prompt_of_one(name: str, opened: Callable) -> None:
    """`crop(0)` of transformers keeps everything or nothing, depending on its version."""
    target, text = opened(name), _text(7)
    for kept in (0, 1, 6):
        cache = target.new_cache(1, 16)
        target.forward(text[None, :1], cache, commit=True)
        target.forward(text[None, 1:7], cache, commit=False)
        cache.commit(kept)
        _check(target, cache, [text[: 1 + kept]])


@pytest.mark.parametrize("name", KINDS)
def test_counts_outside_the_block_are_refused(name: str, opened: Callable) -> None:
    target, text = opened(name), _text(6)
    cache = target.new_cache(2, 16)
    with pytest.raises(ValueError, match="nothing to commit"):
        cache.commit(0)
    valid = torch.tensor([[True] * 3, [True, True, False]])
    target.forward(text.view(2, 3), cache, valid=valid, commit=False)
    for counts in (-1, 4, torch.tensor([3, 3])):
        with pytest.raises(ValueError, match="cannot accept"):
            cache.commit(counts)
    with pytest.raises(RuntimeError, match="pending"):
        cache.snapshot(0)
    with pytest.raises(RuntimeError, match="pending"):
        target.forward(text.view(2, 3), cache, commit=True)
    cache.commit(torch.tensor([3, 2]))
    _check(target, cache, [text[:3], text[3:5]])


@pytest.mark.parametrize("name", KINDS)
def test_padding_left_right_and_a_row_that_idles(name: str, opened: Callable) -> None:
    """An idle row keeps its state, whatever stands in its place in the block."""
    target, text = opened(name), _text(12)
    cache = target.new_cache(3, 32)
    tokens = torch.stack((text[:4], text[4:8], text[8:12]))
    valid = torch.tensor([[False, True, True, True], [True, True, False, False], [True] * 4])
    target.forward(tokens, cache, valid=valid, commit=True)
    texts = [text[1:4], text[4:6], text[8:12]]
    _check(target, cache, texts)
    target.forward(
        tokens, cache, valid=torch.tensor([[True] * 4, [False] * 4, [True] * 4]), commit=False
    )
    cache.commit(torch.tensor([2, 0, 4]))
    texts = [torch.cat((texts[0], text[:2])), texts[1], torch.cat((texts[2], text[8:12]))]
    _check(target, cache, texts)


@pytest.mark.parametrize("name", KINDS)
def test_requests_come_go_and_rest(name: str, opened: Callable) -> None:
    """fork, snapshot, restore, put, reset, select, offload: each row is what it should be."""
    target = opened(name)
    first, second, other = _text(20, 1), _text(9, 2), _text(15, 3)
    cache = target.new_cache(2, 64)
    target.forward(first[None].expand(2, -1), cache, commit=True)
    cache.reset(1)
    valid = torch.tensor([[False] * 9, [True] * 9])
    target.forward(second[None].expand(2, -1), cache, valid=valid, commit=True)
    _check(target, cache, [first, second])

    kept, twin = cache.snapshot(0), cache.fork()
    target.forward(other[None, :3].expand(2, -1), cache, commit=True)
    _check(target, twin, [first, second])
    joined = target.new_cache(1, 64)
    target.forward(other[None], joined, commit=True)
    cache.put(1, joined)
    _check(target, cache, [torch.cat((first, other[:3])), other])
    cache.restore(0, kept.to("cpu"))
    _check(target, cache, [first, other])
    assert kept.length == 20
    assert kept.nbytes > 0

    cache.offload()
    cache.onload()
    cache.select(torch.tensor([1, 0]))
    _check(target, cache, [other, first])
    with pytest.raises(ValueError, match="one row"):
        cache.put(0, twin)


@pytest.mark.parametrize("name", TREES)
def test_every_path_of_a_tree_is_what_a_chain_would_be(name: str, opened: Callable) -> None:
    """Rows [anchor, x1, x2, x3, sibling of x1, its child, sibling of x2]; windows of 8 move by."""
    target, start = opened(name), _text(13)
    rows = _text(7, seed=5).unsqueeze(0)
    parents = torch.tensor([[-1, 0, 1, 2, 0, 4, 1]])
    paths = ([0], [0, 1], [0, 1, 2, 3], [0, 4], [0, 4, 5], [0, 1, 6])
    for path in paths:
        cache = target.new_cache(1, 32)
        target.forward(start[None], cache, commit=True)
        judged = target.forward(rows, cache, parents=parents, commit=False)
        chain = target.new_cache(1, 32)
        target.forward(start[None], chain, commit=True)
        alone = target.forward(rows[:, path], chain, commit=True)
        torch.testing.assert_close(judged.hidden[:, path], alone.hidden, **TOLERANCE)
        cache.commit_path(torch.tensor([path + [-1] * (5 - len(path))]))
        _check(target, cache, [torch.cat((start, rows[0, path]))])


@pytest.mark.parametrize("name", TREES)
def test_a_tree_in_a_ragged_batch(name: str, opened: Callable) -> None:
    """Two rows of different length, cut at different places, take different paths."""
    target = opened(name)
    texts = [_text(3, 1), _text(11, 2)]
    cache = target.new_cache(2, 32)
    for row, text in enumerate(texts):
        valid = torch.zeros(2, len(text), dtype=torch.bool)
        valid[row] = True
        target.forward(text[None].expand(2, -1), cache, valid=valid, commit=True)
    rows = torch.stack((_text(5, 3), _text(5, 4)))
    parents = torch.tensor([-1, 0, 1, 0, 1])
    valid = torch.tensor([[True, True, False, True, False], [True] * 5])
    target.forward(rows, cache, valid=valid, parents=parents, commit=False)
    cache.commit_path(torch.tensor([[0, 3, -1], [0, 1, 4]]))
    texts = [torch.cat((texts[0], rows[0, [0, 3]])), torch.cat((texts[1], rows[1, [0, 1, 4]]))]
    _check(target, cache, texts)


def test_what_is_no_path_is_refused(opened: Callable) -> None:
    target = opened("llama")
    cache = target.new_cache(1, 16)
    for bad in ([[-1, 1]], [[-1, 2, 0]], [[0, 0]]):
        with pytest.raises(ValueError, match="parents"):
            count = len(bad[0])
            target.forward(
                torch.ones(1, count).long(), cache, parents=torch.tensor(bad), commit=False
            )
    parents = torch.tensor([[-1, 0, 0, 1]])
    target.forward(torch.ones(1, 4).long(), cache, parents=parents, commit=False)
    for path in ([1], [0, 3], [0, 1, 2], [0, -1, 1]):
        with pytest.raises(ValueError, match="path"):
            cache.commit_path(torch.tensor([path]))
    with pytest.raises(ValueError, match="chain"):
        cache.commit(3)
    cache.commit_path(torch.tensor([[0, 1, 3]]))
    assert cache.lengths.tolist() == [3]


def test_a_ring_is_bounded_by_window_and_room(opened: Callable) -> None:
    """A long text behind a window of 8: memory stands still, a whole prompt runs in pieces."""
    target = opened("mistral-window")
    text = _text(2 * ROOM + 60)
    cache = target.new_cache(1, 4 * ROOM)
    target.forward(text[None], cache, commit=True)
    bytes_then = cache.nbytes
    slots = 8 - 1 + ROOM + 1
    layers, heads, size = 4, 2, 8
    assert bytes_then == 2 * layers * heads * slots * size * 4
    whole = target.parts.model(text[None], use_cache=False).logits[0, -1]
    out = target.forward(text[None, -1:], cache, commit=False)
    cache.rollback()
    again = target.parts.model(torch.cat((text, text[-1:]))[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(target.logits(out.hidden)[0, -1], again, **TOLERANCE)
    assert not torch.allclose(whole, again)
    assert cache.nbytes == bytes_then
    with pytest.raises(ValueError, match=f"at most {ROOM}"):
        target.forward(text[None, : ROOM + 1], cache, commit=False)


def test_bytes_stand_still_over_many_rounds(opened: Callable) -> None:
    target = opened("gemma3")
    cache = target.new_cache(1, 600)
    sizes = set()
    for step in range(80):
        target.forward(_text(6, step)[None], cache, commit=False)
        cache.commit(step % 7)
        sizes.add(cache.nbytes)
    assert len(sizes) == 1


def test_nothing_rejected_is_left_even_if_it_is_not_finite(opened: Callable) -> None:
    """A rejected row whose keys and values are NaN: a mask times NaN would still be NaN."""
    target = opened("llama")
    cache = target.new_cache(2, 32)
    texts = [_text(5, 1), _text(5, 2)]
    target.forward(torch.stack(texts), cache, commit=True)
    target.forward(_text(8, 3).view(2, 4), cache, commit=False)
    for layer in cache.model_cache.layers:
        layer.keys[:, :, 6:9] = torch.nan
        layer.values[:, :, 6:9] = torch.nan
    cache.commit(torch.tensor([0, 1]))
    block = _text(8, 3).view(2, 4)
    _check(target, cache, [texts[0], torch.cat((texts[1], block[1, :1]))])


def test_a_pass_that_fails_leaves_the_cache_as_it_was(opened: Callable) -> None:
    target, text = opened("llama"), _text(6)
    cache = target.new_cache(1, 16)
    target.forward(text[None], cache, commit=True)
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[500, 3]]), cache, commit=True)
    _check(target, cache, [text])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_a_row_may_see_by_brute_force(data: st.DataObject) -> None:
    """Every pair of row and slot, for random lengths, padding, trees, windows and rings."""
    batch, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))
    window = data.draw(st.none() | st.integers(1, 6))
    ringed = window is not None and data.draw(st.booleans())
    capacity = window - 1 + rows + data.draw(st.integers(0, 3)) if ringed else None
    tree = data.draw(st.booleans())
    parents = [data.draw(st.integers(-1, r - 1)) for r in range(rows)]
    flags = st.lists(st.booleans(), min_size=rows, max_size=rows)
    valid = [[True] * rows if tree else data.draw(flags) for _ in range(batch)]
    block = new_rows(torch.tensor(valid), torch.tensor(parents) if tree else None)
    width = capacity or max(1, *(n + sum(v) for n, v in zip(lengths, valid, strict=True)))
    found = visible(torch.tensor(lengths), block, Ring(window, capacity), width)
    for b in range(batch):
        chain = {}
        for r in range(rows):
            before = [p for p in range(r) if valid[b][p]]
            up = parents[r] if tree else (before[-1] if before else -1)
            chain[r] = [*chain.get(up, []), r]
        real = [r for r in range(rows) if valid[b][r]]
        slot = {r: (lengths[b] + real.index(r)) % (capacity or 10**9) for r in real}
        held = {}
        for p in range(lengths[b]):
            held[p % (capacity or 10**9)] = p
        for r in real:
            at = lengths[b] + len(chain[r]) - 1
            near = window if window is not None else 10**9
            seen = {s for s, p in held.items() if s not in slot.values() and at - p < near}
            seen |= {slot[a] for a in chain[r] if at - (lengths[b] + len(chain[a]) - 1) < near}
            assert {s for s in range(width) if found[b, r, s]} == seen


@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
@pytest.mark.parametrize("sizes", [(60, 300), (300, 60)])
def test_a_text_moves_between_caches_of_any_length(
    name: str, sizes: tuple[int, int], opened: Callable
) -> None:
    """A window's layer is a ring in a long cache and a plain buffer in a short one."""
    target, text = opened(name), _text(30)
    alone, batch = target.new_cache(1, sizes[0]), target.new_cache(2, sizes[1])
    assert alone._layers[0].ring != batch._layers[0].ring
    target.forward(text[None], alone, commit=True)
    batch.put(1, alone)
    _check(target, batch, [text[:0], text])


@pytest.mark.parametrize("name", TREES)
def test_a_step_without_padding_waits_for_nothing(
    name: str, opened: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths and counts are on the host: reading them from a device again would be a wait."""
    target = opened(name)
    cache = target.new_cache(2, 64)
    waits: list[str] = []
    for method in ("tolist", "item", "__bool__"):
        _spy(monkeypatch, method, waits)
    text = _text(18).view(2, 9)
    target.forward(text[:, :6], cache, commit=True)
    target.forward(text[:, 6:7], cache, commit=True)
    target.forward(text[:, 7:], cache, commit=False)
    cache.commit(2)
    assert waits == []
    valid = torch.tensor([[True, False], [True, True]])
    target.forward(text[:, :2], cache, valid=valid, commit=True)
    assert waits  # the spy works


def _spy(monkeypatch: pytest.MonkeyPatch, method: str, found: list[str]) -> None:
    """Note every call of a tensor's method that our own code makes."""
    original = getattr(Tensor, method)

    def call(self: Tensor) -> object:
        caller = str(sys._getframe(1).f_globals["__name__"])
        if caller.startswith("dspark"):
            found.append(f"{caller}: {method}")
        return original(self)

    monkeypatch.setattr(Tensor, method, call)
