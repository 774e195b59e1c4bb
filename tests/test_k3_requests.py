"""Requests of a K3 cache as wholes: snapshots, joining, leaving, forks, host memory, bytes.

The oracle is a fresh prefill (``tests.k3_fresh``); "the others" must not change by one bit. All
memory comes from a storage that fills it with NaN.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.k3.cache import K3Cache
from dspark.k3.model import K3ForCausalLM
from dspark.k3.snapshot import Snapshot
from dspark.k3.storage import Kind, PrivateStorage
from dspark_eval.live_bytes import LiveBytes
from tests.k3_fresh import SMALL, Poisoned, assert_same, contents, prefill, shared
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens

SEVEN = torch.tensor(7)


def busy(batch: int = 3, max_length: int = 48) -> tuple[K3Cache, list[Tensor]]:
    """A cache between two rounds, with a replay to fold, rows of different lengths; the texts."""
    model = shared()
    held = model.new_cache(batch, max_length, Poisoned())
    lengths = [6, 1, 11, 4][:batch]
    tokens = tiny_tokens(batch, max(lengths), seed=3)
    valid = torch.arange(tokens.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    model(tokens, held, valid=valid)
    draft, accepted = tiny_tokens(batch, 4, seed=4), [3, 1, 4, 0][:batch]
    model(draft, held, commit=False)
    held.commit(torch.tensor(accepted))
    rows = zip(tokens, lengths, draft, accepted, strict=True)
    return held, [torch.cat((text[:n], more[:a])) for text, n, more, a in rows]


def single(length: int, seed: int = 9) -> tuple[K3Cache, Tensor]:
    """A request by itself, with a replay to fold."""
    model, text = shared(), tiny_tokens(1, length + 2, seed=seed)
    held = model.new_cache(1, length + 4, Poisoned())
    model(text[:, :length], held)
    model(tiny_tokens(1, 3, seed=seed)[:, :2], held, commit=False)
    held.rollback()
    model(text[:, length:], held, commit=False)
    held.commit(2)
    return held, text[0]


def assert_texts(held: K3Cache, texts: Sequence[Tensor]) -> None:
    assert held.lengths.tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        assert_same(shared(), held, row, text, SEVEN)


class Others:
    """The contents of all rows but one, to be found unchanged to the bit."""

    def __init__(self, held: K3Cache, row: int) -> None:
        self.rows = [other for other in range(len(held.lengths)) if other != row]
        self.before = [contents(held, other) for other in self.rows]

    def check(self, held: K3Cache) -> None:
        for other, before in zip(self.rows, self.before, strict=True):
            for name, part in contents(held, other).items():
                assert torch.equal(part, before[name]), f"row {other} {name}"


# --- joining and leaving -----------------------------------------------------------------------


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


# --- snapshots and forks -----------------------------------------------------------------------


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


# --- host memory and storage -------------------------------------------------------------------


class Counted(Poisoned):
    """With room for a number of tensors."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def take(
        self,
        kind: Kind,
        layer: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        if len(self.out) >= self.room:
            raise MemoryError("no room")
        return super().take(kind, layer, shape, dtype, device)


TENSORS = 2 * 4 + 3  # of TINY: four KDA layers, three MLA layers


def test_states_leave_the_storage_and_come_back():
    model, storage = shared(), Counted(TENSORS)
    held = model.new_cache(2, 32, storage)
    tokens, draft = tiny_tokens(2, 6), tiny_tokens(2, 4, seed=2)
    model(tokens, held)
    model(draft, held, commit=False)
    held.commit(torch.tensor([2, 4]))
    held.offload()
    assert {kind for kind, _ in storage.out} == {Kind.LATENTS}
    H, K = TINY.kda_num_heads, TINY.kda_head_dim
    states = 4 * 2 * (H * K * K + (TINY.kda_conv_size - 1) * 3 * H * K) * 4
    assert held.host_nbytes == states
    other = Counted(0)
    other.out = storage.out  # somebody took the place
    storage.room = 5
    with pytest.raises(MemoryError):
        held.onload()
    assert {kind for kind, _ in storage.out} == {Kind.LATENTS}  # what was taken went back
    with pytest.raises(RuntimeError, match="offloaded"):
        model(draft, held)
    storage.room = TENSORS
    held.onload()
    held.onload()  # nothing is away any more: nothing to do
    assert held.host_nbytes == 0
    assert len(storage.out) == TENSORS
    assert_texts(held, [torch.cat((tokens[0], draft[0, :2])), torch.cat((tokens[1], draft[1]))])


