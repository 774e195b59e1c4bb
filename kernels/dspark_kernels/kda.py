"""Kimi Delta Attention: the gated delta rule with one decay per key channel.

Per head, with state S [K, V], log-decay g_t < 0 per channel, unit keys k_t, write strength beta_t:

    S <- diag(exp g_t) S ;  u = v_t - S^T k_t ;  S <- S + beta_t k_t u^T ;  o_t = S^T q_t

Decay comes first, then the delta against the decayed state, then the read. ``recurrent`` is that
loop and the specification. ``chunk`` is the same function in chunks of C rows (tech report eqs.
6-9): with G_r = sum of g up to row r inside the chunk,

    A[r,j] = beta_r sum_d k_r k_j exp(G_r - G_j)  (j < r) ;  U = (I + A)^-1 beta (V - (K exp G) S)
    O = (Q exp G) S + [j <= r](sum_d q_r k_j exp(G_r - G_j)) U
    S' = diag(exp G_C) S + (K exp(G_C - G))^T U

There are two ways to exp(G_r - G_j). By difference: [C, C, K] numbers, masked to -inf where j > r
*before* the exp, safe whatever g is. By factors exp(G_r) exp(-G_j): one matrix product, 2 C K
exponentials, but it overflows float32 once C |g| passes 88. A bounded gate (K3: g > -5) with C = 16
stays under 80, so ``chunk`` factors there, and only there. Both lose the same digits: an exponent
of 80 carries a rounding error of 80 ulp(1) either way.

``step`` is the decode form: outputs for every row, the state only after the first ``keep`` rows.
It lets a round fold the accepted rows of the previous block and read its own block in one pass, so
a rejected row never touches the state and no state is ever copied. Its rows may form a tree: then
"j < r" is "j is an ancestor of r" and G sums along the path from the root, because siblings follow
the same row and not each other. A sibling costs one more row, not one more state.

Letters: B batch, T rows, H heads, K key width, V value width, N chunks, C rows of a chunk.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 16


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One row at a time: the specification.

    Args:
        q, k: [B, T, H, K], already L2-normalised, q already scaled by K^-1/2.
        v: [B, T, H, V].
        g: [B, T, H, K] log-decay, <= 0.
        beta: [B, T, H] in [0, 1]. A row with g = 0 and beta = 0 leaves the state as it is.
        state: [B, H, K, V].

    Returns:
        Outputs [B, T, H, V] and the state after the last row; both in the dtype of ``state``.
    """
    outputs = []
    for t in range(q.shape[1]):
        state, out = recurrent_row(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outputs.append(out)
    return torch.stack(outputs, dim=1), state


def recurrent_row(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BHK: Tensor,
    beta_BH: Tensor,
    state: Tensor,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The new state [B, H, K, V], written to ``out`` if given, and the output [B, H, V] of one
    row."""
    state = torch.mul(state, g_BHK.exp().unsqueeze(-1), out=out)
    delta = v_BHV - torch.matmul(k_BHK.unsqueeze(-2), state).squeeze(-2)
    write = k_BHK.unsqueeze(-1) * (beta_BH.unsqueeze(-1) * delta).unsqueeze(-2)
    state = torch.add(state, write, out=out)
    return state, torch.matmul(q_BHK.unsqueeze(-2), state).squeeze(-2)


MAX_EXPONENT = 80.0
"""Largest exponent that may be factored: exp(80) and its products with unit keys fit in float32."""


@cache
def _future(rows: int, device: torch.device) -> Tensor:
    """[rows, rows] bool: j > r."""
    with torch.inference_mode(False):  # a mask first made while decoding must serve training too
        return torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)


def _pairs_by_difference(q: Tensor, k: Tensor, G: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
    """sum_d q_r k_j exp(G_r - G_j) and the same of k, [..., C, C]; zero where ``unseen``."""
    decay = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(unseen.unsqueeze(-1), -torch.inf).exp()
    read = torch.matmul(decay * k.unsqueeze(-3), torch.stack((q, k), dim=-1))  # [..., r, j, 2]
    return read[..., 0], read[..., 1]


def _pairs_by_factors(q: Tensor, k: Tensor, G: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
    """The same for C |g| <= MAX_EXPONENT; the second is left unmasked, which is right for a chain
    alone: there all that is unseen stands above the diagonal."""
    grown = (k * (-G).exp()).transpose(-1, -2)
    decay = G.exp()
    scores = torch.matmul(q * decay, grown).masked_fill(unseen, 0.0)
    return scores, torch.matmul(k * decay, grown)


def _within_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    factored: bool,
    upto: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything of a chunk that does not depend on the entering state. Inputs [..., C, *].

    ``upto`` [..., C, C] bool makes a tree of it: j is r or an ancestor of r. Never with factors.

    Returns:
        G [..., C, K] cumulative log-decay; scores [..., C, C] = masked q.k with decay;
        U0 [..., C, V] and W [..., C, K] with U = U0 - W S.
    """
    G = g.cumsum(-2) if upto is None else torch.matmul(upto.to(g.dtype), g)
    unseen = _future(q.shape[-2], q.device) if upto is None else ~upto
    scores, A = (_pairs_by_factors if factored else _pairs_by_difference)(q, k, G, unseen)
    A = A * beta.unsqueeze(-1)
    right = torch.cat((v, k * G.exp()), dim=-1) * beta.unsqueeze(-1)
    # only what stands below the diagonal is read, so A stands for I + A
    solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    return G, scores, solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same function as ``recurrent`` in chunks of ``CHUNK`` rows, for prefill and training.

    Args:
        lower_bound: What the gate guarantees: every g >= lower_bound. None guarantees nothing.
        cu_seqlens: [S + 1] int64, ascending from 0 to T: rows cu_seqlens[s] to cu_seqlens[s + 1] of
            a batch of one are sequence s, which may be empty, and ``state`` holds S of them. None:
            every batch row is one sequence.

    Returns:
        Outputs [B, T, H, V] in the dtype of ``v``, and the states after the last rows.
    """
    if cu_seqlens is not None:
        return _chunk_packed(q, k, v, g, beta, state, lower_bound, cu_seqlens)
    factored = lower_bound is not None and -lower_bound * CHUNK <= MAX_EXPONENT
    B, T, H, _ = q.shape
    pad = -T % CHUNK

    def split(x: Tensor) -> Tensor:  # [B, T, H, X] -> [B, H, N, C, X]
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)).transpose(1, 2)
        return x.reshape(B, H, -1, CHUNK, x.shape[-1])

    q, k, v, g, beta = (split(x) for x in (q, k, v, g, beta.unsqueeze(-1)))
    G, scores, U0, W = _within_chunk(q, k, v, g, beta.squeeze(-1), factored=factored)
    end_decay = G[..., -1, :].exp().unsqueeze(-1)  # [B, H, N, K, 1]
    k_to_end = (k * (G[..., -1:, :] - G).exp()).transpose(-1, -2)
    entering, updates = [], []
    for n in range(q.shape[2]):
        entering.append(state)
        updates.append(U0[:, :, n] - torch.matmul(W[:, :, n], state))
        state = end_decay[:, :, n] * state + torch.matmul(k_to_end[:, :, n], updates[-1])
    out = torch.matmul(q * G.exp(), torch.stack(entering, 2)) + torch.matmul(
        scores, torch.stack(updates, 2)
    )
    return out.reshape(B, H, -1, v.shape[-1])[:, :, :T].transpose(1, 2).to(v.dtype), state


def _chunk_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    lower_bound: float | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """``chunk`` of one sequence after the other."""
    bounds = cu_seqlens.tolist()
    outputs, states = [v.new_empty(1, 0, *v.shape[2:])], []
    for s, (first, last) in enumerate(pairwise(bounds)):
        after = state[s : s + 1]
        if last > first:
            part = slice(first, last)
            out, after = chunk(
                q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], after, lower_bound
            )
            outputs.append(out)
        states.append(after)
    return torch.cat(outputs, 1), torch.cat(states)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    keep: int,
    out: Tensor | None = None,
    upto: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs of all T rows, and the state after the first ``keep`` rows only (0 <= keep <= T).

    Args and shapes as ``recurrent``. With ``keep`` = 0 the state is returned as it came.

    Args:
        out: [B, H, K, V], where the new state is written; it may be ``state`` itself, which is then
            advanced in place. None: a new tensor. Not differentiable with ``out``.
        upto: [B or 1, T, T] bool: row j is row t or one of its ancestors in a tree of rows, which
            takes the place of row order. Parents stand before their children, and the first
            ``keep`` rows are a chain and ancestors of all others. None: all rows are one chain.
    """
    if q.shape[1] == 1 and keep == 1:
        new, read = recurrent_row(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state, out)
        return read.unsqueeze(1), new
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    upto = None if upto is None else upto.unsqueeze(1)
    G, scores, U0, W = _within_chunk(q, k, v, g, beta, factored=False, upto=upto)
    U = U0 - torch.matmul(W, state)
    read = torch.matmul(q * G.exp(), state) + torch.matmul(scores, U)
    if keep:
        end = G[..., keep - 1 : keep, :]
        k_to_end = (k[..., :keep, :] * (end - G[..., :keep, :]).exp()).transpose(-1, -2)
        write = torch.matmul(k_to_end, U[..., :keep, :])
        state = torch.add(torch.mul(end.transpose(-1, -2).exp(), state, out=out), write, out=out)
    return read.transpose(1, 2), state


def chunk_bytes(
    B: int, T: int, H: int, K: int, V: int, row_bytes: int, backward: bool = False
) -> int:
    """Bytes that ``chunk`` must move: inputs and outputs once, with ``row_bytes`` a number of q, k,
    v and the outputs, 4 of g, beta and states. With gradients: inputs again, theirs, and those of
    the outputs."""
    rows = T * (2 * K + V) * row_bytes + 4 * T * (K + 1) + 4 * K * V
    results = T * V * row_bytes + 4 * K * V
    return B * H * (rows + results + (2 * rows + results if backward else 0))


def chunk_flops(B: int, T: int, H: int, K: int, V: int, backward: bool = False) -> int:
    """Operations of ``chunk`` in chunks of 64 rows, square products in full: the pairs of q and k,
    the solve, and what meets the state; the gradients run the forward again."""
    C = 64
    forward = 4 * C * C * K + C * C * (K + V) + 6 * C * K * V + 2 * C * C * V
    gradients = 8 * C * C * (K + V) + 12 * C * K * V
    return B * H * -(-T // C) * (2 * forward + gradients if backward else forward)
