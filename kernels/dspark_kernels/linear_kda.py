"""Linearised KDA: outputs of one block of rows against a frozen entry state, without a solve.

A block of T rows enters with state S0. With G_t the sum of log-decays up to and including row t,
all decays being formed as exp(G_t - G_j) so that no factor can overflow:

    A[t,j] = beta_t sum_d k_t k_j exp(G_t - G_j)  (j before t)     R = beta (V - (K exp G) S0)
    order r:  U = sum_{n<=r} (-A)^n R                              gla:  U = beta V
    O[t] = (q_t exp G_t) S0 + sum_{j up to t} [sum_d q_t k_j exp(G_t - G_j)] U[j]

Exact KDA is U = (I + A)^-1 R. A is strictly lower triangular, so the series ends: order T-1 is
exact, order 0 is the delta rule against the frozen entry state, and ``gla`` drops the delta too,
which leaves gated linear attention. The error of order r is at most sum_{n>r} |A|^n |R|; it falls
with r where |A| < 1, and need not where keys are alike, betas near one and decays weak.

In a tree "before" means "is an ancestor of": row order is not path order, so G sums along the path
from the root and both masks hold ancestors. Siblings then never see each other.

Letters: B batch, T rows, H heads, K key width, V value width.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dspark_kernels.kda import MAX_EXPONENT

Order = int | str
"""0..T-1, or "gla"."""


def block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    order: Order,
    parents: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """Outputs of all rows of a block; the state is read and never changed.

    Args:
        q, k: [B, T, H, K], k L2-normalised, q already scaled by K^-1/2.
        v: [B, T, H, V].
        g: [B, T, H, K] log-decay, <= 0.
        beta: [B, T, H] in [0, 1].
        state: [B, H, K, V] before the block.
        order: 0..T-1, or "gla".
        parents: [T] int64, the row that each row follows, -1 for a row that follows the entry
            state; a parent stands before its children. None is a chain.
        lower_bound: What the gate guarantees, every g >= lower_bound. Where T rows of it stay below
            ``MAX_EXPONENT`` decays are factored, exp(G_t) exp(-G_j): fewer and smaller operations.

    Returns:
        [B, T, H, V] in the dtype of ``state``.

    Raises:
        ValueError: an order outside 0..T-1, or parents that do not come first.
    """
    rows = q.shape[1]
    check_order(order, rows)
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    beta = beta.transpose(1, 2).unsqueeze(-1)
    upto = ancestors(parents, rows, q.device)
    G = _path_sum(g, parents, upto)
    factored = lower_bound is not None and -lower_bound * rows <= MAX_EXPONENT
    exact_or_series = order != 0 and order != "gla"
    left = torch.cat((q, k), -2) if exact_or_series else q
    pairs = decayed_pairs(left, k, G, upto, factored=factored)
    decay = G.exp()
    out = torch.matmul(q * decay, state)
    if order == "gla":
        return (out + torch.matmul(pairs, beta * v)).transpose(1, 2)
    entry = beta * (v - torch.matmul(k * decay, state))
    updates = entry
    if exact_or_series:
        pairs, A = pairs[..., :rows, :], beta * pairs[..., rows:, :]
        updates = _series(A, entry, int(order))
    return (out + torch.matmul(pairs, updates)).transpose(1, 2)


def check_order(order: Order, rows: int) -> None:
    """Refuses what is no order of a block of ``rows`` rows, with ValueError."""
    if order == "gla" or (isinstance(order, int) and 0 <= order < rows):
        return
    raise ValueError(f"order {order!r}: 0..{rows - 1} or 'gla' for a block of {rows} rows")


def norm_of_A(k: Tensor, g: Tensor, beta: Tensor, parents: Tensor | None = None) -> Tensor:
    """Largest singular value of A per block and head, [B, H]: below 1 every order helps.

    Shapes as in ``block``.
    """
    return torch.linalg.matrix_norm(coupling(k, g, beta, parents), 2)


def coupling(k: Tensor, g: Tensor, beta: Tensor, parents: Tensor | None = None) -> Tensor:
    """A [B, H, T, T] itself: how strongly row j, written before t, is erased by row t."""
    k, g = k.transpose(1, 2), g.transpose(1, 2)
    upto = ancestors(parents, k.shape[-2], k.device)
    pairs = decayed_pairs(k, k, _path_sum(g, parents, upto), upto, factored=False)
    return (beta.transpose(1, 2).unsqueeze(-1) * pairs).tril(-1)


def ancestors(parents: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """[T, T] bool: row j is row t or one of its ancestors.

    Raises:
        ValueError: not one parent per row, or a parent that does not stand before its child.
    """
    if parents is None:
        return _chain(rows, device)
    if parents.shape != (rows,):
        raise ValueError(f"parents of shape {list(parents.shape)} for a block of {rows} rows")
    listed = parents.tolist()
    if any(not -1 <= parent < row for row, parent in enumerate(listed)):
        raise ValueError(f"parents {listed}: each is -1 or a row before its own")
    upto = torch.eye(rows, dtype=torch.bool)
    for row, parent in enumerate(listed):
        if parent >= 0:
            upto[row] |= upto[parent]
    return upto.to(device)


@cache
def _chain(rows: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a mask first made while decoding must serve training too
        return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()


def _path_sum(g: Tensor, parents: Tensor | None, upto: Tensor) -> Tensor:
    """G: log-decay summed from the entry state to each row, along its path."""
    return g.cumsum(-2) if parents is None else torch.matmul(upto.to(g.dtype), g)


def decayed_pairs(left: Tensor, k: Tensor, G: Tensor, upto: Tensor, *, factored: bool) -> Tensor:
    """sum_d left_t k_j exp(G_t - G_j) where j is up to t, else 0.

    ``left`` holds one or more stacks of T rows, [..., n T, K] -> [..., n T, T].
    """
    rows = k.shape[-2]
    stacks = left.shape[-2] // rows
    if factored:
        grown = (k * (-G).exp()).transpose(-1, -2)
        decay = G.exp()
        decay = torch.cat([decay] * stacks, -2) if stacks > 1 else decay
        future = ~(upto.repeat(stacks, 1) if stacks > 1 else upto)
        return torch.matmul(left * decay, grown).masked_fill(future, 0.0)
    # masked before the exp: between rows of no common path the difference may be positive and large
    difference = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(~upto.unsqueeze(-1), -torch.inf)
    weighted = difference.exp() * k.unsqueeze(-3)  # [..., t, j, K]
    columns = left.unflatten(-2, (stacks, rows)).movedim(-3, -1)  # [..., t, K, n]
    return torch.matmul(weighted, columns).movedim(-1, -3).flatten(-3, -2)


def _series(A: Tensor, entry: Tensor, order: int) -> Tensor:
    """sum_{n<=order} (-A)^n entry. Only what stands below the diagonal of A counts."""
    if order >= A.shape[-1] - 1:
        return torch.linalg.solve_triangular(A, entry, upper=False, unitriangular=True)
    A = A.tril(-1)
    updates = entry
    for _ in range(order):
        updates = entry - torch.matmul(A, updates)
    return updates
