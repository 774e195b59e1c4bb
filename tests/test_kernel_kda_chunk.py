"""KDA in chunks: the kernels against the recurrence in float64, values and gradients.

Tolerances are the house's (`tests/tolerance.py`). What the kernels may not read is NaN, and what
they allocate starts as NaN. In bfloat16 only q, k and v are narrow: log-decays and write strengths
stay float32, as models have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark import ops
from dspark_kernels import kda, kda_states
from dspark_kernels import kda_chunk_triton as kernel
from dspark_kernels import kda_states_triton as states_kernel
from tests.tolerance import assert_close

BOUND = -5.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129) if DEVICE == "cuda" else (1, 17, 33)
NAMES = ("out", "state", "d q", "d k", "d v", "d g", "d beta", "d state")
Size = tuple[int, int, int, int, int]
Form = Callable[..., tuple[Tensor, Tensor]]
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def chunk(*given: Any) -> tuple[Tensor, Tensor]:
    assert kernel.refuses(*given) is None
    return kernel.chunk(*given)


def states_at(*given: Any) -> Tensor:
    assert states_kernel.refuses(*given) is None
    return states_kernel.states_at(*given)


def decays(kind: str, shape: tuple[int, ...]) -> Tensor:
    even = torch.rand(shape)
    if kind == "strongest":
        return torch.full(shape, BOUND)
    if kind == "weak":
        return -1e-3 * even
    if kind == "any":
        levels = torch.tensor([0.0, -1e-4, -1.0, -5.0, -6.0, -8.0, -20.0, -1000.0])
        return levels[torch.randint(len(levels), shape)]
    return BOUND * even.square()


def given(size: Size, decay: str = "even", dtype: torch.dtype = FLOAT32) -> list[Tensor]:
    """q, k, v, g, beta and an entering state."""
    B, T, H, K, V = size
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(2))
    rows = [(q * K**-0.5).to(dtype), k.to(dtype), torch.randn(B, T, H, V).to(dtype)]
    rows += [decays(decay, (B, T, H, K)), torch.rand(B, T, H), torch.randn(B, H, K, V)]
    return [x.to(DEVICE) for x in rows]


def in_nan(x: Tensor) -> Tensor:
    """x as a view of a larger tensor that is NaN everywhere else."""
    shape = list(x.shape)
    shape[1], shape[-1] = shape[1] + 9, shape[-1] + 16
    around = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    view = around[:, 4 : 4 + x.shape[1], ..., 8 : 8 + x.shape[-1]]
    view.copy_(x)
    return view


def answers(form: Form, inputs: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs, last state, and the gradients of both with respect to every input."""
    leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in inputs]
    out, state = form(*leaves)
    (out.double().sin().sum() + state.double().sin().sum()).backward()
    return [out, state, *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def check(inputs: list[Tensor], bound: float | None, limit: float | None = None) -> None:
    expected = answers(kda.recurrent, inputs, torch.float64)
    ours = answers(lambda *x: chunk(*x, bound), inputs)
    for name, a, b in zip(NAMES, ours, expected, strict=True):
        assert_close(a, b, dtype=inputs[0].dtype, limit=limit, what=name)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("bound", [BOUND, None], ids=["bounded", "any"])
@pytest.mark.parametrize("decay", ["even", "strongest"])
def test_values_and_gradients_are_those_of_the_recurrence(decay: str, bound: float | None) -> None:
    check(given((1, 50, 1, 20, 18), decay), bound)


@pytest.mark.usefixtures("poison")
def test_unbounded_gates() -> None:
    """What a softplus gate may give, mixed over channels and chunk edges: 1000 nats in one row."""
    check(given((1, 130 if DEVICE == "cuda" else 50, 1, 20, 18), "any"), None)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("decay", "bound"), [("even", BOUND), ("strongest", BOUND), ("even", None)]
)
def test_bfloat16(decay: str, bound: float | None) -> None:
    check(given((1, 70, 1, 20, 18), decay, BFLOAT16), bound)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("rows", LENGTHS)
def test_lengths_around_chunks_read_nothing_else(rows: int) -> None:
    """Views into memory that is NaN: a dead row of the last chunk, a head, a column."""
    inputs = given((1, rows, 1, 17, 16))
    expected = answers(kda.recurrent, inputs, torch.float64)
    leaves = [in_nan(x).requires_grad_() for x in inputs[:4]]
    beta, state = in_nan(inputs[4].unsqueeze(-1)).squeeze(-1).requires_grad_(), inputs[5].clone()
    ours = answers(lambda *x: chunk(*leaves, beta, x[0], BOUND), [state])
    for name, a, b in zip(NAMES, ours[:2], expected[:2], strict=False):
        assert_close(a, b, what=name)
    for name, leaf, b in zip(NAMES[2:], (*leaves, beta), expected[2:], strict=False):
        assert leaf.grad is not None
        assert_close(leaf.grad, b, what=name)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("lengths", [(31, 33), (1, 0, 32)])
