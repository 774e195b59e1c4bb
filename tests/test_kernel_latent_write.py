"""New latents in their places, and queries taken into the latent space in the same launch.

Tolerances are those of `test_kernel_mla_decode.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.k3.layers import rms_norm
from dspark_kernels import latent_write
from tests.tolerance import assert_close

FLOAT32, FLOAT32_ON_GPU = 2e-6, 2e-5
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def limit_of(out: Tensor) -> float | None:
    """Of float32, tighter than the house's; None: the house's."""
    if out.dtype != torch.float32:
        return None
    return FLOAT32_ON_GPU if out.is_cuda else FLOAT32


def write_kernel():  # type: ignore[no-untyped-def]
    from dspark_kernels import latent_write_triton

    return latent_write_triton


def absorb_kernel():  # type: ignore[no-untyped-def]
    from dspark_kernels import mla_absorb_triton

    return mla_absorb_triton


def rows_and_norm(
    batch: int, rows: int, rank: int, shared: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Rows as a slice of a wider projection, and the norm's weight."""
    projected = torch.randn(batch, rows, 7 + rank + shared, device=device, dtype=dtype) * 3
    return projected[..., 7:], torch.rand(rank, device=device, dtype=dtype) + 0.5


def check_write(
    rows: Tensor, norm: Tensor, lengths: Tensor, slots: int, counts: Tensor | None = None
) -> None:
    """What is written is what the reference writes, and nothing else is touched."""
    latents = torch.full((len(rows), slots, rows.shape[2]), 7.0, device=rows.device)
    out, expected = latents.to(rows.dtype), latents.double()
    args = (rows, norm, EPS, lengths, None, counts)
    assert write_kernel().refuses(out, *args) is None
    assert write_kernel().latent_write(out, *args) is None
    latent_write.latent_write(expected, rows.double(), norm.double(), EPS, lengths, None, counts)
    assert_close(out, expected, limit=limit_of(out))
    kept = (expected == 7.0).all(-1)
    assert torch.equal(out[kept], latents.to(rows.dtype)[kept])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_behind_the_committed_ones(poison: None, dtype: torch.dtype) -> None:
    rows, norm = rows_and_norm(3, 4, 24, 8, dtype)
    check_write(rows, norm, torch.tensor([0, 9, 5]), 16)
    check_write(rows, norm, torch.tensor([0, 9, 5]), 16, torch.tensor([4, 0, 2]))
    strided = torch.tensor([[0, 4], [9, 9], [9, 0], [9, 9], [5, 2], [9, 9]])[::2]
    check_write(rows, norm, strided[:, 0], 16, strided[:, 1])


def test_rows_behind_the_buffer_are_dropped(poison: None) -> None:
    """A slot beyond the end is another sequence's first, or nobody's memory."""
    rows, norm = rows_and_norm(3, 4, 24, 8, torch.float32)
    check_write(rows, norm, torch.tensor([14, 16, 40]), 16)


