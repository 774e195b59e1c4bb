"""A KDA layer of one round: the specification against the layer of the model, round by round, and
the kernel against its specification in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.k3.config import K3Config
from dspark.k3.kda import KDA
from dspark.k3.rounds import Rounds
from dspark.k3.state import KDAState
from dspark.k3.tree import plant
from dspark_kernels import kda, kda_decode_triton
from dspark_kernels.kda_decode import kda_decode, kda_path, log_decay, unit
from tests.k3_tiny import PLAIN, TINY
from tests.tolerance import assert_close

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)


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
    second: Tensor | None = None

    def args(self) -> tuple[object, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    def copy(self, dtype: torch.dtype | None = None, device: str | None = None) -> Call:
        """Everything anew, floats as ``dtype``."""

        def one(x: object) -> object:
            if not isinstance(x, Tensor):
                return x
            kind = dtype if x.is_floating_point() else None
            return x.to(device or x.device, kind or x.dtype, copy=True)

        return Call(*(one(x) for x in self.args()))


def round_of(
    B: int = 2,
    T: int = 3,
    R: int = 4,
    H: int = 2,
    K: int = 64,
    V: int = 64,
    W: int = 4,
    bound: float | None = -5.0,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """A random round. Slots that were not accepted hold NaN."""
    C = H * (2 * K + V)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    call = Call(
        rand(B, T, C), 2 * rand(B, T, H * K), rand(B, T, H), rand(B, T, H * V),
        rand(B, W - 1 + R, C), 2 * rand(B, R, H * K), rand(B, R, H),
        torch.randint(0, R + 1, (B,)), torch.randn(B, H, K, V),
        torch.randn(W, C), torch.randn(H), torch.randn(H * K), torch.rand(V) + 0.5, 1e-5, bound,
    )  # fmt: skip
    for b, n in enumerate(call.accepted.tolist()):
        call.held_rows[b, W - 1 + n :] = torch.nan
        call.held_decay[b, n:] = torch.nan
        call.held_beta[b, n:] = torch.nan
    return call


def grow(call: Call) -> None:
    """Make the new rows a random tree, another in each sequence."""
    B, T = call.rows.shape[:2]
    parents = [[int(torch.randint(-1, i, ())) if i else -1 for i in range(T)] for _ in range(B)]
    tree = plant(torch.tensor(parents), None, B, T)
    call.upto, call.taps = tree.upto, tree.taps(len(call.conv))


def sequence(
    c: Call, line: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, V] and end of the recurrence over a ``line`` that begins with its window."""
    W, heads = len(c.conv), len(c.A_log)
    n = len(line) - W + 1
    x = F.silu(torch.stack([c.conv[i] * line[i : i + n] for i in range(W)]).sum(0))
    widths = (len(c.dt_bias), len(c.dt_bias), heads * len(c.norm))
    q, k, v = (y.unflatten(-1, (heads, -1))[None] for y in x.split(widths, -1))
    q = unit(q) * q.shape[-1] ** -0.5
    g = log_decay(decay[None], c.A_log, c.dt_bias, c.lower_bound)
    read, end = kda.recurrent(q, unit(k), v, g, beta.sigmoid()[None], state[None])
    return read[0], end[0]


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("fold", [False, True])
def test_a_round_is_the_recurrence_over_accepted_and_new_rows(
    bound: float | None, fold: bool
) -> None:
    c = round_of(K=16, V=8, bound=bound).copy(torch.float64)
    c.fold = fold
    was = c.copy()
    out = kda_decode(*c.args())
    window, T = len(c.conv) - 1, c.rows.shape[1]
    for b, n in enumerate(c.accepted.tolist()):
        line = torch.cat((was.held_rows[b, : window + n], was.rows[b]))
        decay = torch.cat((was.held_decay[b, :n], was.decay[b]))
        beta = torch.cat((was.held_beta[b, :n], was.beta[b]))
        read, end = sequence(c, line, decay, beta, was.state[b])
        y = read[n:] * torch.rsqrt(read[n:].square().mean(-1, keepdim=True) + c.eps) * c.norm
        assert_close(out[b], y.flatten(1) * was.gate[b].sigmoid())
        if fold:
            assert torch.equal(c.held_rows[b, :window], line[-window:])
        else:
            _, end = sequence(c, line[: window + n], decay[:n], beta[:n], was.state[b])
            assert torch.equal(c.held_rows[b, :window], line[n : n + window])
            assert torch.equal(c.held_rows[b, window : window + T], was.rows[b])
            assert torch.equal(c.held_decay[b, :T], was.decay[b])
            assert torch.equal(c.held_beta[b, :T], was.beta[b])
        assert_close(c.state[b], end)