def test_no_room_takes_nothing():
    for room in range(TENSORS):
        storage = Counted(room)
        with pytest.raises(MemoryError):
            shared().new_cache(1, 8, storage)
        assert not storage.out
    held, texts = busy()
    with pytest.raises(MemoryError):
        held.fork(Counted(3))
    assert_texts(held, texts)


def test_what_lives_in_a_storage_stays_there():
    """No round, no join and no restore replaces a tensor: the pool holds the real state."""
    model, storage = shared(), Poisoned()
    held = model.new_cache(2, 48, storage)
    given = dict(storage.out)
    model(tiny_tokens(2, 20), held)
    for accepted in (3, torch.tensor([1, 0])):
        model(tiny_tokens(2, 4), held, commit=False)
        held.commit(accepted)
    model(tiny_tokens(2, 3), held, parents=torch.tensor([-1, 0, 0]), commit=False)
    held.commit_path(torch.tensor([[0, 2], [0, 1]]))
    model(tiny_tokens(2, 1), held)
    held.restore(0, held.snapshot(1))
    held.put(1, single(5)[0])
    held.reset(0)
    model(tiny_tokens(2, 2), held)
    held.fold()
    now = {(kind, i): x for i, layer in enumerate(held.layers) for kind, x in layer.held()}
    assert now.keys() == given.keys()
    assert all(now[key].data_ptr() == given[key].data_ptr() for key in given)


class Copies(TorchDispatchMode):
    """The operations that move a tensor of some size from one memory to another."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.seen = size, []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        moves = func._schema.name.split("::")[1] in ("clone", "copy_", "_to_copy", "index", "cat")
        if moves and isinstance(out, Tensor) and out.numel() == self.size:
            self.seen.append(func._schema.name)
        return out


@pytest.mark.parametrize("batch", [1, 2])
def test_a_round_copies_no_state(batch: int):
    """Verify, commit, replay, roll back, a plain step: of the states' size, nothing is moved."""
    model = shared()
    held = model.new_cache(batch, 48)
    model(tiny_tokens(batch, 20), held)
    size = next(held._kda()).state.numel()
    with Copies(size) as copies:
        for n in (3, 0, torch.arange(batch)):
            model(tiny_tokens(batch, 4), held, commit=False)
            held.commit(n)
        model(tiny_tokens(batch, 3), held, parents=torch.tensor([-1, 0, 0]), commit=False)
        held.commit_path(torch.tensor([[0, 2]] * batch))
        model(tiny_tokens(batch, 1), held)
    assert not copies.seen
    with Copies(size) as copies:
        held.fork()
    assert copies.seen  # the count can see one


@pytest.mark.parametrize("kind", [Kind.STATE, Kind.WINDOW])
def test_a_storage_that_would_make_kernels_copy_is_refused(kind: Kind):
    class Strided(PrivateStorage):
        def take(
            self,
            wanted: Kind,
            layer: int,
            shape: Sequence[int],
            dtype: torch.dtype,
            device: torch.device,
        ) -> Tensor:
            wide = torch.empty((shape[0], 2, *shape[1:]), dtype=dtype, device=device)
            return wide[:, 0] if wanted is kind else wide[:, 0].contiguous()

    with pytest.raises(ValueError, match="strided"):
        shared().new_cache(2, 8, Strided())


