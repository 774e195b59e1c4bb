"""Linearised KDA against the exact recurrence, in float64: outputs, error bound, trees, gradients.

The series U = sum (-A)^n R is recomputed here from explicit loops over pairs and paths, so that no
mask, sum or decay of the kernel is shared with what it is judged by.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels import kda
from dspark_kernels.kda_states import states_at
from dspark_kernels.linear_kda import Order, block, coupling, norm_of_A
from tests.oracles import fla_naive
from tests.tolerance import assert_close

B, T, H, K, V = 2, 8, 3, 12, 7
BOUND = -5.0
TREES = {
    "chain": list(range(-1, 7)),
    "siblings of every row": [-1, -1, 0, 0, 2, 2, 4, 4],
    "rows of two paths interleaved": [-1, -1, 0, 1, 2, 3, 4, 5],
    "star": [-1] * 8,
    "broom": [-1, 0, 1, 2, 3, 3, 3, 3],
}


@dataclass
class Given:
    """A block and its entry state, float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def all(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta, self.state

    def rows(self, path: list[int]) -> Given:
        q, k, v, g, beta = (x[:, path] for x in self.all()[:5])
        return Given(q, k, v, g, beta, self.state)


def given(rows: int = T, *, strongest: float = BOUND, alike: float = 0.0, seed: int = 3) -> Given:
    """Decays even in (strongest, 0); keys are unit, and with `alike` near 1 nearly the same."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, own, common = draw(B, rows, H, K), draw(B, rows, H, K), draw(B, 1, H, K)
    k = F.normalize(alike * F.normalize(common, dim=-1) + (1 - alike) * own, dim=-1)
    even = torch.rand(B, rows, H, K, generator=generator, dtype=torch.float64)
    beta = torch.rand(B, rows, H, generator=generator, dtype=torch.float64)
    beta = beta if not alike else 1 - 0.02 * beta
    return Given(
        F.normalize(q, dim=-1) * K**-0.5,
        k,
        draw(B, rows, H, V),
        strongest * even,
        beta,
        draw(B, H, K, V),
    )


def path_to(row: int, parents: list[int]) -> list[int]:
    """Rows from the root to `row`."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def series(x: Given, order: Order) -> Tensor:
    """The definition for a chain, pair by pair: [B, T, H, V]."""
    rows = x.q.shape[1]
    G = x.g.cumsum(1)

    def pair(a: Tensor, t: int, j: int) -> Tensor:  # [B, H, 1]
        return (a[:, t] * x.k[:, j] * (G[:, t] - G[:, j]).exp()).sum(-1, keepdim=True)

    def read(a: Tensor, t: int) -> Tensor:  # [B, H, V]
        return torch.einsum("bhk,bhkv->bhv", a[:, t] * G[:, t].exp(), x.state)

    entry = [
        x.beta[:, t, :, None] * (x.v[:, t] - (0 if order == "gla" else read(x.k, t)))
        for t in range(rows)
    ]
    term, updates = entry, entry
    for _ in range(0 if order == "gla" else int(order)):
        term = [
            -sum(
                (x.beta[:, t, :, None] * pair(x.k, t, j) * term[j] for j in range(t)),
                torch.zeros_like(entry[0]),
            )
            for t in range(rows)
        ]
        updates = [a + b for a, b in zip(updates, term, strict=True)]
    out = [
        read(x.q, t) + sum(pair(x.q, t, j) * updates[j] for j in range(t + 1)) for t in range(rows)
    ]
    return torch.stack(out, 1)


def error(x: Given, order: Order) -> Tensor:
    """Largest deviation from the recurrence per block and head, [B, H]."""
    exact, _ = kda.recurrent(*x.all())
    return (block(*x.all(), order) - exact).norm(dim=-1).amax(1)


@pytest.mark.parametrize("bound", [BOUND, None], ids=["factors", "differences"])
@pytest.mark.parametrize("order", [0, 1, 2, 5, T - 1, "gla"])
def test_every_order_is_its_series(order: Order, bound: float | None):
    x = given()
    assert_close(block(*x.all(), order, None, bound), series(x, order), limit=1e-13)


@pytest.mark.parametrize("rows", [1, 2, T, 20])
def test_the_last_order_is_exact(rows: int):
    x = given(rows)
    exact, _ = kda.recurrent(*x.all())
    assert_close(block(*x.all(), rows - 1), exact, limit=1e-12)


def test_exact_against_the_published_recurrence():
    """fla-core's own loop scales q itself and starts from the state it is given."""
    x = given()
    theirs, _ = fla_naive().naive_recurrent_kda(
        *(a.float() for a in (x.q * K**0.5, x.k, x.v, x.g, x.beta)),
        scale=K**-0.5,
        initial_state=x.state.float(),
        output_final_state=True,
    )
    assert_close(theirs, block(*x.all(), T - 1), limit=1e-5)


@pytest.mark.parametrize("strongest", [BOUND, -0.5])
def test_error_stays_under_its_bound(strongest: float):
    """|O_exact - O_r| <= |scores| sum_{n>r} |A|^n |R|, in 2-norms over the block."""
    x = given(strongest=strongest)
    A = coupling(x.k, x.g, x.beta)
    G = x.g.cumsum(1)
    entry = x.beta[..., None] * (
        x.v - torch.einsum("bthk,bhkv->bthv", x.k * G.exp(), x.state)
    )  # [B, T, H, V]
    R = torch.linalg.matrix_norm(entry.transpose(1, 2), 2)
    decay = (G[:, :, None] - G[:, None]).transpose(1, 3)  # [B, H, j, t, K]
    pairs = torch.einsum("bthk,bjhk,bhjtk->bhtj", x.q, x.k, decay.exp()).tril()
    reading = torch.linalg.matrix_norm(pairs, 2)
    norm = torch.linalg.matrix_norm(A, 2)
    exact, _ = kda.recurrent(*x.all())
    for order in range(T - 1):
        gap = (block(*x.all(), order) - exact).transpose(1, 2)
        tail = sum(norm**n for n in range(order + 1, T))
        assert (torch.linalg.matrix_norm(gap, 2) <= reading * tail * R * (1 + 1e-9)).all()


def test_error_falls_with_every_order_where_the_norm_is_below_one():
    x = given()
    small = norm_of_A(x.k, x.g, x.beta) < 1
    assert small.all(), "decays even in (-5, 0) keep |A| below one"
    errors = torch.stack([error(x, order) for order in range(T - 1)])
    assert (errors[1:] < errors[:-1]).all()


def test_the_series_is_not_monotone_where_keys_are_alike():
    """Keys alike, betas near one, hardly any decay: the first orders make it worse."""
    x = given(strongest=-0.01, alike=0.9)
    assert (norm_of_A(x.k, x.g, x.beta) > 2).all()
    errors = torch.stack([error(x, order) for order in range(T)])
    assert (errors[1:4] > errors[0]).all()
    assert (errors[T - 1] < 1e-10).all()


def test_norm_of_A_is_the_largest_gain():
    x = given()
    A = torch.zeros(B, H, T, T, dtype=torch.float64)
    G = x.g.cumsum(1)
    for t in range(T):
        for j in range(t):
            weight = x.k[:, t] * x.k[:, j] * (G[:, t] - G[:, j]).exp()
            A[..., t, j] = x.beta[:, t] * weight.sum(-1)
    assert_close(coupling(x.k, x.g, x.beta), A, limit=1e-13)
    assert_close(norm_of_A(x.k, x.g, x.beta), torch.linalg.svdvals(A)[..., 0], limit=1e-12)


@pytest.mark.parametrize("bound", [BOUND, None], ids=["factors", "differences"])
@pytest.mark.parametrize("order", [0, 1, 3, T - 1, "gla"])
@pytest.mark.parametrize("tree", TREES)
def test_a_tree_is_all_its_paths(tree: str, order: Order, bound: float | None):
    """Each row of a tree answers as the last row of its own path run alone."""
    x, parents = given(), TREES[tree]
    out = block(*x.all(), order, torch.tensor(parents), bound)
    for row in range(T):
        path = path_to(row, parents)
        alone = x.rows(path)
        shorter = order if order == "gla" else min(int(order), len(path) - 1)
        expected = block(*alone.all(), shorter)[:, -1]
        assert_close(out[:, row], expected, limit=1e-12, what=f"row {row}")
        if order == T - 1:
            exact, _ = kda.recurrent(*alone.all())
            assert_close(out[:, row], exact[:, -1], limit=1e-12, what=f"row {row}")


def test_a_tree_in_row_order_is_another_answer():
    """What the ancestor masks and path sums guard against is visible in sibling rows."""
    x = given()
    tree = block(*x.all(), 2, torch.tensor(TREES["siblings of every row"]))
    assert (tree - block(*x.all(), 2)).abs().amax((0, 2, 3))[1:].min() > 1e-3


@pytest.mark.parametrize("parents", [None, [-1, *range(19)], [-1] * 20])
@pytest.mark.parametrize("bound", [BOUND, None])
def test_long_blocks_of_the_strongest_decay_are_finite(
    parents: list[int] | None, bound: float | None
):
    """20 rows at -5: exp(-G) alone is exp(100), more than float32 holds."""
    x = given(20)
    leaves = [a.float().requires_grad_() for a in x.all()]
    leaves[3] = torch.full_like(x.g, BOUND, dtype=torch.float32).requires_grad_()
    tree = None if parents is None else torch.tensor(parents)
    for order in (0, 4, 19, "gla"):
        out = block(*leaves, order, tree, bound)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        assert all(torch.isfinite(a).all() for a in (out, *grads))


@pytest.mark.parametrize("order", [0, 1, 3, "gla"])
@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 2]], ids=["chain", "tree"])
@pytest.mark.parametrize("bound", [BOUND, None], ids=["factors", "differences"])
def test_gradients_are_finite_differences(
    order: Order, parents: list[int] | None, bound: float | None
):
    x = given(4).rows([0, 1, 2, 3])
    leaves = [a[:1, ..., :2, :3] if a.dim() > 3 else a[:1, ..., :2] for a in x.all()]
    leaves[-1] = x.state[:1, :2, :3, :3]
    leaves = [a.clone().requires_grad_() for a in leaves]
    tree = None if parents is None else torch.tensor(parents)
    assert torch.autograd.gradcheck(lambda *a: block(*a, order, tree, bound), leaves)