@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi_linear"])
def test_rounds_are_those_of_the_layer(config: K3Config) -> None:
    """Chains and trees, accepted differently, on the layer's own cache and on held rows."""
    B, R, H, K, W = 3, 5, config.kda_num_heads, config.kda_head_dim, config.kda_conv_size
    layer = KDA(config).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    zeros = torch.zeros(B, H, K, K), torch.zeros(B, W - 1, 3 * H * K)
    rounds = Rounds([KDAState(config, *zeros)], torch.zeros(B, dtype=torch.int64), 99, W)
    held = torch.zeros(B, W - 1 + R, 3 * H * K), torch.zeros(B, R, H * K), torch.zeros(B, R, H)
    state, accepted = torch.zeros(B, H, K, K), torch.zeros(B, dtype=torch.int64)
    for T, parents, path in ROUNDS:
        x = torch.randn(B, T, config.hidden_size)
        tree = None if parents is None else plant(torch.tensor(parents), None, B, T)
        block = rounds.begin(T, None, False, None if tree is None else tree.parents[0])
        with torch.no_grad():
            expected = layer(x, rounds.layers[0], block)
            *rows, gate, low, beta = layer._project(x)
            gate = gate if config.kda_full_rank_output_gate else layer.g_b_proj(gate)
            out = kda_decode(
                torch.cat(rows, -1), layer.f_b_proj(low), beta, gate, *held, accepted, state,
                layer.conv_taps(), layer.A_log, layer.dt_bias, layer.o_norm.weight,
                layer.o_norm.eps, config.kda_gate_lower_bound,
                None if tree is None else tree.upto, None if tree is None else tree.taps(W),
            )  # fmt: skip
            assert_close(layer.o_proj(out), expected)
        rounds.finish(block)
        rows_of_path = torch.tensor(path)
        accepted = (rows_of_path >= 0).sum(1)
        rounds.commit_path(rows_of_path) if tree is not None else rounds.commit(accepted)
        own = torch.arange(rows_of_path.shape[1])
        kda_path(*(x[None] for x in held), torch.where(rows_of_path < 0, own, rows_of_path))


ROUNDS = [  # rows, parents, accepted path of each sequence
    (3, None, [[0, 1, 2], [0, -1, -1], [0, 1, -1]]),
    (1, None, [[0], [-1], [0]]),
    (5, [-1, 0, 0, 1, 2], [[0, 2, 4], [0, 1, 3], [-1, -1, -1]]),
    (4, [-1, 0, 1, 1], [[0, 1, 3], [0, -1, -1], [0, 1, 2]]),
    (2, None, [[0, 1], [0, 1], [-1, -1]]),
]


def agree(call: Call, device: str) -> None:
    """Kernel and specification: what is returned, and all that is left behind."""
    wide, mine = call.copy(torch.float64, device), call.copy(device=device)
    expected = kda_decode(*wide.args())
    out = kda_decode_triton.kda_decode(*mine.args())
    assert out.dtype == call.rows.dtype
    limit = None if out.dtype != torch.float32 else 1e-4 if device == "cuda" else 1e-5
    assert_close(out, expected, limit=limit)
    assert_close(mine.state, wide.state, limit=1e-4 if device == "cuda" else 1e-5)
    for name in ("held_rows", "held_decay", "held_beta"):
        left, right = getattr(mine, name).double(), getattr(wide, name)
        assert torch.equal(left.nan_to_num(99.0), right.nan_to_num(99.0)), name


@on_each_device
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("T", "R"), [(1, 1), (3, 4), (1, 8), (9, 9)])
@pytest.mark.usefixtures("poison")
def test_the_kernel(device: str, T: int, R: int, bound: float | None) -> None:
    agree(round_of(T=T, R=R, bound=bound), device)


@on_each_device
@pytest.mark.parametrize(("T", "R"), [(3, 4), (8, 8)])
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_kernel_on_trees(device: str, T: int, R: int, bound: float | None) -> None:
    call = round_of(T=T, R=R, bound=bound)
    grow(call)
    agree(call, device)


@on_each_device
@pytest.mark.parametrize(("T", "R"), [(1, 0), (5, 0), (2, 4), (1, 9)])
@pytest.mark.usefixtures("poison")
def test_the_kernel_folds_new_rows(device: str, T: int, R: int) -> None:
    call = round_of(T=T, R=R)
    call.fold = True
    agree(call, device)


