"""The state pool: one budget, exact to the byte, and nobody's bytes are another's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.draft import DSparkDrafter
from dspark.draft.shapes import KDAShape
from dspark.errors import UserError
from dspark.runtime.extents import ALIGNMENT, Extent, Extents, aligned
from dspark.runtime.k3_target import K3Target
from dspark.runtime.pool import Lease, PoolFull, StatePool
from tests.k3_tiny import tiny_model, tiny_tokens
from tests.tiny_drafters import FULL, MLA

PAGE = 16
KDA = replace(
    FULL, backbone="kda", num_key_value_heads=FULL.num_attention_heads, kda=KDAShape(gate_rank=4)
)


@cache
def target() -> K3Target:
    return K3Target(tiny_model(), "tiny", (2,))


@cache
def drafter(kind: str) -> DSparkDrafter:
    torch.manual_seed(0)
    config = {"attention": FULL, "mla": MLA, "kda": KDA}[kind]
    return DSparkDrafter(config).eval()


def new_pool(budget: int, kind: str | None = "attention") -> StatePool:
    return StatePool(target(), kind and drafter(kind), budget, page_tokens=PAGE)


def tensors(lease: Lease) -> list[Tensor]:
    """Every tensor that a lease's cache and context hold for good, found by looking at them."""
    found: dict[tuple[int, int], Tensor] = {}
    stack: list[object] = [*lease.cache.layers, lease.context]
    while stack:
        thing = stack.pop()
        if isinstance(thing, Tensor):
            if thing.untyped_storage().data_ptr() == lease.pool.slab.data_ptr():
                found[thing.data_ptr(), thing.nbytes] = thing
            continue
        if isinstance(thing, dict):
            stack += thing.values()
        elif isinstance(thing, list | tuple):
            stack += thing
        elif type(thing).__module__.startswith("dspark") and hasattr(thing, "__dict__"):
            stack += [v for k, v in vars(thing).items() if k not in ("_storage", "weights")]
    views = sorted(found.values(), key=lambda t: (t.data_ptr(), -t.nbytes))
    whole: list[Tensor] = []
    for view in views:  # a layer's keys are a view of all layers' keys
        if not whole or view.data_ptr() >= whole[-1].data_ptr() + whole[-1].nbytes:
            whole.append(view)
    return whole


def region(tensor: Tensor, pool: StatePool) -> tuple[int, int]:
    start = tensor.data_ptr() - pool.slab.data_ptr()
    return start, start + tensor.nbytes