@pytest.mark.parametrize("bad", [-1, T, "GLA", 1.0])
def test_other_orders_are_refused(bad: object):
    with pytest.raises(ValueError, match=r"0\.\.7 or 'gla'"):
        block(*given().all(), bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [[-1] * 7, [0, *[-1] * 7], [-1, 2, 1, *[-1] * 5], [-2, *[-1] * 7]])
def test_parents_that_are_no_tree_are_refused(bad: list[int]):
    with pytest.raises(ValueError, match="parents"):
        block(*given().all(), 1, torch.tensor(bad))


LENGTHS = [0, 1, kda.CHUNK - 1, kda.CHUNK, 2 * kda.CHUNK, 2 * kda.CHUNK + 5]


@pytest.mark.parametrize("bound", [BOUND, None], ids=["factors", "differences"])
@pytest.mark.parametrize("rows", LENGTHS)
def test_states_at_any_positions(rows: int, bound: float | None):
    x = given(rows)
    positions = torch.tensor([[p for p in (*LENGTHS, 7, 7, 17) if p <= rows]]).repeat(B, 1)
    positions[1] = positions[1].flip(0)
    states = states_at(*x.all()[1:], positions, bound)
    for b, row in enumerate(positions.tolist()):
        for a, p in enumerate(row):
            cut = x.rows(list(range(p)))
            state = kda.recurrent(*cut.all())[1] if p else x.state
            assert_close(states[b, a], state[b], limit=1e-12, what=f"state before row {p}")


