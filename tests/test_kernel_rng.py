"""Philox against published vectors and Triton's own, and what a request's draws depend on."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from dspark_kernels import rng, rng_triton

# kat_vectors of the Random123 distribution, philox4x32 with 10 rounds: key, counter, output.
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(("key", "counter", "output"), KNOWN)
def test_published_vectors(key: tuple, counter: tuple, output: tuple) -> None:
    found = rng.philox(words(*key), words(*counter))
    assert tuple(int(word) for word in found) == output


def test_uniforms_are_the_words_of_the_counters() -> None:
    seed, position = -(2**62) - 12345, 2**33 + 7
    u = rng.uniform(torch.tensor([seed]), torch.tensor([position]), 5, 4)[0]
    for pair in range(2):
        key = words(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        w = [int(x) for x in rng.philox(key, words(pair, 5, position & 0xFFFFFFFF, position >> 32))]
        for half in range(2):
            word = w[2 * half] << 32 | w[2 * half + 1]
            assert float(u[2 * pair + half]) == (word >> 11) * 2.0**-53


def requests(count: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    seed = torch.randint(-(2**63), 2**63 - 1, (count,))
    return seed.to(device), torch.randint(0, 2**40, (count,)).to(device)


@pytest.mark.parametrize("stream", [rng.DRAFT, rng.JUDGE, 2**32 - 1])
@pytest.mark.parametrize("count", [1, 2, 7, 18])
def test_kernel_has_the_same_bits(stream: int, count: int, poison: None) -> None:
    given = requests(5)
    assert torch.equal(
        rng_triton.uniform(*given, stream, count), rng.uniform(*given, stream, count)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 9, 64])
def test_gpu_has_the_same_bits(count: int) -> None:
    given = requests(300, "cuda")
    there = rng_triton.uniform(*given, 1, count)
    assert torch.equal(there.cpu(), rng.uniform(*(x.cpu() for x in given), 1, count))


def test_a_request_alone_draws_what_it_draws_in_a_batch() -> None:
    seed, position = requests(6)
    together = rng.uniform(seed, position, rng.DRAFT, 9)
    order = torch.tensor([4, 1])
    assert torch.equal(rng.uniform(seed[order], position[order], rng.DRAFT, 9), together[order])
    assert torch.equal(rng.uniform(seed, position, rng.DRAFT, 4), together[:, :4])


def test_positions_streams_and_seeds_are_unrelated() -> None:
    """Uniform, and uncorrelated between neighbours of every kind: p-values of 40,000 draws."""
    seed, position = torch.arange(200), torch.arange(200)
    grid = rng.uniform(seed.repeat_interleave(200), position.repeat(200), rng.DRAFT, 2)
    other = rng.uniform(seed.repeat_interleave(200), position.repeat(200), rng.JUDGE, 2)
    square = grid[:, 0].view(200, 200)
    assert stats.kstest(grid.flatten().numpy(), "uniform").pvalue > 1e-4
    for a, b in (
        (square[1:], square[:-1]),
        (square[:, 1:], square[:, :-1]),
        (grid[:, 0], grid[:, 1]),
        (grid, other),
    ):
        assert stats.pearsonr(a.flatten().numpy(), b.flatten().numpy()).pvalue > 1e-4


def test_refused_in_words() -> None:
    seed, position = requests(2)
    assert rng_triton.refuses(seed, position, 0, 3) is None
    assert "nothing" in (rng_triton.refuses(seed, position, 0, 0) or "")
    assert "4096" in (rng_triton.refuses(seed, position, 0, 5000) or "")
