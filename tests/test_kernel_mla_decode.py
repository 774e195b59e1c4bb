"""Latent attention of a decode step: the kernels against their float64 reference, and the reference
against the K3 layer that it stands for.

Tolerances are the house's (`tests/tolerance.py`) except float32, which must agree to 2e-6, and to
2e-5 on a GPU, whose matrix units cut what they add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dspark.k3.config import K3Config
from dspark.k3.mla import MLA
from dspark.k3.state import Block, LatentState
from dspark.k3.tree import Tree, plant
from dspark_kernels import latent_write, mla_decode
from tests.k3_tiny import PLAIN, TINY
from tests.tolerance import assert_close

FLOAT32, FLOAT32_ON_GPU = 2e-6, 2e-5
SIZES = [  # B, T, H, R, p, slots; widths and heads that are no powers of two among them
    pytest.param((2, 3, 4, 32, 16, 70), id="small"),
    pytest.param((3, 1, 5, 24, 8, 70), id="one-row"),
    pytest.param((2, 7, 3, 48, 8, 40), id="odd-widths"),
]
GPU_SIZES = [
    pytest.param((1, 1, 32, 512, 64, 8192), id="8k"),
    pytest.param((1, 8, 32, 512, 64, 8192), id="8k-8-rows"),
    pytest.param((2, 8, 96, 512, 64, 3000), id="96-heads"),
    pytest.param((5, 3, 12, 192, 64, 1000), id="odd"),
    pytest.param((64, 1, 32, 512, 64, 700), id="64-sequences"),
    pytest.param((1, 16, 64, 512, 64, 100_000), id="100k"),
]
DTYPES = [torch.float32, torch.bfloat16]


def limit_of(out: Tensor) -> float | None:
    """Of float32, tighter than the house's; None: the house's."""
    if out.dtype != torch.float32:
        return None
    return FLOAT32_ON_GPU if out.is_cuda else FLOAT32


@dataclass
class Given:
    """Inputs of one call; what no row may see is NaN."""

    q: Tensor
    latents: Tensor
    lengths: Tensor
    rank: int
    scales: Tensor | None = None

    def wide(self) -> Given:
        latents = self.latents.double()
        if self.scales is not None:
            latents = latents * self.scales.double().unsqueeze(-1)
        return Given(self.q.double(), latents, self.lengths, self.rank)


def given(
    size: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", fp8: bool = False
) -> Given:
    B, T, H, R, p, slots = size
    lengths = torch.randint(0, slots - T + 1, (B,), device=device)
    lengths[0] = slots - T
    if B > 1:
        lengths[1] = 0
    q = torch.randn(B, T, H, R + p, device=device) * 2 * (R + p) ** -0.5
    latents = torch.randn(B, slots, R + p, device=device)
    scales = None
    if fp8:
        numbers, scales = latent_write.quantised(latents)
        latents = numbers.float()
    hidden = torch.arange(slots, device=device) >= (lengths + T).unsqueeze(1)
    latents = latents.masked_fill(hidden.unsqueeze(-1), torch.nan)
    if scales is None:
        return Given(q.to(dtype), latents.to(dtype), lengths, R)
    scales = scales.masked_fill(hidden, torch.nan)
    return Given(q.to(dtype), latents.to(torch.float8_e4m3fn), lengths, R, scales)


def tree(batch: int, rows: int, device: str = "cpu") -> Tensor:
    """[B, T, T] ancestors of random trees."""
    parents = [
        [int(torch.randint(-1, t, ())) if t else -1 for t in range(rows)] for _ in range(batch)
    ]
    return plant(torch.tensor(parents), None, batch, rows).upto.to(device)


def kernel():  # type: ignore[no-untyped-def]
    from dspark_kernels import mla_decode_triton

    return mla_decode_triton


def output_kernel():  # type: ignore[no-untyped-def]
    from dspark_kernels import mla_output_triton

    return mla_output_triton


def check_decode(
    x: Given, upto: Tensor | None = None, counts: Tensor | None = None, real: Tensor | None = None
) -> None:
    args = (x.q, x.latents, x.lengths, x.rank, upto, x.scales, counts)
    assert kernel().refuses(*args) is None
    out = kernel().mla_decode(*args)
    w = x.wide()
    expected = mla_decode.mla_decode(w.q, w.latents, w.lengths, w.rank, upto, None, counts)
    if real is not None:
        out, expected = out[real], expected[real]
    assert_close(out, expected, limit=limit_of(out))


def check_output(x: Given, value: int, gated: bool, upto: Tensor | None = None) -> None:
    B, T, H, _ = x.q.shape
    both = torch.randn(H, 2 * value, x.rank, device=x.q.device, dtype=x.q.dtype) * x.rank**-0.5
    w_v = both[:, value:]
    gate = torch.randn(B, T, H * value, device=x.q.device, dtype=x.q.dtype) if gated else None
    args = (x.q, x.latents, x.lengths, x.rank, w_v, gate, upto, x.scales)
    assert output_kernel().refuses(*args) is None
    out = output_kernel().mla_output(*args)
    w = x.wide()
    wide_gate = None if gate is None else gate.double()
    expected = mla_decode.mla_output(
        w.q, w.latents, w.lengths, w.rank, w_v.double(), wide_gate, upto
    )
    assert_close(out, expected, limit=limit_of(out))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_chain(poison: None, size: tuple[int, ...], dtype: torch.dtype) -> None:
    check_decode(given(size, dtype))


def test_tree(poison: None) -> None:
    x = given((2, 7, 2, 24, 8, 40), torch.float32)
    check_decode(x, tree(2, 7))
    check_decode(x, tree(1, 7))


def test_float8(poison: None) -> None:
    check_decode(given((2, 3, 4, 32, 16, 70), torch.bfloat16, fp8=True))
    check_decode(given((2, 3, 4, 32, 16, 70), torch.float32, fp8=True))


def test_rows_that_are_not_real_change_nothing(poison: None) -> None:
    """Their latents hold NaN, as a row of padding may."""
    x = given((3, 4, 2, 24, 8, 60), torch.float32)
    x.lengths.copy_(torch.tensor([20, 0, 56]))
    counts = torch.tensor([2, 0, 4])
    for b, (n, c) in enumerate(zip(x.lengths.tolist(), counts.tolist(), strict=True)):
        x.latents[b] = torch.randn(60, 32)
        x.latents[b, n + c :] = torch.nan
    real = torch.arange(4) < counts.unsqueeze(1)
    check_decode(x, counts=counts, real=real)
    out = kernel().mla_decode(x.q, x.latents, x.lengths, x.rank, counts=counts)
    assert out.isfinite().all()
    assert not out[1].any()  # nothing to see at all


def test_one_length_is_as_good_as_another_buffer(poison: None) -> None:
    """The same text in a longer buffer, or in a strided view of one, whatever surrounds it."""
    x = given((1, 2, 3, 32, 16, 40), torch.float32)
    expected = kernel().mla_decode(x.q, x.latents, x.lengths, x.rank)
    wide = torch.full((3, 90, 60), torch.nan)
    wide[1, 5:45, 7:55] = x.latents[0]
    view = wide[1:2, 5:, 7:55]
    assert_close(kernel().mla_decode(x.q, view, x.lengths, x.rank), expected, limit=FLOAT32)


def test_lengths_and_counts_may_be_strided_views(poison: None) -> None:
    """Every other entry of a longer tensor, as of the rows that draft among others."""
    x = given((3, 3, 2, 24, 8, 40), torch.float32)
    x.latents.nan_to_num_(0.5)
    held = torch.tensor([[9, 2], [99, 99], [0, 1], [99, 99], [31, 3], [99, 99]])
    lengths, counts = held[::2, 0], held[::2, 1]
    expected = mla_decode.mla_decode(x.q, x.latents, lengths, x.rank, counts=counts)
    out = kernel().mla_decode(x.q, x.latents, lengths, x.rank, counts=counts)
    real = torch.arange(3) < counts.unsqueeze(1)
    assert_close(out[real], expected[real], limit=FLOAT32)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("gated", [True, False])
def test_output(poison: None, rows: int, gated: bool) -> None:
    check_output(given((2, rows, 3, 32, 16, 70), torch.float32), 24, gated)


def test_output_in_bfloat16_and_of_a_tree(poison: None) -> None:
    check_output(given((2, 3, 3, 32, 16, 70), torch.bfloat16), 16, True, tree(2, 3))
    check_output(given((1, 1, 3, 32, 16, 70), torch.bfloat16, fp8=True), 16, True)


@pytest.mark.parametrize("merged", [True, False])
def test_output_with_and_without_a_launch_for_the_merge(poison: None, merged: bool) -> None:
    x = given((2, 3, 4, 32, 16, 70), torch.float32)
    cut = kernel().plan(2, 12, 70, torch.float32, x.q.device)
    part, lse = kernel().attend(x.q, x.latents, x.lengths, x.rank, None, None, None, cut)
    if merged:
        part = kernel().merge(part, lse, x.lengths, None, x.q.shape, 70, cut)
    w_v = torch.randn(4, 16, 32)
    out = output_kernel().values(part, lse, x.lengths, None, w_v, None, x.q.shape, 70, cut, merged)
    w = x.wide()
    expected = mla_decode.mla_output(w.q, w.latents, w.lengths, w.rank, w_v.double())
    assert_close(out, expected, limit=FLOAT32)


@pytest.mark.parametrize("change", ["float64", "mixed", "rows", "scales", "grad", "wide", "stride"])
def test_what_the_kernel_refuses(change: str) -> None:
    x = given((1, 2, 3, 32, 16, 40), torch.float32)
    q, latents, rank = x.q, x.latents, x.rank
    if change == "float64":
        q, latents = q.double(), latents.double()
    elif change == "mixed":
        latents = latents.bfloat16()
    elif change == "rows":
        q = q.expand(1, 2, 3, 48).repeat(1, 9, 1, 1)
    elif change == "scales":
        latents = latents.to(torch.float8_e4m3fn)
    elif change == "grad":
        q = q.requires_grad_()
    elif change == "wide":
        rank = 48
    else:
        latents = latents.transpose(1, 2).contiguous().transpose(1, 2)
    assert kernel().refuses(q, latents, x.lengths, rank)


def rows_of(tree: Tree | None, lengths: Tensor, rows: int, slots: int) -> Block:
    """What the K3 layers are told about these rows."""
    own = torch.arange(rows)
    last = (lengths.unsqueeze(1) + own).unsqueeze(-1)
    mask = torch.arange(slots) <= last if tree is None else tree.readable(lengths, slots)
    return Block(rows, None, False, None, lengths, slots, mask, tree=tree)


@pytest.mark.parametrize("parents", [None, [[-1, 0, 0, 1], [-1, -1, 0, 2]]], ids=["chain", "tree"])
@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["k3", "kimi-linear"])
def test_reference_is_the_layer(config: K3Config, parents: list[list[int]] | None) -> None:
    """K3's MLA layer over a cache, and the same from the ops: absorb and write, attend, gate."""
    layer = MLA(config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rank, shared, nope = layer.kv_a_layernorm.weight.numel(), layer.rope, layer.nope
    lengths, x = torch.tensor([5, 2]), torch.randn(2, 4, config.hidden_size).double()
    grown = None if parents is None else plant(torch.tensor(parents), None, 2, 4)
    latents = torch.randn(2, 9, rank + shared).double()
    with torch.no_grad():
        expected = layer(x, LatentState(latents.clone()), rows_of(grown, lengths, 4, 9))
        q, kv, *gate = layer._project(x)
        if config.q_lora_rank is not None:
            q = layer.q_b_proj(layer.q_a_layernorm(q))
        w = layer.kv_b_proj.weight.view(layer.heads, nope + layer.value, rank)
        absorbed = latent_write.mla_absorb(
            q.view(2, 4, layer.heads, -1), kv, w[:, :nope], layer.scale, latents,
            layer.kv_a_layernorm.weight, layer.kv_a_layernorm.eps, lengths,
        )  # fmt: skip
        upto = None if grown is None else grown.upto
        out = mla_decode.mla_output(
            absorbed, latents, lengths, rank, w[:, nope:], gate[0] if gate else None, upto
        )
        assert_close(layer.o_proj(out), expected, dtype=torch.float32)  # so is its softmax


@pytest.mark.gpu(gib=16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", GPU_SIZES)
def test_on_a_gpu(poison: None, size: tuple[int, ...], dtype: torch.dtype) -> None:
    x = given(size, dtype, "cuda")
    check_decode(x)
    check_decode(x, tree(size[0], size[1], "cuda"))
    check_output(x, 128, True)


@pytest.mark.gpu(gib=16)
@pytest.mark.parametrize("size", GPU_SIZES)
def test_float8_on_a_gpu(poison: None, size: tuple[int, ...]) -> None:
    x = given(size, torch.bfloat16, "cuda", fp8=True)
    check_decode(x)
    check_output(x, 128, True)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_lengths(poison: None) -> None:
    """Nothing of a call's lengths, counts or tree is frozen when it is captured."""
    x = given((3, 4, 32, 512, 64, 2000), torch.bfloat16, "cuda")
    x.latents.copy_(torch.randn_like(x.latents))
    upto = tree(3, 4, "cuda")
    for _ in range(2):
        kernel().mla_decode(x.q, x.latents, x.lengths, x.rank, upto)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel().mla_decode(x.q, x.latents, x.lengths, x.rank, upto)
    for lengths in ([0, 1, 2], [1996, 5, 900], [64, 63, 65]):
        x.lengths.copy_(torch.tensor(lengths))
        upto.copy_(tree(3, 4, "cuda"))
        graph.replay()
        w = x.wide()
        assert_close(out, mla_decode.mla_decode(w.q, w.latents, w.lengths, w.rank, upto))


@pytest.mark.gpu(gib=12)
@pytest.mark.slow
def test_offsets_beyond_32_bits(poison: None) -> None:
    """1M slots of the fourth sequence begin past 2^31 numbers."""
    slots = 1_000_000
    latents = torch.empty(4, slots, 576, dtype=torch.bfloat16, device="cuda")
    latents[3].normal_()
    q = torch.randn(4, 2, 32, 576, dtype=torch.bfloat16, device="cuda") * 576**-0.5
    lengths = torch.tensor([0, 0, 0, slots - 2], device="cuda")
    latents[:3, :2] = 0.0
    out = kernel().mla_decode(q, latents, lengths, 512)[3:]
    alone = kernel().mla_decode(q[3:], latents[3:], lengths[3:], 512)
    assert_close(out, alone)
    expected = mla_decode.mla_decode(q[3:].float(), latents[3:].float(), lengths[3:], 512)
    assert_close(out, expected)