@pytest.mark.parametrize("bound", [BOUND, None], ids=["factors", "differences"])
def test_gradients_of_states_are_those_of_the_recurrence(bound: float | None):
    x = given(2 * kda.CHUNK + 5)
    positions = torch.tensor([[3, 16, 33], [0, 37, 20]])
    leaves = [a.clone().requires_grad_() for a in x.all()[1:]]
    weight = torch.randn(B, 3, H, K, V, generator=torch.Generator().manual_seed(1)).double()
    states = states_at(*leaves, positions, bound)
    ours = torch.autograd.grad((states.sin() * weight).sum(), leaves)
    total = torch.zeros((), dtype=torch.float64)
    for b, row in enumerate(positions.tolist()):
        for a, p in enumerate(row):
            cut = [leaf[b : b + 1, :p] for leaf in leaves[:4]]
            state = leaves[4][b : b + 1]
            state = kda.recurrent(cut[0], *cut, state)[1] if p else state
            total = total + (state[0].sin() * weight[b, a]).sum()
    theirs = torch.autograd.grad(total, leaves)
    for name, a, b_ in zip(("k", "v", "g", "beta", "state"), ours, theirs, strict=True):
        assert_close(a, b_, limit=1e-11, what=f"d {name}")


def test_states_of_the_strongest_decay_in_float32():
    x = given(2 * kda.CHUNK + 5)
    g = torch.full_like(x.g, BOUND)
    positions = torch.arange(38).repeat(B, 1)
    for bound in (BOUND, None):
        ours = states_at(*(a.float() for a in (x.k, x.v, g, x.beta, x.state)), positions, bound)
        expected = states_at(x.k, x.v, g, x.beta, x.state, positions)
        assert_close(ours, expected)