def test_packed_sequences_are_sequences_alone(lengths: tuple[int, ...]) -> None:
    inputs = given((1, sum(lengths), 1, 16, 16), "strongest")
    inputs[5] = torch.randn(len(lengths), 1, 16, 16, device=DEVICE)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    ours = answers(lambda *x: chunk(*x, BOUND, bounds.to(DEVICE)), inputs)
    expected = answers(lambda *x: kda.chunk(*x, None, bounds), inputs, torch.float64)
    for name, a, b in zip(NAMES, ours, expected, strict=True):
        assert_close(a, b, what=name)
    for s, (first, last) in enumerate(pairwise(bounds.tolist())):
        if last > first and DEVICE == "cuda":
            alone = [*(x[:, first:last] for x in inputs[:5]), inputs[5][s : s + 1]]
            out, state = chunk(*alone, BOUND)
            assert torch.equal(out, ours[0][:, first:last])
            assert torch.equal(state[0], ours[1][s])


def test_many_short_sequences_pass_the_grid_limit_of_other_axes() -> None:
    """Sequences times heads stand on the first axis, which has no limit of 65,535."""
    count, heads = (683, 96) if DEVICE == "cuda" else (5, 3)
    inputs = given((1, count, heads, 16, 16))
    inputs[5] = torch.randn(count, heads, 16, 16, device=DEVICE)
    out, state = chunk(*inputs, BOUND, torch.arange(count + 1, device=DEVICE))
    rows = [x.transpose(0, 1).double() for x in inputs[:5]]
    expected = kda.recurrent(*rows, inputs[5].double())
    assert_close(out.transpose(0, 1), expected[0])
    assert_close(state, expected[1])


def test_pieces_of_a_text_are_the_text() -> None:
    inputs = given((1, 100, 1, 16, 16))
    out, state = chunk(*inputs, BOUND)
    pieces, carried = [], inputs[5]
    for first, last in pairwise((0, 32, 37, 100)):
        piece, carried = chunk(*(x[:, first:last] for x in inputs[:5]), carried, BOUND)
        pieces.append(piece)
    assert_close(torch.cat(pieces, 1), out, limit=3e-6 if DEVICE == "cpu" else None)
    assert_close(carried, state, limit=3e-6 if DEVICE == "cpu" else None)


def test_small_decays_do_not_drift() -> None:
    """Decay 0.9999 over many rows: bfloat16 rows, but a decay rounded to bfloat16 would be 1."""
    rows = 4096 if DEVICE == "cuda" else 200
    inputs = given((1, rows, 1, 16, 16), dtype=FLOAT32)
    inputs[3] = torch.full_like(inputs[3], -1e-4)
    expected = kda.recurrent(*(x.double() for x in inputs))
    assert_close(chunk(*inputs, BOUND)[1], expected[1], limit=3e-5)
    narrow = [x.bfloat16() for x in inputs[:3]] + inputs[3:]
    expected = kda.recurrent(*(x.double() for x in narrow))
    assert_close(chunk(*narrow, BOUND)[1], expected[1], dtype=BFLOAT16, limit=1.2e-2)


def positions_for(rows: int) -> Tensor:
    edges = [p for p in (0, rows, 1, 31, 32, 33, 64, 65, 65, rows - 1) if p <= rows]
    return torch.tensor([edges, [*edges[1:], 7]], device=DEVICE)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("rows", "decay", "bound"), [(64, "strongest", BOUND), (50, "any", None)])
