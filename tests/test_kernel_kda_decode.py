"""A KDA layer of one round: against the layer of the model round by round, and the kernel against
its specification in float64."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.k3.tree import ancestors, plant
from dspark_kernels import kda
from dspark_kernels.kda_decode import kda_decode, kda_path, log_decay, unit


@dataclass
class Call:
    """The arguments of one call, in the order of the signature."""

    rows: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor
    held_rows: Tensor
    held_decay: Tensor
    held_beta: Tensor
    accepted: Tensor
    state: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    lower_bound: float | None
    upto: Tensor | None = None
    taps: Tensor | None = None
    fold: bool = False

    def args(self) -> tuple:
        return tuple(getattr(self, f.name) for f in fields(self))

    def copy(self, dtype: torch.dtype | None = None) -> Call:
        """Everything anew; floats as ``dtype``."""

        def one(x: object) -> object:
            if not isinstance(x, Tensor):
                return x
            return x.to(dtype) if dtype is not None and x.is_floating_point() else x.clone()

        return Call(*(one(x) for x in self.args()))


def make_call(
    B=2, T=3, R=4, H=2, K=16, V=16, W=4, bound: float | None = -5.0, dtype=torch.float32
) -> Call:
    """A random round, everything accepted differently."""
    C = H * (2 * K + V)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    return Call(
        rand(B, T, C), 2 * rand(B, T, H * K), rand(B, T, H), rand(B, T, H * V),
        rand(B, W - 1 + R, C), 2 * rand(B, R, H * K), rand(B, R, H),
        torch.randint(0, R + 1, (B,)), torch.randn(B, H, K, V),
        torch.randn(W, C), torch.randn(H), torch.randn(H * K), torch.rand(V) + 0.5, 1e-5, bound,
    )  # fmt: skip


def plain(c: Call, row: int, line: Tensor, decay: Tensor, beta: Tensor, state: Tensor):
    """q, k, v, g, beta [1, n, H, *] of a whole sequence ``line`` that begins with its window, and
    what the recurrence makes of them."""
    W, heads = len(c.conv), len(c.A_log)
    n = len(line) - W + 1
    x = F.silu(sum(c.conv[i] * line[i : i + n] for i in range(W)))
    widths = (len(c.dt_bias), len(c.dt_bias), heads * len(c.norm))
    q, k, v = (y.unflatten(-1, (heads, -1))[None] for y in x.split(widths, -1))
    q = unit(q) * q.shape[-1] ** -0.5
    g = log_decay(decay[None], c.A_log, c.dt_bias, c.lower_bound)
    return kda.recurrent(q, unit(k), v, g, beta.sigmoid()[None], state[None])


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("fold", [False, True])
def test_a_round_is_the_recurrence_over_accepted_and_new_rows(bound, fold) -> None:
    c = make_call(bound=bound).copy(torch.float64)
    c.fold = fold
    before = c.copy()
    out = kda_decode(*c.args())
    W, R, T = len(c.conv), c.held_decay.shape[1], c.rows.shape[1]
    for b, n in enumerate(c.accepted.tolist()):
        line = torch.cat((before.held_rows[b, : W - 1 + n], before.rows[b]))
        decay = torch.cat((before.held_decay[b, :n], before.decay[b]))
        beta = torch.cat((before.held_beta[b, :n], before.beta[b]))
        read, end = plain(c, b, line, decay, beta, before.state[b])
        y = read[0, n:]
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + c.eps) * c.norm
        y = y.flatten(1) * before.gate[b].sigmoid()
        assert (out[b] - y).abs().max() < 1e-10
        if not fold:
            cut = W - 1 + n
            _, end = plain(c, b, line[:cut], decay[:n], beta[:n], before.state[b])
            assert torch.equal(c.held_rows[b, W - 1 : W - 1 + T], before.rows[b])
            assert torch.equal(c.held_decay[b, :T], before.decay[b])
            assert torch.equal(c.held_beta[b, :T], before.beta[b])
            assert torch.equal(c.held_rows[b, : W - 1], line[n : n + W - 1])
        else:
            assert torch.equal(c.held_rows[b, : W - 1], line[-(W - 1) :])
            assert torch.equal(c.held_rows[b, W - 1 :], before.held_rows[b, W - 1 :])
        assert (c.state[b] - end[0]).abs().max() < 1e-10
    assert c.held_decay.shape[1] == R
