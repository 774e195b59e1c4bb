"""Blocks that are trees: each row answers as the last row of its own path, and a path commits.

Kernel: in float64 against the recurrence run along every path. Model: hidden states (logits are
them times the head) and taps against a fresh prefill of committed text and path, and after
``commit_path`` the cache against a fresh prefill of all that is committed, over memory full of NaN.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.k3.cache import K3Cache
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.k3.tree import plant
from dspark.taps import TapSet
from dspark_kernels import kda as kernel
from tests.k3_fresh import (
    LIMIT,
    Poisoned,
    assert_equal_contents,
    assert_same,
    contents,
    in_double,
    prefill,
    shared,
)
from tests.k3_tiny import PLAIN, TINY, tiny_tokens
from tests.tolerance import assert_close

EXACT = 1e-11
"""What float64 may leave between two orders of summing: all of these tests pass at 1e-12."""
CONFIGS = pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi_linear"])
TREES = {
    "chain": [-1, 0, 1, 2, 3, 4, 5],
    "two siblings of each": [-1, 0, 1, 2, 0, 0, 1, 1, 2, 2],
    "siblings of siblings": [-1, 0, 0, 1, 1, 2, 2, 6],
    "two roots": [-1, -1, 0, 1, 2, 3],
    "star": [-1, 0, 0, 0, 0],
    "deep after a leaf": [-1, 0, 0, 2, 3, 4, 5],
    "alone": [-1],
}
every_tree = pytest.mark.parametrize("tree", TREES)


def path_to(row: int, parents: list[int]) -> list[int]:
    path: list[int] = []
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    return path


def padded(paths: list[list[int]]) -> Tensor:
    width = max(map(len, paths))
    return torch.tensor([path + [-1] * (width - len(path)) for path in paths]).long()


# --- the kernel, in float64 --------------------------------------------------------------------


def streams(batch: int, rows: int, *, steep: bool = False) -> list[Tensor]:
    """q, k, v, g, beta and a state, float64; ``steep`` decays as fast as a gate can."""
    H, K, V = 2, 5, 3
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(batch, rows, H, K), dim=-1) for _ in range(2))
    g = torch.full_like(q, -5.0) if steep else -draw(batch, rows, H, K).abs()
    beta = draw(batch, rows, H).sigmoid()
    return [q, k, draw(batch, rows, H, V), g, beta, draw(batch, H, K, V)]


@pytest.mark.parametrize("steep", [False, True])
@pytest.mark.parametrize("replayed", [0, 1, 4])
@every_tree
def test_a_tree_is_all_its_paths(tree: str, replayed: int, steep: bool):
    parents = TREES[tree]
    *x, state = streams(2, replayed + len(parents), steep=steep)
    planted = plant(torch.tensor(parents), None, 2, len(parents))
    out, kept = kernel.step(*x, state, replayed, upto=planted.behind(replayed))
    if replayed:
        _, after_replay = kernel.recurrent(*(part[:, :replayed] for part in x), state)
        assert_close(kept, after_replay, limit=1e-12)
    else:
        assert kept is state
    for row in range(len(parents)):
        rows = [*range(replayed), *(replayed + r for r in path_to(row, parents))]
        along, _ = kernel.recurrent(*(part[:, rows] for part in x), state)
        assert_close(out[:, replayed + row], along[:, -1], limit=1e-12, what=f"row {row}")


def test_a_tree_per_batch_row():
    trees = [TREES["two siblings of each"][:8], TREES["siblings of siblings"]]
    *x, state = streams(2, 8)
    out, _ = kernel.step(*x, state, 0, upto=plant(torch.tensor(trees), None, 2, 8).upto)
    for b, parents in enumerate(trees):
        alone = [part[b : b + 1] for part in (*x, state)]
        one, _ = kernel.step(*alone, 0, upto=plant(torch.tensor(parents), None, 1, 8).upto)
        assert torch.equal(out[b], one[0])


def test_row_order_is_another_answer():
    """What the ancestor form guards against shows in every row behind a sibling."""
    *x, state = streams(1, 10)
    parents = torch.tensor(TREES["two siblings of each"])
    tree, _ = kernel.step(*x, state, 0, upto=plant(parents, None, 1, 10).upto)
    chain, _ = kernel.step(*x, state, 0)
    difference = (tree - chain).abs().amax((0, 2, 3))
    assert difference[:4].max() < 1e-12  # the primaries are a chain
    assert difference[4:].min() > 1e-3


def test_a_chain_given_as_a_tree_is_the_chain():
    *x, state = streams(2, 9)
    tree = plant(torch.arange(-1, 8), None, 2, 9)
    for keep in (0, 4):
        ours = kernel.step(*x, state, keep, upto=tree.upto)
        for mine, expected in zip(ours, kernel.step(*x, state, keep), strict=True):
            assert_close(mine, expected, limit=1e-13)


def test_out_is_written_in_place_and_nothing_else_is():
    *x, state = streams(2, 6)
    for rows, keep in ((6, 4), (1, 1)):
        given_rows = [part[:, :rows] for part in x]
        expected_out, expected = kernel.step(*given_rows, state, keep)
        held, before = state.clone(), [part.clone() for part in x]
        out, new = kernel.step(*given_rows, held, keep, out=held)
        assert new is held
        assert torch.equal(held, expected)
        assert torch.equal(out, expected_out)
        assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


# --- the places a tree reads -------------------------------------------------------------------


def test_convolution_taps_and_window_by_hand():
    """Window places 0 1 2, rows from 3: what stands before each row along its path."""
    tree = plant(torch.tensor([-1, 0, 1, 2, 0, 4, -1]), None, 1, 7)
    assert tree.taps(4)[0].tolist() == [
        [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6],
        [1, 2, 3, 7], [2, 3, 7, 8], [0, 1, 2, 9],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("parents", "valid"),
    [
        ([-1, 1, 0], None),  # itself
        ([-1, 2, 0], None),  # a row behind
        ([-2, 0, 1], None),
        ([-1, 0, 1], [True, False, True]),  # a row that is not there
        ([-1, 0], None),  # not one for each row
    ],
)
def test_what_is_no_tree_is_refused(parents: list[int], valid: list[bool] | None):
    mask = None if valid is None else torch.tensor([valid])
    with pytest.raises(ValueError, match="parents"):
        plant(torch.tensor(parents), mask, 1, 3)


# --- the whole model ---------------------------------------------------------------------------


def waiting(model: K3ForCausalLM, accepted: list[int]) -> tuple[K3Cache, list[Tensor]]:
    """A cache over poisoned memory whose last round left a replay; the committed texts."""
    batch = len(accepted)
    held = model.new_cache(batch, 64, Poisoned())
    prompt, draft = tiny_tokens(batch, 6), tiny_tokens(batch, 5, seed=5)
    model(prompt, held)
    model(draft, held, commit=False)
    held.commit(torch.tensor(accepted))
    texts = zip(prompt, draft, accepted, strict=True)
    return held, [torch.cat((text, more[:n])) for text, more, n in texts]


def assert_rows(
    model: K3ForCausalLM,
    texts: list[Tensor],
    rows: Tensor,
    parents: list[list[int]],
    out: Tensor,
    limit: float = LIMIT,
) -> None:
    for b, tree in enumerate(parents):
        for row in range(len(tree)):
            line = torch.cat((texts[b], rows[b, path_to(row, tree)]))
            expected = model(line.unsqueeze(0))[0][0, -1]
            assert_close(out[b, row], expected, limit=limit, what=f"batch {b} row {row}")


@pytest.mark.parametrize("accepted", [[3], [0, 5]])
@every_tree
def test_every_row_and_every_path(accepted: list[int], tree: str):
    """[T] parents for the whole batch; then each path in turn is committed, from a fork."""
    model, parents = shared(), TREES[tree]
    held, texts = waiting(model, accepted)
    rows = tiny_tokens(len(texts), len(parents), seed=3)
    for last in range(-1, len(parents)):
        path, twin = path_to(last, parents), held.fork(Poisoned())
        out, _ = model(rows, twin, parents=torch.tensor(parents), commit=False)
        if last < 0:
            assert_rows(model, texts, rows, [parents] * len(texts), out)
        twin.commit_path(torch.tensor([path] * len(texts)).long().view(len(texts), -1))
        for b, text in enumerate(texts):
            assert_same(model, twin, b, torch.cat((text, rows[b, path])), torch.tensor(7))


@CONFIGS
@every_tree
def test_every_row_and_every_path_in_float64(config: K3Config, tree: str):
    parents = TREES[tree]
    with in_double(config) as model:
        held, texts = waiting(model, [3, 1])
        rows = tiny_tokens(2, len(parents), seed=3)
        for last in range(len(parents)):
            path, twin = path_to(last, parents), held.fork(Poisoned())
            out, _ = model(rows, twin, parents=torch.tensor(parents), commit=False)
            if last == 0:
                assert_rows(model, texts, rows, [parents] * 2, out, limit=EXACT)
            twin.commit_path(torch.tensor([path, path]))
            for b, text in enumerate(texts):
                line = torch.cat((text, rows[b, path]))
                assert_same(model, twin, b, line, torch.tensor(7), limit=EXACT)


@CONFIGS
def test_a_ragged_batch_of_trees(config: K3Config):
    """Three lengths, three trees, padding inside the rows, an idle slot, ragged paths."""
    model = shared(config)
    check_ragged_trees(model, LIMIT)
    with in_double(config) as model:
        check_ragged_trees(model, EXACT)


def check_ragged_trees(model: K3ForCausalLM, limit: float) -> None:
    held, texts = waiting(model, [2, 5, 0, 4])
    parents = [[-1, 0, 1, 0, 1, 4], [-1, 0, 50, 1, -7, 0], [9] * 6, [-1, 0, 1, 2, 3, 4]]
    valid = torch.ones(4, 6, dtype=torch.bool)
    valid[1, [2, 4]] = False
    valid[2] = False
    rows = tiny_tokens(4, 6, seed=4)
    out, _ = model(rows, held, parents=torch.tensor(parents), valid=valid, commit=False)
    for b, real in ((0, range(6)), (1, (0, 1, 3, 5)), (3, range(6))):
        for row in real:
            line = torch.cat((texts[b], rows[b, path_to(row, parents[b])]))
            assert_close(out[b, row], model(line.unsqueeze(0))[0][0, -1], limit=limit)
    paths = [[0, 1, 4, 5], [0, 1, 3], [], [0, 1]]
    held.commit_path(padded(paths))
    for b, path in enumerate(paths):
        line = torch.cat((texts[b], rows[b, path]))
        assert_same(model, held, b, line, torch.tensor(7), limit)


@pytest.mark.parametrize("kind", ["raw_prefix", "attn_res_mixture"])
def test_taps_of_a_tree(kind: str):
    model, parents = shared(), TREES["two siblings of each"]
    held, (text,) = waiting(model, [3])
    taps, rows = TapSet((0, 3, 6), kind), tiny_tokens(1, 10, seed=3)
    _, tapped = model(rows, held, parents=torch.tensor(parents), taps=taps, commit=False)
    for row in range(10):
        line = torch.cat((text, rows[0, path_to(row, parents)])).unsqueeze(0)
        _, expected = model(line, taps=taps)
        assert_close(tapped[0, row], expected[0, -1], limit=LIMIT, what=f"row {row}")


def test_first_rows_of_a_tree_commit_as_of_a_chain():
    """No sibling was accepted: the count is enough, and nothing is moved."""
    model, parents = shared(), torch.tensor([-1, 0, 1, 2, 0, 1])
    rows = tiny_tokens(2, 6, seed=3)
    for n in (3, torch.tensor([3, 3]), torch.tensor([1, 4])):
        held, texts = waiting(model, [2, 2])
        model(rows, held, parents=parents, commit=False)
        held.commit(n)
        for b, count in enumerate([n, n] if isinstance(n, int) else n.tolist()):
            line = torch.cat((texts[b], rows[b, :count]))
            assert_same(model, held, b, line, torch.tensor(7))


def test_a_chain_takes_paths_too():
    model, rows = shared(), tiny_tokens(2, 4, seed=3)
    held, texts = waiting(model, [2, 2])
    model(rows, held, commit=False)
    for wrong in ([[0, 2], [0, 1]], [[1, -1], [0, -1]]):
        with pytest.raises(ValueError, match="expected rows in order from the root"):
            held.commit_path(torch.tensor(wrong))
    held.commit_path(torch.tensor([[0, 1, 2], [0, -1, -1]]))
    assert_same(model, held, 0, torch.cat((texts[0], rows[0, :3])), torch.tensor(7))
    assert_same(model, held, 1, torch.cat((texts[1], rows[1, :1])), torch.tensor(7))


@CONFIGS
def test_rolling_back_a_tree_changes_no_bit(config: K3Config):
    model = shared(config)
    held, _ = waiting(model, [2, 4])
    before = [contents(held, row) for row in range(2)]
    parents = torch.tensor([-1, 0, 0, 1])
    for undo in (held.rollback, lambda: held.commit_path(torch.full((2, 3), -1))):
        model(tiny_tokens(2, 4, seed=4), held, parents=parents, commit=False)
        undo()
        for row in range(2):
            for name, part in contents(held, row).items():
                assert_close(part, before[row][name], limit=1e-6, what=name)
    # the replay was folded by the first of these forwards, so from there on it is bit for bit
    before = [contents(held, row) for row in range(2)]
    model(tiny_tokens(2, 4, seed=4), held, parents=parents, commit=False)
    held.rollback()
    for row in range(2):
        assert all(torch.equal(p, before[row][n]) for n, p in contents(held, row).items())


WRONG_PATHS = {
    "not from the root": [[1, 3]],
    "a row left out": [[0, 3]],
    "two siblings": [[0, 1, 2]],
    "a row twice": [[0, 0]],
    "backwards": [[1, 0]],
    "outside": [[0, 9]],
    "below the padding": [[0, -2]],
    "padding inside": [[-1, 0]],
    "padding row": [[0, 4]],
    "another batch": [[0], [0]],
    "no batch": [0, 1],
}


@pytest.mark.parametrize("wrong", WRONG_PATHS)
def test_wrong_paths_are_refused_and_the_block_stays(wrong: str):
    model = shared()
    held, (text,) = waiting(model, [3])
    rows, parents = tiny_tokens(1, 5, seed=3), torch.tensor([-1, 0, 0, 1, 0])
    valid = torch.tensor([[True, True, True, True, False]])
    model(rows, held, parents=parents, valid=valid, commit=False)
    with pytest.raises(ValueError, match="path"):
        held.commit_path(torch.tensor(WRONG_PATHS[wrong]))
    for count in (3, torch.tensor([5]), -1, 6):  # rows 0, 1, 2 are no path
        with pytest.raises(ValueError, match="expected"):
            held.commit(count)
    held.commit_path(torch.tensor([[0, 1, 3]]))
    assert_same(model, held, 0, torch.cat((text, rows[0, [0, 1, 3]])), torch.tensor(7))


def test_a_tree_needs_a_cache_and_stays_pending():
    model, rows, parents = shared(), tiny_tokens(1, 2), torch.tensor([-1, 0])
    held = model.new_cache(1, 8)
    with pytest.raises(ValueError, match="commit=False"):
        model(rows, held, parents=parents, commit=True)
    with pytest.raises(ValueError, match="needs a cache"):
        model(rows, parents=parents)
    with pytest.raises(ValueError, match="parents"):
        model(rows, held, parents=torch.tensor([[-1, 0], [-1, 0]]), commit=False)
    with pytest.raises(ValueError, match="nothing to commit"):
        held.commit_path(torch.tensor([[0]]))
    model(rows, held, parents=parents, commit=False)  # and the cache is as good as before
    held.commit(2)
    assert_same(model, held, 0, rows[0], torch.tensor(7))


@CONFIGS
@pytest.mark.parametrize("hurt", ["sibling", "primary"])
def test_a_rejected_row_that_is_not_finite_reaches_nothing(config: K3Config, hurt: str):
    """A row of a rejected branch overflowed: what is kept, and later rounds, never see it."""
    model = shared(config)
    held, texts = waiting(model, [2, 4])
    rows, parents = tiny_tokens(2, 5, seed=3), [-1, 0, 0, 1, 2]
    model(rows, held, parents=torch.tensor(parents), commit=False)
    bad, path = ([2, 4], [0, 1, 3]) if hurt == "sibling" else ([1, 3], [0, 2, 4])
    for kda in held._kda():
        assert kda._pending is not None
        assert kda._pending_rows is not None
        for x in kda._pending.tensors():
            x[:, bad] = math.nan
        kda._pending_rows[:, [3 + b for b in bad]] = math.nan
    for mla in held._mla():
        for b, length in enumerate(held.lengths.tolist()):
            mla.latents[b, [length + r for r in bad]] = math.nan
    held.commit_path(padded([path, path[:2]]))
    for b, kept in enumerate((path, path[:2])):
        assert_same(model, held, b, torch.cat((texts[b], rows[b, kept])), torch.tensor(7))


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[list[int]], list[list[bool]], list[list[int]]]:
    """Parents, valid and an accepted path of two batch rows."""
    rows = draw(st.integers(1, 10))
    trees, valids, paths = [], [], []
    for _ in range(2):
        valid = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        parents = []
        for row in range(rows):
            above = [-1, *(r for r in range(row) if valid[r])]
            parents.append(draw(st.sampled_from(above)))
        ends = [-1, *(r for r in range(rows) if valid[r])]
        trees.append(parents)
        valids.append(valid)
        paths.append(path_to(draw(st.sampled_from(ends)), parents))
    return trees, valids, paths


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(forests(), min_size=1, max_size=3), st.lists(st.integers(0, 5), min_size=2, max_size=2)
)
def test_any_trees_one_after_another(
    rounds: list[tuple[list[list[int]], list[list[bool]], list[list[int]]]], accepted: list[int]
):
    model = shared()
    held, texts = waiting(model, accepted)
    for number, (parents, valid, paths) in enumerate(rounds):
        rows = tiny_tokens(2, len(parents[0]), seed=50 + number)
        given_parents, mask = torch.tensor(parents), torch.tensor(valid)
        out, _ = model(rows, held, parents=given_parents, valid=mask, commit=False)
        held.commit_path(padded(paths))
        for b, path in enumerate(paths):
            line = torch.cat((texts[b], rows[b, path]))
            if path:
                last, fresh = prefill(model, line.unsqueeze(0))
                assert_close(out[b, path[-1]], last[0, -1], limit=LIMIT)
                assert_equal_contents(held, b, fresh, 0)
            texts[b] = line
    for b, text in enumerate(texts):
        assert_same(model, held, b, text, torch.tensor(7))