def test_states_at_positions(rows: int, decay: str, bound: float | None) -> None:
    _, *inputs = given((2, rows, 1, 20, 18), decay)
    where = positions_for(rows)
    weight = torch.randn(2, where.shape[1], 1, 20, 18, device=DEVICE)

    def values(form: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        states = form(*leaves)
        grads = torch.autograd.grad((states.sin() * weight.to(dtype)).sum(), leaves)
        return [states, *grads]

    ours = values(lambda *x: states_at(*x, where, bound), FLOAT32)
    expected = values(lambda *x: kda_states.states_at(*x, where), torch.float64)
    names = ("states", "d k", "d v", "d g", "d beta", "d state")
    for name, a, b in zip(names, ours, expected, strict=True):
        assert_close(a, b, what=name)


def test_states_and_gradients_do_not_change_from_run_to_run() -> None:
    _, *inputs = given((1, 50, 1, 16, 16))
    where = torch.tensor([[40, 48, 3, 3, 50, 48]], device=DEVICE)

    def once() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        states = states_at(*leaves, where, BOUND)
        return [states, *torch.autograd.grad(states.sin().sum(), leaves)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def refusals() -> Iterator[tuple[str, list[Tensor]]]:
    rows = given((1, 4, 2, 16, 16))
    yield "rows of torch.float64", [x.double() for x in rows]
    yield "a state of torch.bfloat16", [*rows[:5], rows[5].bfloat16()]
    yield "different rows or heads", [*rows[:2], rows[2].repeat(1, 1, 2, 1), *rows[3:]]
    yield "heads wider than 256", given((1, 4, 1, 260, 16))
    yield "no rows", given((1, 0, 2, 16, 16))


@pytest.mark.parametrize(
    ("reason", "inputs"), [pytest.param(*case, id=case[0]) for case in refusals()]
)
def test_what_the_kernels_cannot_take_is_refused(reason: str, inputs: list[Tensor]) -> None:
    inputs = [x.cpu() for x in inputs]
    assert reason in (kernel.refuses(*inputs) or "")
    where = torch.zeros(1, 1, dtype=torch.int64)
    assert reason in (states_kernel.refuses(*inputs[1:], where) or "") or reason.startswith(
        "different"
    )


def test_ops_run_the_kernels_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS", "triton")
    ops.forget()
    inputs = given((1, 20, 1, 16, 16))
    chunk(*inputs, BOUND)
    out, _ = ops.kda_chunk(*inputs, BOUND)
    ops.kda_states_at(*inputs[1:], torch.tensor([[5]], device=DEVICE), BOUND)
    assert ops.ran() == {"kda_chunk": "triton", "kda_states_at": "triton"}
    assert_close(out, kda.recurrent(*inputs)[0])


GPU_SIZES: list[Size] = [
    (1, 1000, 4, 128, 128),
    (2, 300, 3, 64, 64),
    (1, 257, 2, 256, 256),
    (1, 200, 2, 96, 72),
    (1, 200, 2, 192, 112),
    (1, 130, 2, 48, 80),
    (1, 130, 1, 128, 256),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", GPU_SIZES, ids=str)
def test_head_sizes_on_the_gpu(size: Size, dtype: torch.dtype) -> None:
    check(given(size, "even", dtype), BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["strongest", "any", "weak"])
def test_decays_on_the_gpu(decay: str) -> None:
    check(given((1, 500, 3, 128, 128), decay), None if decay == "any" else BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [BOUND, None], ids=["bounded", "any"])
@pytest.mark.parametrize("decay", ["even", "strongest"])
def test_bfloat16_without_gradients_on_the_gpu(decay: str, bound: float | None) -> None:
    inputs = given((2, 300, 32, 128, 128), decay, BFLOAT16)
    expected = kda.recurrent(*(x.double() for x in inputs))
    for name, a, b in zip(NAMES, chunk(*inputs, bound), expected, strict=False):
        assert_close(a, b, dtype=BFLOAT16, what=name)


@pytest.mark.gpu(gib=60)
def test_offsets_past_32_bits() -> None:
    """(B - 1) T H K passes 2^31: the last sample answers as it does alone."""
    B, T, H, K = 16, 17_500, 64, 128
    alone = given((1, T, H, K, K), "even", BFLOAT16)
    q, k, v = (x.expand(B, -1, -1, -1).contiguous() for x in alone[:3])
    g, beta = (alone[3].bfloat16().expand(B, -1, -1, -1).contiguous(), alone[4].expand(B, -1, -1))
    out, state = chunk(q, k, v, g, beta, alone[5].expand(B, -1, -1, -1), BOUND)
    expected = chunk(*alone[:3], alone[3].bfloat16(), *alone[4:], BOUND)
    assert torch.equal(out[-1], expected[0][0])
    assert torch.equal(state[-1], expected[1][0])


@pytest.mark.gpu
def test_a_graph_captures_packed_sequences_and_positions() -> None:
    inputs = given((1, 300, 2, 64, 64))
    inputs[5] = torch.randn(3, 2, 64, 64, device=DEVICE)
    bounds = torch.tensor([0, 100, 164, 300], device=DEVICE)
    where = torch.tensor([[0, 64, 299]], device=DEVICE)

    def call() -> tuple[Tensor, Tensor, Tensor]:
        states = states_at(*inputs[1:5], inputs[5][:1], where, BOUND)
        return (*chunk(*inputs, BOUND, bounds), states)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    bounds.copy_(torch.tensor([0, 65, 65, 300]))
    where.copy_(torch.tensor([[300, 5, 128]]))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True))
