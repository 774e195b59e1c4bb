"""Where the tensors of a K3 cache live: in host memory, in a given storage, and to the byte.

The oracle is a fresh prefill (``tests.k3_fresh``). All memory comes from a storage that fills it
with NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.k3.cache import K3Cache
from dspark.k3.model import K3ForCausalLM
from dspark.k3.storage import Kind, PrivateStorage
from dspark_eval.live_bytes import LiveBytes
from tests.k3_fresh import SMALL, Poisoned, assert_same, shared
from tests.k3_requests_setup import SEVEN, assert_texts, busy, single
from tests.k3_tiny import TINY, tiny_model, tiny_tokens


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
