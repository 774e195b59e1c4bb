"""The KDA state of a text at chosen positions, in one differentiable pass.

Training drafts a block at every anchor p of a row and needs the state after the rows before p.
The text is cut into chunks of C rows. A chunk acts on the state S that enters it through two
matrices that do not depend on S (``kda`` has G, and U = U0 - W S, the updates of its rows), so the
only sequential part is one product per chunk:

    S' = [diag(exp G_C) - (K exp(G_C - G))^T W] S + (K exp(G_C - G))^T U0

A position inside chunk n, r rows in, needs no second pass, because a row's update depends on
nothing after it:

    S_p = diag(exp G_r) S_n + sum_{j<=r} (k_j exp(G_r - G_j)) U_j^T

So A positions cost one gather and one matrix product, and A H K V numbers.

Letters: B batch, T rows, H heads, K key width, V value width, N chunks, C rows of one, A anchors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels.kda import CHUNK, MAX_EXPONENT
from dspark_kernels.linear_kda import ancestors, decayed_pairs


def states_at(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    positions: Tensor,
    lower_bound: float | None = None,
) -> Tensor:
    """The state after the first ``positions`` rows, exact.

    Args:
        k: [B, T, H, K], L2-normalised.
        v: [B, T, H, V].
        g: [B, T, H, K] log-decay, <= 0.
        beta: [B, T, H] in [0, 1]. A row with g = 0 and beta = 0 leaves the state as it is.
        state: [B, H, K, V] before the text.
        positions: [B, A] int64 in 0..T.
        lower_bound: What the gate guarantees, as in ``kda.chunk``.

    Returns:
        [B, A, H, K, V]
    """
    B, T, _, K = k.shape
    # One chunk more than the rows need: a position T at a chunk's end enters the next one.
    pad = CHUNK - T % CHUNK

    def split(x: Tensor) -> Tensor:  # [B, T, H, X] -> [B, N, H, C, X]
        x = F.pad(x, (0, 0, 0, 0, 0, pad))
        return x.unflatten(1, (-1, CHUNK)).transpose(2, 3)

    k, v, g, beta = (split(x) for x in (k, v, g, beta.unsqueeze(-1)))
    G = g.cumsum(-2)
    factored = lower_bound is not None and -lower_bound * CHUNK <= MAX_EXPONENT
    mask = ancestors(None, CHUNK, k.device)
    A = beta * decayed_pairs(k, k, G, mask, factored=factored)
    right = beta * torch.cat((v, k * G.exp()), -1)
    # only what stands below the diagonal is read, so A stands for I + A
    solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    U0, W = solved.split((v.shape[-1], K), -1)
    end = G[..., -1:, :]
    k_to_end = (k * (end - G).exp()).transpose(-1, -2)
    keep = torch.diag_embed(end.exp().squeeze(-2)) - torch.matmul(k_to_end, W)
    entering = _scan(keep, torch.matmul(k_to_end, U0), state)
    updates = U0 - torch.matmul(W, entering)
    row = torch.arange(B, device=k.device)[:, None]
    chunk, inside = positions // CHUNK, positions % CHUNK
    return _advance(
        entering[row, chunk],
        updates[row, chunk],
        k[row, chunk],
        G[row, chunk],
        inside,
    )


def _scan(keep: Tensor, add: Tensor, state: Tensor) -> Tensor:
    """S_n entering each chunk, S_{n+1} = keep_n S_n + add_n: [B, N, H, K, V] of [B, N, H, K, *]."""
    B, N, H, K, V = add.shape
    keeps, adds = (x.transpose(0, 1).reshape(N, B * H, K, -1) for x in (keep, add))
    state = state.reshape(B * H, K, V)
    entering = [state]
    for keep_n, add_n in zip(keeps[:-1].unbind(0), adds[:-1].unbind(0), strict=True):
        state = torch.baddbmm(add_n, keep_n, state)
        entering.append(state)
    return torch.stack(entering).view(N, B, H, K, V).transpose(0, 1)


def _advance(state: Tensor, updates: Tensor, k: Tensor, G: Tensor, rows: Tensor) -> Tensor:
    """States [B, A, H, K, V] after the first ``rows`` [B, A] of C rows; the rest as [.., H, C, X].

    Decay up to the last of them is G there, and zero (no decay) when there are none.
    """
    G_0 = F.pad(G, (0, 0, 1, 0))  # entry r is G after r rows
    index = rows[..., None, None, None].expand(*G.shape[:3], 1, G.shape[-1])
    last = G_0.gather(-2, index)
    later = torch.arange(k.shape[-2], device=k.device) >= rows[..., None]
    decay = (last - G).masked_fill(later[..., None, :, None], -torch.inf).exp()
    return last.exp().transpose(-1, -2) * state + torch.matmul(
        (k * decay).transpose(-1, -2), updates
    )


def states_bytes(
    B: int, T: int, H: int, K: int, V: int, A: int, row_bytes: int = 4, backward: bool = False
) -> int:
    """Bytes that ``states_at`` must move: inputs and states once, with ``row_bytes`` a number of k
    and v; with gradients the inputs again, theirs, and those of the states."""
    rows = T * (K + V) * row_bytes + 4 * T * (K + 1) + 4 * K * V
    states = 4 * A * K * V
    return B * H * (rows + states + (2 * rows + states if backward else 0))
