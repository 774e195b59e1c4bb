"""The loss through half-precision products against the fused loss in float64, and what decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.distill import fused_head
from dspark.distill.loss import LossSums, distill_loss
from dspark.distill.terms import TERMS, Grid, Objective, mixture, worths
from dspark.draft.heads import ConfidenceHead, VanillaMarkovHead
from tests.tolerance import assert_close, errors

BLOCKS, SLOTS, WIDTH, VOCAB, RANK, POSITIONS = 9, 5, 64, 300, 16, 20
GPU = torch.device("cuda")
EVERY = Objective(kl=0.3, reverse_kl=0.2, nla=0.4, lk_hybrid=0.1, length=0.2)
OBJECTIVES = {"default": Objective(), "every": EVERY, "dpace": Objective(slot_weights="dpace")}


class Case:
    """A batch of blocks whose inputs are exact in bfloat16; two blocks have nothing to learn."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape) * std).bfloat16().to(device, dtype)

        self.hidden = normal(BLOCKS, SLOTS, WIDTH).requires_grad_(True)
        self.states = normal(POSITIONS, WIDTH)
        self.head = normal(VOCAB, WIDTH, std=WIDTH**-0.5)
        self.markov = VanillaMarkovHead(VOCAB, RANK)
        for parameter in self.markov.parameters():
            parameter.data = normal(*parameter.shape, std=0.5)
        self.confidence = ConfidenceHead(WIDTH, RANK).to(device, dtype)
        self.ids = torch.randint(VOCAB, (2, BLOCKS, SLOTS)).to(device)
        self.rows = torch.randint(POSITIONS, (BLOCKS, SLOTS)).to(device)
        prefix = torch.tensor([5, 0, 1, 3, 5, 2, 4, 0, 5])
        self.supervised = (torch.arange(SLOTS) < prefix[:, None]).to(device)

    def sums(self, **options: Any) -> LossSums:
        prev, labels = self.ids
        arguments = {"objective": Objective(), "chunk": 12, **options}
        return distill_loss(
            self.hidden, self.states, prev, labels, self.supervised,
            to_logits=lambda states: (states.to(self.head.dtype) @ self.head.T).to(states.dtype),
            markov_head=self.markov, confidence_head=self.confidence, target_rows=self.rows,
            **arguments,
        )  # fmt: skip

    def gradients(self, sums: LossSums) -> dict[str, Tensor]:
        leaves = {"hidden": self.hidden, **dict(self.markov.named_parameters())}
        found = torch.autograd.grad(sums.objective, list(leaves.values()))
        return dict(zip(leaves, found, strict=True))


def compare(device: torch.device, objective: Objective, chunk: int) -> None:
    """Sums by the policy; gradients nearer to float64 than those of `fused.py` with this head.

    A head in bfloat16 rounds logits, which moves gradients by one or two percent at this size
    whatever comes after (H jumps where p meets q): what can be asked for is to add nothing to it.
    """
    exact, case = Case(device, torch.float64), Case(device, torch.float32)
    reference = exact.sums(objective=objective)
    found = case.sums(objective=objective, chunk=chunk, head=case.head.bfloat16())
    for name in (*TERMS, "bce", "acceptance", "objective", "accepted_length"):
        wanted = getattr(reference, name).detach()
        assert_close(getattr(found, name), wanted, dtype=torch.bfloat16, what=name)
    assert torch.equal(found.count, reference.count.float())
    gradients = case.gradients(found)
    case.head = case.head.bfloat16()
    before = case.gradients(case.sums(objective=objective, chunk=chunk))
    for name, wanted in exact.gradients(reference).items():
        error, limit = errors(gradients[name], wanted), errors(before[name], wanted)
        assert error.rms < limit.rms < 0.02, name


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("chunk", [5, 1000])
def test_sums_and_gradients_are_those_of_float64(objective: Objective, chunk: int) -> None:
    compare(torch.device("cpu"), objective, chunk)


def test_each_position_of_the_target_is_multiplied_once_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, seen = Case(torch.device("cpu"), torch.float32), []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: seen.append(a[0].shape) or product(*a, **k))
    case.sums(chunk=1000, head=case.head.bfloat16())
    used = case.rows[case.supervised].unique()
    assert len(used) < int(case.supervised.sum())
    assert (len(used), WIDTH) in [tuple(shape) for shape in seen]


def test_nothing_to_learn_gives_exact_zeros() -> None:
    case = Case(torch.device("cpu"), torch.float32)
    case.supervised = torch.zeros_like(case.supervised)
    sums = case.sums(head=case.head.bfloat16(), chunk=None)
    assert sums.objective == 0
    assert all((g == 0).all() for g in case.gradients(sums).values())


def test_without_a_gradient_the_sums_are_the_same() -> None:
    case = Case(torch.device("cpu"), torch.float32)
    head = case.head.bfloat16()
    trained = case.sums(head=head)
    with torch.no_grad():
        assert torch.equal(case.sums(head=head).objective, trained.objective.detach())


def test_what_is_taken() -> None:
    head = torch.zeros(4, 2, dtype=torch.bfloat16)
    assert fused_head.takes(head, False)
    assert not fused_head.takes(head, True)  # a vocabulary of the drafter's own
    assert not fused_head.takes(head.float(), False)
    assert not fused_head.takes(None, False)  # scaled, capped or biased logits


def test_chunks_are_as_few_and_as_even_as_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 2 * 100 * 10)
    assert fused_head.even_chunk(7, 100, 1) == 7
    assert fused_head.even_chunk(10, 100, 1) == 10
    assert fused_head.even_chunk(12, 100, 1) == 6
    assert fused_head.even_chunk(0, 100, 1) == 1
    assert fused_head.even_chunk(5, 10**6, 1) == 1
    assert fused_head.even_chunk(12, 100, 3) == 8  # six and a block less one


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_on_a_gpu_through_the_kernels(objective: Objective) -> None:
    compare(GPU, objective, 12)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(ce=0.3, kl=0.5, reverse_kl=0.2, nla=0.4, slot_weights="dpace"),
        Objective(l1=0.1, lk_hybrid=0.7, decay=2.0),
    ],
    ids=["default", "dpace", "hybrid"],
)
def test_worths_are_the_gradient_of_the_mixture(objective: Objective) -> None:
    generator = torch.Generator().manual_seed(0)
    block = torch.arange(3).repeat_interleave(4)
    grid = Grid(block, torch.arange(4).repeat(3), 3, 4)
    terms = torch.rand(len(TERMS), 12, generator=generator).double().requires_grad_()
    [expected] = torch.autograd.grad(mixture(terms, grid, objective, None), terms)
    found = worths(terms.detach(), grid, objective, None)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="length"):
        worths(terms.detach(), grid, Objective(length=0.1), None)