def test_a_storage_that_gives_another_shape_is_refused():
    class Short(PrivateStorage):
        def take(
            self,
            kind: Kind,
            layer: int,
            shape: Sequence[int],
            dtype: torch.dtype,
            device: torch.device,
        ) -> Tensor:
            return torch.empty(shape[1:], dtype=dtype, device=device)

    with pytest.raises(ValueError, match="expected"):
        shared().new_cache(2, 8, Short())


# --- bytes -------------------------------------------------------------------------------------


def steps(model: K3ForCausalLM, held: K3Cache, tree: Tensor, rows: Tensor) -> Iterator[str]:
    """Everything that changes what a cache holds; the name of each step once it is done."""
    with torch.no_grad():
        model(tiny_tokens(2, 6), held)
        yield "prefill"
        model(rows, held, commit=False)
        yield "pending"
        held.commit(3)
        yield "replay"
        model(rows, held, parents=tree, valid=torch.ones(2, 4, dtype=torch.bool), commit=False)
        yield "pending tree"
        held.commit_path(torch.tensor([[0, 2], [0, 1]]))
        yield "replay of a path"
        model(rows, held, valid=torch.ones(2, 4, dtype=torch.bool), commit=False)
        yield "pending with counts"
        held.commit(torch.tensor([1, 3]))
        yield "ragged replay"
        held.reset(0)
        yield "reset"
        held.offload()
        yield "offloaded"
        held.onload()
        yield "onloaded"
        held.select(torch.tensor([1]))
        yield "selected"
        held.fold()
        yield "folded"


def test_nbytes_is_every_byte_that_lives():
    """Against a count of all memory that is made and freed while the cache works."""
    model = shared()
    given = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]]), tiny_tokens(2, 4)
    for _ in steps(model, model.new_cache(2, 32), *given):
        pass  # masks that kernels keep for good are made here
    live = LiveBytes(torch.device("cpu"))
    with live:
        held = model.new_cache(2, 32)
        assert live.live == held.nbytes
        for step in steps(model, held, *given):
            assert live.live == held.nbytes, step


@pytest.mark.slow
def test_ten_thousand_rounds_leave_nothing_behind():
    """Chains, trees, ragged paths, leaves: the cache and the interpreter hold what they held, and
    the last texts are what a fresh prefill makes of them."""
    model = tiny_model(SMALL)
    model.pack_()
    generator = torch.Generator().manual_seed(0)
    held, texts = model.new_cache(2, 48), [torch.zeros(0, dtype=torch.int64)] * 2
    parents, paths = torch.tensor([-1, 0, 1, 0, 1]), [[], [0], [0, 1], [0, 3], [0, 1, 4], [0, 1, 2]]
    sizes = []
    for number in range(10_000):
        rows = torch.randint(3, 61, (2, 5), generator=generator)
        model(rows, held, parents=parents if number % 2 else None, commit=False)
        picks = torch.randint(0, 6, (2,), generator=generator).tolist()
        chosen = [paths[p] if number % 2 else list(range(p)) for p in picks]
        width = max(map(len, chosen))
        path = [one + [-1] * (width - len(one)) for one in chosen]
        held.commit_path(torch.tensor(path).long().view(2, width))
        texts = [torch.cat((t, r[one])) for t, r, one in zip(texts, rows, chosen, strict=True)]
        for row in range(2):
            if len(texts[row]) > 40:
                held.reset(row)
                texts[row] = texts[row][:0]
        if number % 1000 == 999:
            held.fold()
            gc.collect()
            tensors = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
            sizes.append((held.nbytes, tensors))
    bytes_held, tensors_alive = zip(*sizes, strict=True)
    assert len(set(bytes_held)) == 1
    assert max(tensors_alive) - min(tensors_alive) < 10  # some of the last round's are alive
    for row, text in enumerate(texts):
        assert_same(model, held, row, text, SEVEN)


# --- wrong states ------------------------------------------------------------------------------

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
