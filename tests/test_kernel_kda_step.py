"""The kernel of `kda_step` against its float64 reference.

float32 must agree to 1e-5 of the largest element, over everything that the gate allows, and to
1e-4 on a GPU, whose matrix units multiply in split factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark import ops
from dspark.errors import UserError
from dspark.k3.tree import plant
from dspark_kernels import kda, kda_decode
from dspark_kernels.kda_step_triton import gated_step, refuses, step
from tests.tolerance import assert_close

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)
ROWS = [(1, 1), (1, 0), (2, 2), (3, 2), (8, 0), (8, 8), (15, 7), (16, 16)]  # rows, kept


@dataclass
class Given:
    """Inputs of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta, self.state

    def wide(self) -> tuple[Tensor, ...]:
        return tuple(x.double() for x in self.args())


def given(B: int, T: int, H: int, K: int, V: int, device: str, strongest: float = 5.0) -> Given:
    """Random rows with log-decays down to -``strongest``."""
    q, k = (F.normalize(torch.randn(B, T, H, K, device=device), dim=-1) for _ in range(2))
    return Given(
        q * K**-0.5,
        k,
        torch.randn(B, T, H, V, device=device),
        -strongest * torch.rand(B, T, H, K, device=device),
        torch.rand(B, T, H, device=device),
        torch.randn(B, H, K, V, device=device),
    )


def branches(B: int, T: int, kept: int, device: str) -> Tensor:
    """upto of random trees behind a chain of kept rows."""
    root = max(kept - 1, 0)
    rows = [
        [i - 1 if i < max(kept, 1) else int(torch.randint(root, i, ())) for i in range(T)]
        for _ in range(B)
    ]
    return plant(torch.tensor(rows), None, B, T).upto.to(device)


def agree(given_: Given, kept: int, upto: Tensor | None = None) -> None:
    limit = 1e-4 if given_.q.is_cuda else 1e-5
    expected, end = kda.step(*given_.wide(), kept, upto=upto)
    out, new = step(*given_.args(), kept, upto=upto)
    assert_close(out, expected, limit=limit)
    assert_close(new, end, limit=limit)


@on_each_device
@pytest.mark.parametrize(("T", "kept"), ROWS)
@pytest.mark.usefixtures("poison")
def test_chains(device: str, T: int, kept: int) -> None:
    agree(given(2, T, 2, 64, 64, device), kept)


@on_each_device
@pytest.mark.parametrize(("T", "kept"), [(3, 2), (8, 0), (15, 7)])
@pytest.mark.usefixtures("poison")
def test_trees(device: str, T: int, kept: int) -> None:
    agree(given(2, T, 1, 64, 64, device), kept, branches(2, T, kept, device))


@on_each_device
@pytest.mark.parametrize(("K", "V"), [(128, 64), (64, 256), (256, 128)])
@pytest.mark.parametrize(("T", "kept"), [(1, 1), (5, 3)])
def test_widths(device: str, K: int, V: int, T: int, kept: int) -> None:
    agree(given(1, T, 1, K, V, device), kept)


@on_each_device
def test_decays_of_every_size_side_by_side(device: str) -> None:
    x = given(1, 8, 1, 64, 64, device)
    sizes = torch.tensor([0.0, -1e-4, -1.0, -5.0, -6.0, -8.0, -20.0, -1000.0], device=device)
    x.g = sizes[torch.randint(0, 8, x.g.shape, device=device)]
    out, new = step(*x.args(), 8)
    expected, end = kda.step(*x.wide(), 8)
    # G reaches -8000, of which float32 keeps 5e-4; so does the reference in float32
    assert_close(out, expected, limit=2e-4)
    assert_close(new, end, limit=2e-4)


@on_each_device
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("T", [1, 4])
def test_raw_rows(device: str, bound: float | None, T: int) -> None:
    """Norms, gate and beta inside, rows in bfloat16."""
    H, K, V = 2, 64, 64
    q, k, a = (torch.randn(2, T, H, K, device=device).bfloat16() for _ in range(3))
    v, b = torch.randn(2, T, H, V, device=device), torch.randn(2, T, H, device=device)
    A, dt = torch.randn(H, device=device), torch.randn(H * K, device=device)
    state = torch.randn(2, H, K, V, device=device)
    g = kda_decode.log_decay(a.double().flatten(2), A.double(), dt.double(), bound)
    unit_q, unit_k = kda_decode.unit(q.double()) * K**-0.5, kda_decode.unit(k.double())
    expected, end = kda.step(unit_q, unit_k, v.double(), g, b.double().sigmoid(), state.double(), T)
    out, new = gated_step(q, k, v, a, b, A, dt, state, T, lower_bound=bound)
    limit = 1e-4 if device == "cuda" else 1e-5
    assert_close(out, expected, limit=limit)
    assert_close(new, end, limit=limit)