@on_each_device
@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize(("T", "bound"), [(1, -5.0), (1, None), (2, None)])
@pytest.mark.usefixtures("poison")
def test_decay_and_gate_may_come_as_low_rank_factors(
    device: str, factors: int, T: int, bound: float | None
) -> None:
    """One row in one launch, several by the kernels of their own; their product is the row."""
    call = round_of(T=T, R=0, bound=bound)
    call.fold = True
    whole = call.copy(torch.float64)
    call.second = torch.randn(factors, 2 * 64, 16) / 4
    call.decay = torch.randn(2, T, 16)
    whole.decay = call.decay.double() @ call.second[-1].double().T
    if factors == 2:
        call.gate = torch.randn(2, T, 16)
        whole.gate = call.gate.double() @ call.second[0].double().T
    assert_close(kda_decode(*call.copy(torch.float64).args()), kda_decode(*whole.args()))
    agree(call, device)


@on_each_device
@pytest.mark.parametrize(("K", "V", "W"), [(128, 64, 4), (64, 128, 2), (64, 64, 3)])
def test_the_kernel_at_other_widths(device: str, K: int, V: int, W: int) -> None:
    agree(round_of(B=1, K=K, V=V, W=W, dtype=torch.bfloat16), device)
    call = round_of(B=1, K=K, V=V, W=W, dtype=torch.bfloat16)
    grow(call)
    agree(call, device)


@on_each_device
def test_the_kernel_on_views(device: str) -> None:
    """Rows, gate, decay and beta side by side, as one projection leaves them."""
    call = round_of(B=3).copy(device=device)
    names = ("rows", "gate", "decay", "beta")
    parts = [getattr(call, name) for name in names]
    packed = torch.cat(parts, -1).split([x.shape[-1] for x in parts], -1)
    views = call.copy()
    for name, view in zip(names, packed, strict=True):
        setattr(views, name, view)
    expected = kda_decode_triton.kda_decode(*call.args())
    assert torch.equal(kda_decode_triton.kda_decode(*views.args()), expected)
    assert torch.equal(views.state, call.state)


@on_each_device
def test_a_seat_that_accepted_nothing_keeps_its_state_to_the_bit(device: str) -> None:
    call = round_of(B=3).copy(device=device)
    call.accepted[1] = 0
    was = call.state.clone()
    kda_decode_triton.kda_decode(*call.args())
    assert torch.equal(call.state[1], was[1])


def test_wrong_calls() -> None:
    call = round_of(T=3, R=2)
    with pytest.raises(ValueError, match="3 new rows into 2 slots"):
        kda_decode(*call.args())
    call = round_of()
    grow(call)
    call.fold = True
    with pytest.raises(ValueError, match="cannot all be accepted"):
        kda_decode_triton.kda_decode(*call.args())


def test_what_the_kernel_refuses() -> None:
    def reason(call: Call) -> str:
        return str(kda_decode_triton.refuses(*call.args()))

    assert reason(round_of()) == "None"
    assert "widths" in reason(round_of(K=48))
    assert "widths" in reason(round_of(V=256))
    assert "rows on" in reason(round_of(T=17, R=17))
    assert "float32" in reason(round_of().copy(torch.float64))
    call = round_of()
    call.accepted = call.accepted.repeat_interleave(2)[::2]
    assert "counts" in reason(call)
    for name in ("conv", "A_log", "dt_bias", "norm"):
        call = round_of()
        setattr(call, name, getattr(call, name).repeat_interleave(2, -1)[..., ::2])
        assert "contiguous" in reason(call), name


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize(("B", "T", "R"), [(1, 1, 1), (1, 8, 8), (5, 9, 9), (64, 8, 8)])
@pytest.mark.usefixtures("poison")
def test_a_real_layer(B: int, T: int, R: int) -> None:
    agree(round_of(B=B, T=T, R=R, H=96, K=128, V=128, dtype=torch.bfloat16), "cuda")


@pytest.mark.gpu
def test_a_round_is_the_same_every_time() -> None:
    call = round_of(B=3, T=8, R=8, H=96, K=128, V=128).copy(device="cuda")
    calls = [call.copy() for _ in range(3)]
    outs = [kda_decode_triton.kda_decode(*c.args()) for c in calls]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(calls[0].state, calls[2].state)
