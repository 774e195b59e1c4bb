"""The end of a frame in one launch, against the loop that says what is meant, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.runtime.faults import fault_of
from dspark.runtime.frame_step import keep
from dspark.runtime.records import Verdict
from dspark_kernels import settle as reference
from dspark_kernels import settle_triton as kernel
from dspark_kernels.settle import HEADS, Seats

VOCABULARY = 9  # so small that end tokens stand everywhere
SIZES = [(1, 0, 1), (5, 1, 3), (7, 7, 8), (64, 4, 2)]


def frame(batch: int, primaries: int, ends: int, device: str = "cpu") -> dict[str, Any]:
    """Seats in every condition: idle, at their last token, with and without end tokens."""

    def ids(*shape: int, low: int = 0, high: int = VOCABULARY) -> Tensor:
        return torch.randint(low, high, shape, device=device)

    left = ids(batch, high=primaries + 4)
    sent = (left - 1).clamp(0, primaries)
    wide = torch.rand(batch, primaries + 3, device=device)
    return {
        "tokens": ids(batch, primaries + 2)[:, :primaries],
        "accepted": torch.minimum(ids(batch, high=primaries + 1), sent),
        "next_token": ids(batch),
        "level": ids(batch, high=4),
        "fault": ids(batch, low=-3, high=4),
        "ends": torch.rand(batch, VOCABULARY, device=device) < ends / VOCABULARY,
        "seats": Seats(ids(batch), left, sent, ids(batch, high=1000), ids(batch)),
        "entropy": wide[:, :primaries],
        "peak": bad_peaks(batch, primaries, device),
        "confidence": wide[:, 2 : 2 + primaries].bfloat16() if primaries != 1 else None,
    }


def bad_peaks(batch: int, primaries: int, device: str) -> Tensor:
    """Most rows fine; some with one or more scores that are not finite."""
    values = torch.tensor([0.5, -2.0, 3.0, 1.0, torch.nan, torch.inf, -torch.inf], device=device)
    peaks = values[torch.randint(0, 7, (batch, primaries), device=device)]
    peaks[::2] = 1.0
    return peaks


def copied(given: dict[str, Any]) -> dict[str, Any]:
    seats = Seats(*(x.clone() for x in given["seats"]))
    return given | {"seats": seats}


def assert_same(given: dict[str, Any]) -> None:
    ours, theirs = copied(given), copied(given)
    assert kernel.refuses(**ours) is None
    found, expected = kernel.settle(**ours), reference.settle(**theirs)
    for a, b in zip((*found, *ours["seats"]), (*expected, *theirs["seats"]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "primaries", "ends"), SIZES)
def test_kernel_is_the_reference(batch: int, primaries: int, ends: int, poison: None) -> None:
    assert_same(frame(batch, primaries, ends))


def test_without_slots_entropy_and_confidence(poison: None) -> None:
    given = frame(4, 3, 2) | {"entropy": None, "confidence": None}
    results = []
    for one in (kernel, reference):
        seats = Seats(*(x.clone() for x in given["seats"]))._replace(accepted=None)
        count, letter = one.settle(**(given | {"seats": seats}))
        assert letter.shape == (4, HEADS + 3)
        results.append((count, letter, *seats[:4]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_reference_is_what_frames_keep(seed: int) -> None:
    """The same as the frames that read siblings too, and as a loop over tokens."""
    torch.manual_seed(seed)
    given = frame(6, 5, 3)
    drafters = fault_of(given["peak"].unsqueeze(-1))
    before = copied(given)["seats"]
    count, letter = reference.settle(**given)
    none = torch.full_like(count, -1)
    verdict = Verdict(
        given["accepted"], given["next_token"], given["level"], none, none, given["fault"]
    )
    kept = keep(given["tokens"], verdict, before.left, given["ends"])
    assert torch.equal(count, kept.count)
    assert torch.equal(given["seats"].left, kept.left)
    assert torch.equal(given["seats"].sent, (kept.left - 1).clamp(0, 5))
    assert torch.equal(given["seats"].lengths, before.lengths + count)
    assert torch.equal(given["seats"].accepted, count)
    for b in range(6):
        accepted = int(given["accepted"][b])
        said = [*given["tokens"][b, :accepted].tolist(), int(given["next_token"][b])]
        stops = given["ends"][b].nonzero().squeeze(1).tolist()
        until = next((i + 1 for i, token in enumerate(said) if token in stops), len(said))
        assert int(count[b]) == (until if before.left[b] > 0 else 0)
        assert letter[b, :7].tolist() == [
            accepted,
            said[-1],
            int(given["level"][b]),
            -1,
            -1,
            -int(drafters[b]) or int(given["fault"][b]),
            int(before.sent[b]),
        ]


def test_what_the_kernel_refuses() -> None:
    given = frame(2, 3, 2)
    assert "int64" in (kernel.refuses(**(given | {"level": given["level"].int()})) or "")
    assert "64" in (kernel.refuses(**frame(2, 70, 2)) or "")
    assert "contiguous" in (
        kernel.refuses(**(given | {"tokens": torch.zeros(3, 2).long().t()})) or ""
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "primaries", "ends"), SIZES)
def test_on_a_gpu(batch: int, primaries: int, ends: int) -> None:
    assert_same(frame(batch, primaries, ends, "cuda"))