@on_each_device
def test_the_state_is_advanced_in_place_and_left_alone_without_kept_rows(device: str) -> None:
    x = given(2, 3, 2, 64, 64, device)
    before = x.state.clone()
    _, same = step(*x.args(), 0)
    assert same is x.state
    assert torch.equal(x.state, before)
    _, end = kda.step(*x.wide(), 2)
    _, new = step(*x.args(), 2, out=x.state)
    assert new is x.state
    assert_close(new, end, limit=1e-4 if device == "cuda" else 1e-5)


@on_each_device
def test_rows_may_be_views(device: str) -> None:
    """q, k and v side by side, as a packed projection leaves them."""
    x = given(2, 3, 2, 64, 64, device)
    packed = torch.stack((x.q, x.k, x.v), dim=2)
    x.q, x.k, x.v = packed.unbind(2)
    agree(x, 2)


@pytest.mark.gpu(gib=8)
@pytest.mark.parametrize(("B", "T", "kept"), [(1, 1, 1), (1, 8, 8), (3, 15, 7), (64, 8, 8)])
@pytest.mark.usefixtures("poison")
def test_a_real_layer(B: int, T: int, kept: int) -> None:
    agree(given(B, T, 96, 128, 128, "cuda"), kept)


@pytest.mark.gpu
def test_long_runs_do_not_drift() -> None:
    """4096 rows in bfloat16 that hardly forget: decays and write strengths stay in float32."""
    H, K = 4, 128
    state = torch.zeros(1, H, K, K, device="cuda")
    expected = state.double()
    for _ in range(256):
        q, k, v = (torch.randn(1, 16, H, K, device="cuda").bfloat16() for _ in range(3))
        k = F.normalize(k.float(), dim=-1).bfloat16()
        g = torch.full((1, 16, H, K), -1e-4, device="cuda")
        beta = torch.rand(1, 16, H, device="cuda")
        step(q, k, v, g, beta, state, 16, out=state)
        rows = (x.double() for x in (q, k, v, g, beta))
        _, expected = kda.step(*rows, expected, 16)
    assert_close(state, expected, limit=2e-5)


@pytest.mark.gpu(gib=24)
def test_states_past_32_bits() -> None:
    """2.2e9 numbers of state: the last sequence as the first, to the bit, and, but for the sums'
    order, as one alone, which is cut otherwise."""
    B = 1400
    x = given(1, 2, 96, 128, 128, "cuda")
    many = Given(*(y.expand(B, *y.shape[1:]).contiguous() for y in x.args()))
    out, new = step(*many.args(), 2, out=many.state)
    alone, end = step(*x.args(), 2)
    assert_close(out[0], alone[0], limit=1e-5)
    assert_close(new[0], end[0], limit=1e-5)
    for row in (B // 2, B - 1):
        assert torch.equal(out[row], out[0])
        assert torch.equal(new[row], new[0])


def test_what_it_refuses() -> None:
    x = given(1, 2, 1, 64, 64, "cpu")
    assert refuses(*x.args(), 2) is None
    for width in (48, 96, 192, 512):
        assert "widths" in str(refuses(*given(1, 2, 1, width, width, "cpu").args(), 2))
    assert "rows" in str(refuses(*given(1, 17, 1, 64, 64, "cpu").args(), 2))
    assert "float64" in str(refuses(*x.wide(), 2))
    x.q.requires_grad_()
    assert "backward" in str(refuses(*x.args(), 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
def test_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS", "triton")
    with pytest.raises(UserError, match="kda_step does not take this: heads of 48 x 48"):
        ops.kda_step(*given(1, 2, 1, 48, 48, "cpu").args(), 2)
    ops.forget()
    ops.kda_step(*given(1, 2, 1, 64, 64, "cpu").args(), 2)
    assert ops.ran() == {"kda_step": "triton"}