# --- the allocator ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_allocator_against_a_map_of_bytes(data: st.DataObject):
    """A naive model: one flag per unit. Taken runs never overlap, come from the first run that is
    long enough, are refused exactly when none is, and everything comes back."""
    units = data.draw(st.integers(1, 24))
    extents, free = Extents(units * ALIGNMENT), [True] * units
    held: list[Extent] = []
    for _ in range(data.draw(st.integers(0, 40))):
        if held and data.draw(st.booleans()):
            extent = held.pop(data.draw(st.integers(0, len(held) - 1)))
            extents.give(extent)
            set_units(free, extent, True)
        else:
            wanted, from_end = data.draw(st.integers(1, 5 * ALIGNMENT)), data.draw(st.booleans())
            extent = extents.take(wanted, from_end=from_end)
            expected = first_run(free, -(-wanted // ALIGNMENT), from_end)
            assert (extent and (extent.start // ALIGNMENT)) == expected
            if extent is not None:
                assert extent.length == aligned(wanted)
                set_units(free, extent, False)
                held.append(extent)
        assert extents.free == sum(free) * ALIGNMENT
        assert extents.largest == longest(free) * ALIGNMENT
    for extent in held:
        extents.give(extent)
    assert extents.largest == extents.size


def set_units(free: list[bool], extent: Extent, value: bool) -> None:
    for unit in range(extent.start // ALIGNMENT, extent.stop // ALIGNMENT):
        assert free[unit] is not value, "taken twice, or returned twice"
        free[unit] = value


def first_run(free: list[bool], length: int, from_end: bool) -> int | None:
    """Where a run of free units of this length would begin: as low, or as high, as possible.

    From the end it is the highest place, which is the end of the last long enough run.
    """
    places = [i for i in range(len(free) - length + 1) if all(free[i : i + length])]
    return None if not places else places[-1] if from_end else places[0]


def longest(free: list[bool]) -> int:
    return max((len(run) for run in "".join("#" if f else "." for f in free).split(".")), default=0)


@pytest.mark.parametrize("again", [Extent(0, 256), Extent(256, 512), Extent(512, 1024)])
def test_returning_what_is_free_is_refused(again: Extent):
    extents = Extents(1024)
    held = extents.take(512, from_end=False)
    assert held is not None
    extents.give(held)
    with pytest.raises(ValueError, match="are not taken"):
        extents.give(again)
    assert extents.free == extents.size


# --- leases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "attention", "mla", "kda"])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_byte_is_accounted_and_lives_in_the_slab(kind: str | None, batch: int):
    """What the pool says equals what the tensors are: found by walking the objects, not asked."""
    pool = new_pool(4_000_000, kind)
    predicted = pool.bytes_for(40, batch)
    lease = pool.admit(40, batch)
    held = tensors(lease)
    real = sum(tensor.nbytes for tensor in held)
    assert real == lease.nbytes == pool.stats().tensors
    lengths = 8 * batch
    context_bytes = 0 if lease.context is None else lease.context.nbytes
    assert real == lease.cache.nbytes - lengths + context_bytes
    assert pool.stats().taken == predicted == sum(aligned(tensor.nbytes) for tensor in held)
    assert lease.max_length == 48
    lease.release()
    assert pool.stats().free == pool.stats().largest == pool.stats().budget


def test_all_work_happens_in_the_slab_and_gathers_nothing():
    """A prompt, rounds and a draft context later, every tensor is where it was; and the latents
    that attention reads at batch 1 are the slab itself."""
    pool = new_pool(2_000_000, "kda")
    with pool.admit(48) as lease, torch.inference_mode():
        places = [region(tensor, pool) for tensor in tensors(lease)]
        run_rounds(lease.cache, rounds=3)
        lease.context.move([0])
        features = torch.randn(1, 5, drafter("kda").fc.in_features)
        drafter("kda").extend(lease.context, features)
        assert [region(tensor, pool) for tensor in tensors(lease)] == places
        latents = lease.cache.layers[2].latents
        read = latents[:, : int(lease.cache.lengths[0])]
        assert read.is_contiguous()
        assert read.untyped_storage().data_ptr() == pool.slab.data_ptr()


def run_rounds(held: object, rounds: int) -> Tensor:
    """A prompt of 20 tokens and rounds of 4 rows of which 1, 2, .. are accepted."""
    tokens = tiny_tokens(1, 20 + 4 * rounds)
    target().forward(tokens[:, :20], held, commit=True)
    for index in range(rounds):
        rows = tokens[:, 20 + 4 * index : 24 + 4 * index]
        target().forward(rows, held, commit=False)
        held.commit(1 + index % 4)
    return target().forward(tokens[:, -1:], held, commit=True).hidden


def test_a_slab_full_of_nan_changes_no_bit():
    """Memory that others left behind must not matter: pooled and private caches agree exactly."""
    pool = new_pool(2_000_000)
    with torch.inference_mode():
        expected = run_rounds(target().new_cache(1, 48), rounds=4)
        pool.slab.view(torch.float32).fill_(torch.nan)
        with pool.admit(48) as lease:
            assert torch.equal(run_rounds(lease.cache, rounds=4), expected)
            for tensor in (lease.context.buffers[0].keys, lease.context.buffers[0].values):
                assert torch.count_nonzero(tensor) == 0


def test_requests_side_by_side_do_not_touch_each_other():
    pool = new_pool(4_000_000)
    with torch.inference_mode():
        expected = run_rounds(target().new_cache(1, 48), rounds=4)
        first, second = pool.admit(48), pool.admit(48)
        for tensor in tensors(second):
            tensor.fill_(7.0)
        assert torch.equal(run_rounds(first.cache, rounds=4), expected)
        assert all(bool((tensor == 7.0).all()) for tensor in tensors(second))
        first.release()
        third = pool.admit(48)
        assert torch.equal(run_rounds(third.cache, rounds=4), expected)


def test_a_refusal_names_the_numbers_and_leaves_everything_as_it_was():
    pool = new_pool(new_pool(2_000_000).bytes_for(PAGE) * 2)
    lease = pool.admit(PAGE)
    before = pool.stats()
    with pytest.raises(PoolFull) as refused:
        pool.admit(10 * PAGE)
    error = refused.value
    assert (error.needed, error.free) == (pool.bytes_for(10 * PAGE), before.free)
    for number in (error.needed, error.free, error.largest, error.budget):
        assert f"{number:,}" in str(error)
    assert isinstance(error, UserError)
    after = pool.stats()
    assert (after.taken, after.leases, after.refused) == (before.taken, 1, before.refused + 1)
    assert pool.admit(PAGE).max_length == lease.max_length, "what fits is let in"
    with pytest.raises(PoolFull):
        pool.admit(PAGE)


def test_bytes_in_pieces_too_small_are_refused_and_said():
    """Holes of short requests do not hold the latents of a long one, whatever their sum."""
    page = new_pool(2_000_000, None).bytes_for(PAGE)
    pool = new_pool(page * 8, None)
    leases = [pool.admit(PAGE) for _ in range(8)]
    for lease in leases[::2]:
        lease.release()
    long = next(n * PAGE for n in range(2, 99) if pool.bytes_for(n * PAGE) > 3 * page)
    assert pool.bytes_for(long) <= pool.stats().free
    with pytest.raises(PoolFull, match="in pieces too small"):
        pool.admit(long)
    assert pool.stats().leases == 4
    assert pool.stats().tensors == sum(lease.nbytes for lease in leases)
    for lease in leases[1::2]:
        lease.release()
    assert pool.admit(long).max_length == long


def test_a_released_lease_is_dead():
    pool = new_pool(2_000_000)
    lease = pool.admit(PAGE)
    lease.release()
    lease.release()
    for use in (lambda: lease.cache, lambda: lease.context, lambda: lease.grow(32)):
        with pytest.raises(RuntimeError, match="released"):
            use()
    assert pool.stats().taken == 0


def test_a_failure_while_a_request_is_let_in_leaks_nothing():
    class Broken:
        def new_context(self, batch: int, max_length: int, storage: object = None) -> object:
            made = drafter("attention").new_context(batch, max_length, storage)
            if self.armed:
                raise OSError("planted")
            return made

        armed = False

    broken = Broken()
    pool = StatePool(target(), broken, 2_000_000, page_tokens=PAGE)
    broken.armed = True
    pool._sizes[PAGE, 1] = [1]
    with pytest.raises(OSError, match="planted"):
        pool.admit(PAGE)
    assert pool.stats().taken == pool.stats().leases == 0
    assert pool.stats().largest == pool.stats().budget


def test_what_cannot_be_a_pool_is_refused():
    with pytest.raises(UserError, match="hold no request; the shortest needs"):
        new_pool(1000)
    with pytest.raises(ValueError, match="page_tokens"):
        StatePool(target(), None, 10**6, page_tokens=0)

    class Private:
        name, device = "private", torch.device("cpu")

        def new_cache(self, batch: int, max_length: int) -> object: ...

    with pytest.raises(UserError, match="caches of target private have memory of their own"):
        StatePool(Private(), None, 10**6)
    pool = new_pool(2_000_000)
    with pytest.raises(ValueError, match="at least 1"):
        pool.admit(0)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_requests_neither_leaks_nor_overlaps(data: st.DataObject):
    """Admit, release and grow at random: runs never overlap, nothing is refused that one free run
    could hold, the sum is exact at every step, and nothing stays."""
    pool = new_pool(pool_bytes(), data.draw(st.sampled_from(["attention", "kda"])))
    leases: list[Lease] = []
    for _ in range(data.draw(st.integers(1, 14))):
        step = data.draw(st.sampled_from(["admit", "admit", "release", "grow"]))
        length, index = data.draw(st.integers(1, 6 * PAGE)), data.draw(st.integers(0, 20))
        before = pool.stats()
        refused = attempt(pool, leases, step, length, index)
        if refused is not None:
            assert refused.needed > refused.largest
            after = pool.stats()
            assert (after.taken, after.leases) == (before.taken, before.leases)
        check_pool(pool, leases)
    for lease in leases:
        lease.release()
    assert pool.stats().largest == pool.stats().budget


def attempt(
    pool: StatePool, leases: list[Lease], step: str, length: int, index: int
) -> PoolFull | None:
    """One step, on the list of leases too; what it was refused with."""
    try:
        if step == "admit":
            leases.append(pool.admit(length))
        elif leases and step == "release":
            leases.pop(index % len(leases)).release()
        elif leases:
            place = index % len(leases)
            leases[place] = leases[place].grow(max(length, leases[place].max_length))
    except PoolFull as refused:
        return refused
    return None


@cache
def pool_bytes() -> int:
    return new_pool(4_000_000).bytes_for(6 * PAGE) * 3


def check_pool(pool: StatePool, leases: list[Lease]) -> None:
    held = [tensor for lease in leases for tensor in tensors(lease)]
    runs = sorted(region(tensor, pool) for tensor in held)
    assert all(a[1] <= b[0] for a, b in pairwise(runs)), "two share bytes"
    stats = pool.stats()
    assert stats.tensors == sum(tensor.nbytes for tensor in held)
    assert stats.taken == sum(aligned(tensor.nbytes) for tensor in held)
    assert stats.taken + stats.free == stats.budget


def test_growing_keeps_what_was_held():
    pool = new_pool(4_000_000)
    tokens = tiny_tokens(1, 30)
    with torch.inference_mode():
        private = target().new_cache(1, 64)
        target().forward(tokens[:, :15], private, commit=True)
        expected = target().forward(tokens[:, 15:], private, commit=True).hidden
        lease = pool.admit(PAGE)
        target().forward(tokens[:, :15], lease.cache, commit=True)
        lease = lease.grow(64)
        assert torch.equal(
            target().forward(tokens[:, 15:], lease.cache, commit=True).hidden, expected
        )
    assert pool.stats().leases == 1
    with pytest.raises(PoolFull):
        lease.grow(10**6)
    assert int(lease.cache.lengths[0]) == 30
