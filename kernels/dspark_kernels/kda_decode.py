"""A KDA layer between its projections, for the rows of one round: the specification of the kernel.

A round brings T new rows per sequence and keeps them, raw as the projections made them. How many of
them count is known when it is over: the next round replays those, and reads its own rows in the
same pass over the state. Nothing of a rejected row has to be undone, because nothing was done.

    held   W-1 rows that the convolution still sees, then R slots of which the first n are accepted
    u      held[: W-1+n], then the new rows
    x_t    silu(sum_i conv_i u_(t-W+1+i)) = q | k | v ;  q = q / |q| K^-1/2 ;  k = k / |k|
    g      bound sigmoid(exp(A) (a + dt)), or without a bound -exp(A) softplus(a + dt)
    S, o   the recurrence of `kda`, beta = sigmoid(b), over the n accepted rows and the new ones
    y      RMSNorm(o) w sigmoid(gate)

``kda_decode`` gives y of the new rows and leaves three things behind, in place: S after the n
accepted rows, read once and written once; the window behind those; the new rows in the slots. n is
a tensor: no shape depends on what was accepted. After a tree of rows ``kda_path`` moves the
accepted ones to the front, in all layers at once.

Letters: B batch, T new rows, R slots, H heads, K key width, V value width, W width of the
convolution, C = 2 H K + H V channels, N layers, P rows of a path.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels import kda
from dspark_kernels.low_rank_rows import low_rank_rows

UNIT_EPS = 1e-6


def kda_decode(
    rows: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    held_rows: Tensor,
    held_decay: Tensor,
    held_beta: Tensor,
    accepted: Tensor,
    state: Tensor,
    conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    lower_bound: float | None,
    upto: Tensor | None = None,
    taps: Tensor | None = None,
    fold: bool = False,
    second: Tensor | None = None,
) -> Tensor:
    """Rows ready for the output projection, [B, T, H V] in the dtype of ``rows``.

    Args:
        rows: [B, T, C], q | k | v before the convolution. Any float dtype, and the last dimension
            contiguous, here and in all that is [B, ..].
        decay: [B, T, H K], what A and dt turn into log-decays. beta: [B, T, H], before the sigmoid.
        gate: [B, T, H V], the output gate before its sigmoid.
        held_rows: [B, W-1+R, C]. held_decay: [B, R, H K]. held_beta: [B, R, H]. Changed in place.
            Slots from ``accepted`` on are not read: they may hold anything.
        accepted: [B] int32 or int64, 0 <= n <= R.
        state: [B, H, K, V] float32, changed in place.
        conv: [W, C], the oldest tap first. A_log: [H]. dt_bias: [H K]. norm: [V]. All float32.
        eps: Of the RMS norm.
        lower_bound: Of the gate; None: its softplus form.
        upto: [B or 1, T, T] bool, row j is row t or one of its ancestors. None: each new row
            follows the one before it.
        taps: [B or 1, T, W] int64, goes with ``upto``: where the convolution of each row reads,
            oldest first, itself last, in the last W-1 rows before the new ones and the new ones.
        fold: The new rows are accepted already, as in plain decoding: state and window go past
            them, the slots keep what they hold. Not with a tree.
        second: [1, H K, r] or [2, H V, r]: second factors of the decay, or of gate and decay, which
            are then given by their first, [B, T, r]. Two want K = V.

    Raises:
        ValueError: more new rows than slots, unless ``fold``; ``fold`` with a tree.
    """
    R, T, heads = held_decay.shape[1], decay.shape[1], len(A_log)
    check(R, T, upto, taps, fold)
    if second is not None:
        decay, gate = expand(decay, gate, second, low_rank_rows)
    real = torch.arange(R + T, device=state.device)
    real = ((real < accepted.unsqueeze(1)) | (real >= R)).unsqueeze(-1)  # [B, R+T, 1]
    place = _places(accepted, R, T, conv.shape[0], taps).masked_fill(~real, 0)
    u = _at(torch.cat((held_rows, rows), 1), place.flatten(1)).unflatten(1, place.shape[1:])
    x = F.silu((u.to(state.dtype) * conv).sum(2)).masked_fill(~real, 0.0)
    widths = (len(dt_bias), len(dt_bias), len(norm) * heads)
    q, k, v = (y.unflatten(-1, (heads, -1)) for y in x.split(widths, dim=-1))
    a = torch.cat((held_decay, decay), 1).to(state.dtype)
    g = log_decay(a, A_log, dt_bias, lower_bound).masked_fill(~real.unsqueeze(-1), 0.0)
    b = torch.cat((held_beta, beta), 1).to(state.dtype).sigmoid().masked_fill(~real, 0.0)
    upto = None if upto is None else _behind(upto, R)
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    out, _ = kda.step(q, k, v, g, b, state, R + T * fold, out=state, upto=upto)
    _hold(rows, decay, beta, held_rows, held_decay, held_beta, accepted, fold)
    gate = gate.to(state.dtype).unflatten(-1, (heads, -1))
    return gated_norm(out[:, R:], gate, norm, eps).to(rows.dtype).flatten(2)


def expand(
    decay: Tensor, gate: Tensor, second: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Decay and gate [B, T, ..] from their first factors, by `low_rank_rows` or its kernel."""
    first = [gate, decay][-len(second) :]
    made = product(torch.stack([x.flatten(0, 1) for x in first], 1), second)
    made = made.unflatten(1, decay.shape[:2])
    return made[-1], made[0] if len(second) > 1 else gate