def test_reference_is_the_norm_of_the_model() -> None:
    rows, norm = rows_and_norm(2, 3, 24, 8, torch.bfloat16)
    latents = torch.zeros(2, 5, 32, dtype=torch.bfloat16)
    latent_write.latent_write(latents, rows, norm, EPS, torch.tensor([2, 0]))
    expected = torch.cat((rms_norm(rows[..., :24], norm, EPS), rows[..., 24:]), dim=-1)
    assert torch.equal(latents[0, 2:], expected[0])
    assert torch.equal(latents[1, :3], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8(poison: None, dtype: torch.dtype) -> None:
    """Within half a step of e4m3, 2^-4 of a number, and the scale takes the largest to 448."""
    check_float8(dtype, "cpu")


def check_float8(dtype: torch.dtype, device: str) -> None:
    rows, norm = rows_and_norm(2, 3, 48, 16, dtype, device)
    rows[0, 1, 48:] *= 1000.0  # a shared key that no norm bounds
    rows[1, 2] = 0.0
    latents = torch.zeros(2, 9, 64, device=device).to(torch.float8_e4m3fn)
    scales = torch.full((2, 9), 7.0, device=device)
    lengths = torch.tensor([5, 0], device=device)
    exact = torch.zeros(2, 9, 64, device=device, dtype=torch.float64)
    args = (rows, norm, EPS, lengths, scales)
    assert write_kernel().refuses(latents, *args) is None
    write_kernel().latent_write(latents, *args)
    latent_write.latent_write(exact, rows.double(), norm.double(), EPS, lengths)
    written = torch.cat((latents[0, 5:8], latents[1, :3])).double()
    scale = torch.cat((scales[0, 5:8], scales[1, :3])).double().unsqueeze(-1)
    exact = torch.cat((exact[0, 5:8], exact[1, :3]))
    rounding = 2**-8 if dtype == torch.bfloat16 else 0.0  # of the row before it becomes float8
    allowed = exact.abs() * (2**-4 + 2 * rounding) + scale * 2**-10
    assert ((written * scale - exact).abs() <= allowed).all()
    largest = written.abs().amax(-1)
    assert torch.equal(largest, torch.tensor([448.0] * 5 + [0.0], device=device).double())
    untouched = torch.ones(2, 9, dtype=torch.bool, device=device)
    untouched[0, 5:8] = untouched[1, :3] = False
    assert (scales[untouched] == 7.0).all()


def check_absorb(
    size: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", fp8: bool = False
) -> None:
    B, T, H, nope, rank, shared = size
    rows, norm = rows_and_norm(B, T, rank, shared, dtype, device)
    q = torch.randn(B, T, 3 + H * (nope + shared), device=device, dtype=dtype)[..., 3:]
    q = q.unflatten(-1, (H, -1))
    w_k = torch.randn(H, nope + 5, rank, device=device, dtype=dtype)[:, :nope]
    lengths = torch.randint(0, 20, (B,), device=device)
    latents = torch.zeros(B, 20 + T, rank + shared, device=device, dtype=dtype)
    scales = torch.zeros(B, 20 + T, device=device) if fp8 else None
    if fp8:
        latents = latents.to(torch.float8_e4m3fn)
    written = latents.clone(), None if scales is None else scales.clone()
    args = (q, rows, w_k, nope**-0.5)
    assert absorb_kernel().refuses(*args, latents, norm, EPS, lengths, scales) is None
    out = absorb_kernel().mla_absorb(*args, latents, norm, EPS, lengths, scales)
    expected = latent_write.mla_absorb(
        q.double(), rows.double(), w_k.double(), nope**-0.5, torch.zeros_like(latents).double(),
        norm.double(), EPS, lengths,
    )  # fmt: skip
    assert_close(out, expected, limit=limit_of(out))
    write_kernel().latent_write(written[0], rows, norm, EPS, lengths, written[1])
    if written[1] is None or scales is None:
        assert_close(latents, written[0], limit=limit_of(latents))
        return
    assert_close(scales, written[1], limit=FLOAT32)
    a, b = latents.float(), written[0].float()  # sums of another order may round to a neighbour
    assert ((a - b).abs() <= b.abs() * 2**-3 + 2**-9).all()
    assert (a != b).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_absorb(poison: None, dtype: torch.dtype) -> None:
    check_absorb((2, 3, 3, 12, 40, 8), dtype)


def test_absorb_of_many_rows_and_into_float8(poison: None) -> None:
    check_absorb((5, 4, 2, 16, 32, 16), torch.float32)
    check_absorb((1, 1, 2, 16, 32, 16), torch.bfloat16, fp8=True)


@pytest.mark.parametrize("change", ["float64", "scales", "mixed", "stride", "grad", "many"])
def test_what_the_kernels_refuse(change: str) -> None:
    rows, norm = rows_and_norm(1, 2, 32, 16, torch.float32)
    latents, scales, lengths = torch.zeros(1, 8, 48), None, torch.tensor([1])
    q, w_k = torch.zeros(1, 2, 3, 24), torch.zeros(3, 8, 32)
    if change == "float64":
        rows, latents, q, w_k = rows.double(), latents.double(), q.double(), w_k.double()
    elif change == "scales":
        latents = latents.to(torch.float8_e4m3fn)
    elif change == "mixed":
        latents = latents.bfloat16()
    elif change == "stride":
        latents = latents.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "grad":
        rows = rows.requires_grad_()
    else:
        q = q.expand(400, 2, 3, 24)
    write = write_kernel().refuses(latents, rows, norm, EPS, lengths, scales)
    assert (write is None) == (change == "many")
    assert absorb_kernel().refuses(q, rows, w_k, 1.0, latents, norm, EPS, lengths, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [(1, 1, 32, 128, 512, 64), (1, 8, 96, 128, 512, 64), (9, 16, 12, 100, 192, 24)]
)
def test_on_a_gpu(poison: None, size: tuple[int, ...], dtype: torch.dtype) -> None:
    check_absorb(size, dtype, "cuda")
    check_absorb(size, dtype, "cuda", fp8=True)
    rows, norm = rows_and_norm(size[0], size[1], size[4], size[5], dtype, "cuda")
    lengths = torch.randint(0, 50, (size[0],), device="cuda")
    check_write(rows, norm, lengths, 50)
    check_float8(dtype, "cuda")


@pytest.mark.gpu
def test_a_captured_graph_follows_the_lengths(poison: None) -> None:
    """Positions that are frozen at capture write every later token over the first one."""
    rows, norm = rows_and_norm(2, 4, 512, 64, torch.bfloat16, "cuda")
    latents = torch.zeros(2, 100, 576, dtype=torch.bfloat16, device="cuda")
    lengths, counts = (torch.tensor(x, device="cuda") for x in ([0, 0], [4, 4]))
    write_kernel().latent_write(latents, rows, norm, EPS, lengths, None, counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kernel().latent_write(latents, rows, norm, EPS, lengths, None, counts)
    latents.zero_()
    expected = latents.clone()
    for at, real in (([3, 90], [4, 1]), ([50, 97], [2, 4])):
        lengths.copy_(torch.tensor(at))
        counts.copy_(torch.tensor(real))
        rows.normal_()
        graph.replay()
        latent_write.latent_write(expected, rows, norm, EPS, lengths, None, counts)
        assert_close(latents, expected)