def check(slots: int, rows: int, upto: Tensor | None, taps: Tensor | None, fold: bool) -> None:
    """What no implementation takes.

    Raises:
        ValueError: see `kda_decode`.
    """
    if (upto is None) != (taps is None):
        raise ValueError("a tree has both: upto and taps")
    if fold and upto is not None:
        raise ValueError("the rows of a tree cannot all be accepted")
    if not fold and rows > slots:
        raise ValueError(f"{rows} new rows into {slots} slots")


def _places(accepted: Tensor, slots: int, rows: int, width: int, taps: Tensor | None) -> Tensor:
    """[B, R+T, W]: where the convolution of slots and new rows reads in held and new rows."""
    device, window = accepted.device, width - 1
    step = torch.arange(width, device=device)
    held = (torch.arange(slots, device=device).unsqueeze(1) + step).expand(len(accepted), -1, -1)
    if taps is None:
        taps = (torch.arange(rows, device=device).unsqueeze(1) + step).unsqueeze(0)
    # a tap inside the last W-1 rows, or among the new ones
    taps = torch.where(taps < window, accepted.view(-1, 1, 1) + taps, slots + taps)
    return torch.cat((held, taps), 1)


def _at(x: Tensor, place: Tensor) -> Tensor:
    """x [B, n, X] at place [B, m]: [B, m, X]."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), place]


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps), over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """a [B, n, H K] -> g [B, n, H, K], <= 0."""
    a = (a + dt_bias).unflatten(-1, (len(A_log), -1))
    rate = A_log.exp().unsqueeze(-1)
    return -rate * F.softplus(a) if lower_bound is None else lower_bound * torch.sigmoid(rate * a)


def gated_norm(out: Tensor, gate: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMS norm over the head, times the sigmoid of the gate."""
    return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm * gate.sigmoid()


def _behind(upto: Tensor, slots: int) -> Tensor:
    """[B or 1, R+T, R+T]: the slots, a chain, come before every new row."""
    rows = slots + upto.shape[1]
    both = upto.new_ones(len(upto), rows, rows).tril_()
    both[:, slots:, slots:] = upto
    return both


def _hold(
    rows: Tensor,
    decay: Tensor,
    beta: Tensor,
    held_rows: Tensor,
    held_decay: Tensor,
    held_beta: Tensor,
    accepted: Tensor,
    fold: bool,
) -> None:
    """The window moves behind the accepted rows, and the new rows take the slots."""
    window, count = held_rows.shape[1] - held_decay.shape[1], rows.shape[1]
    at = accepted.unsqueeze(1) + torch.arange(window, device=accepted.device)
    last = _at(held_rows, at)
    if fold:
        held_rows[:, :window] = torch.cat((last, rows), 1)[:, count:]
        return
    held_rows[:, :window] = last
    held_rows[:, window : window + count] = rows
    held_decay[:, :count] = decay
    held_beta[:, :count] = beta


def kda_path(held_rows: Tensor, held_decay: Tensor, held_beta: Tensor, path: Tensor) -> None:
    """Move the slots of an accepted path to the front, in place, for all layers.

    Args:
        held_rows: [N, B, W-1+R, C]. held_decay: [N, B, R, H K]. held_beta: [N, B, R, H].
        path: [B, P] int64, slots from the root, so that path[i] >= i. Behind the last accepted one
            there may stand any slot that keeps to this.
    """
    window, count = held_rows.shape[2] - held_decay.shape[2], path.shape[1]
    batch = torch.arange(len(path), device=path.device).unsqueeze(1)
    for held, before in ((held_rows, window), (held_decay, 0), (held_beta, 0)):
        held[:, :, before : before + count] = held[:, batch, before + path]


def cost(
    batch: int, rows: int, slots: int, heads: int, keys: int, values: int, width: int, size: int = 2
) -> tuple[int, int]:
    """Bytes that must move and operations of `kda_decode` with all slots accepted; ``size`` is that
    of an activation. The state is read once and, if there are slots, written once."""
    channels = heads * (2 * keys + values)
    row = channels + heads * (keys + 1)
    state = 4 * heads * keys * values * (2 if slots else 1)
    read = (width - 1) * channels + (slots + rows) * row + rows * heads * values
    written = (width - 1) * channels + rows * (row + heads * values)
    small = 4 * (width * channels + heads * (keys + 1) + values)
    every = slots + rows
    per_head = 2 * (every + slots) * keys * values + 4 * every * every * keys
    return batch * (state + size * (read + written)) + small, batch * heads * per_head
