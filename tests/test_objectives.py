"""Every objective and its gradient against autograd over plain, whole logits in float64; weights
and hybrids against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.distill import loss
from dspark.distill.fused import DraftVocabulary
from dspark.distill.loss import LossSums, chunk_slots, distill_loss
from dspark.distill.objective import objective as objective_of
from dspark.distill.terms import Grid, Objective, dpace_weights
from dspark.distill.train_settings import TrainSettings
from dspark.draft.heads import (
    ConfidenceHead,
    GatedMarkovHead,
    RNNHead,
    SequentialHead,
    VanillaMarkovHead,
)
from dspark.errors import UserError
from tests.tolerance import assert_close

NOTHING = Objective(ce=0.0, l1=0.0, confidence=0.0)
OBJECTIVES = {
    "deepspec": Objective(confidence=0.0),
    "ce": replace(NOTHING, ce=1.0),
    "l1": replace(NOTHING, l1=1.0),
    "kl": replace(NOTHING, kl=1.0),
    "reverse_kl": replace(NOTHING, reverse_kl=1.0),
    "nla": replace(NOTHING, nla=1.0),
    "lk_hybrid": replace(NOTHING, lk_hybrid=1.0),
    "length": replace(NOTHING, length=1.0),
    "dpace": replace(NOTHING, ce=1.0, l1=0.3, slot_weights="dpace"),
    "all": Objective(0.1, 0.9, 0.0, 0.2, 0.3, 0.4, 0.5, 0.6, decay=2.5),
    "all dpace": Objective(0.1, 0.9, 0.0, 0.2, 0.3, 0.4, 0.5, 0.6, slot_weights="dpace"),
}
FULL = pytest.mark.parametrize("kept", [None, 7], ids=["full", "reduced"])


class Case:
    """Blocks of 5 slots over a vocabulary, optionally with a draft vocabulary of every third id."""

    def __init__(
        self, kept: int | None = None, *, dtype: torch.dtype = torch.float64, vocab: int = 19,
        blocks: int = 6, seed: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        width, rank, slots = 6, 4, 5
        self.ids = None if kept is None else torch.arange(kept) * (vocab // kept)
        drafted = vocab if kept is None else kept
        double = torch.float64
        self.head = torch.randn(vocab, width, dtype=double).to(dtype)
        self.states = torch.randn(blocks, slots, width, dtype=double).to(dtype)
        self.target = torch.randn(blocks, slots, width, dtype=double).to(dtype)
        self.markov = VanillaMarkovHead(vocab, rank, drafted).double()
        with torch.no_grad():
            self.markov.markov_w2.weight.normal_()
        self.markov.to(dtype)
        self.prev = torch.randint(vocab, (blocks, slots))
        self.labels = torch.randint(vocab, (blocks, slots))
        self.supervised = torch.arange(slots) < torch.tensor([5, 0, 1, 3, 5, 2])[:blocks, None]

    def double(self) -> Case:
        """The same numbers in float64."""
        other = Case.__new__(Case)
        other.__dict__ = dict(self.__dict__)
        for name in ("head", "states", "target"):
            setattr(other, name, getattr(self, name).double())
        other.markov = VanillaMarkovHead(*self.markov.markov_w1.weight.shape, len(self.draft_head))
        other.markov.load_state_dict(self.markov.state_dict())
        other.markov.double()
        return other

    @property
    def draft_head(self) -> Tensor:
        return self.head if self.ids is None else self.head[self.ids]

    def sums(self, objective: Objective, chunk: int | None = None) -> LossSums:
        reduced = self.ids is not None
        return distill_loss(
            self.states, self.target, self.prev, self.labels, self.supervised,
            to_logits=lambda states: states @ self.head.T,
            markov_head=self.markov,
            confidence_head=None,
            objective=objective,
            chunk=chunk,
            vocabulary=DraftVocabulary(self.ids) if reduced else None,
            to_draft_logits=(lambda states: states @ self.draft_head.T) if reduced else None,
        )  # fmt: skip

    def plain(self, o: Objective) -> Tensor:
        """The same number block by block, slot by slot, all logits at once, plain autograd."""
        codes = self.markov.codes(self.prev, self.states)
        logits = self.states @ self.draft_head.T + self.markov.bias(codes)
        q_all, p_all = logits.softmax(-1), (self.target @ self.head.T).softmax(-1)
        total = torch.zeros((), dtype=q_all.dtype)
        unit = 1.0
        if o.slot_weights == "decay":
            unit = sum(math.exp(-k / o.decay) for k in range(5))
        for block in range(len(q_all)):
            count = int(self.supervised[block].sum())
            chances, terms, alive, length = [], [], 1.0, 0.0
            for k in range(count):
                term, chance, acceptance = self._slot(o, q_all[block, k], p_all[block, k], block, k)
                terms.append(term)
                chances.append(0.5 * chance.detach() + 0.5)
                alive = alive * acceptance
                length = length + alive
            for k, term in enumerate(terms):
                weight = math.exp(-k / o.decay)
                if o.slot_weights == "dpace":
                    weight = sum(math.prod(chances[: m + 1]) for m in range(k, count))
                total = total + weight * term
            total = total - o.length * unit * length
        return total

    def _slot(
        self, o: Objective, q: Tensor, p: Tensor, block: int, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        label, inside, outside = int(self.labels[block, k]), p, q.new_zeros(())
        if self.ids is not None:
            found = (self.ids == label).nonzero().flatten().tolist()
            label = found[0] if found else -1
            inside = p[self.ids]
            outside = 1 - inside.sum()
        ce = -q[label].log() if label >= 0 else q.new_zeros(())
        chance = q[label] if label >= 0 else q.new_zeros(())
        l1 = (q - inside).abs().sum() + outside
        known = inside / inside.sum()
        kl = (known * (known / q).log()).sum()
        reverse = (q * (q / known).log()).sum()
        nla = -torch.minimum(q, inside).sum().log()
        share = torch.exp(-3 * (1 - l1.detach() / 2))
        hybrid = share * kl + (1 - share) * l1 / 2
        term = o.ce * ce + o.l1 * l1 + o.kl * kl + o.reverse_kl * reverse + o.nla * nla
        return term + o.lk_hybrid * hybrid, chance, 1 - l1 / 2

    def gradients(self, value: Callable[[], Tensor]) -> dict[str, Tensor]:
        self.states.requires_grad_(True)
        inputs = {"states": self.states, **dict(self.markov.named_parameters())}
        got = torch.autograd.grad(value(), list(inputs.values()))
        return dict(zip(inputs, got, strict=True))


@FULL
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("chunk", [5, 100])
def test_value_and_gradients_equal_plain_autograd(name: str, kept: int | None, chunk: int) -> None:
    case, objective = Case(kept), OBJECTIVES[name]
    plain = case.plain(objective)
    sums = case.sums(objective, chunk)
    torch.testing.assert_close(sums.objective, plain, rtol=0, atol=1e-10)
    reference = case.gradients(lambda: case.plain(objective))
    gradients = case.gradients(lambda: case.sums(objective, chunk).objective)
    for key, expected in reference.items():
        torch.testing.assert_close(gradients[key], expected, rtol=0, atol=1e-10, msg=key)
    assert (reference["states"][case.supervised] != 0).any()
    blocks = (case.supervised.sum(-1) > 0).sum()
    weights = torch.exp(-torch.arange(5).double() / objective.decay).expand(6, 5)
    weight = weights[case.supervised].sum()
    expected = blocks.double() if objective.slot_weights == "dpace" else weight
    torch.testing.assert_close(sums.normaliser, expected, rtol=1e-14, atol=0)


@FULL
@pytest.mark.parametrize("name", ["deepspec", "all", "all dpace"])
@pytest.mark.parametrize("vocab", [151, 20_000])
def test_float32_stays_within_the_tolerance_table(name: str, kept: int | None, vocab: int) -> None:
    objective = OBJECTIVES[name]
    case = Case(kept and vocab // 2, dtype=torch.float32, vocab=vocab)
    double = case.double()
    assert_close(case.sums(objective, 7).objective, double.plain(objective))
    reference = double.gradients(lambda: double.plain(objective))
    gradients = case.gradients(lambda: case.sums(objective, 7).objective)
    for key, expected in reference.items():
        assert_close(gradients[key], expected, what=key)


@pytest.mark.parametrize("name", ["ce", "l1", "kl", "reverse_kl", "nla", "length", "deepspec"])
def test_finite_differences_agree(name: str) -> None:
    """Without those that hold a weight constant, which plain autograd above tells apart."""
    case = Case(blocks=3)
    head = case.markov.markov_w2.weight

    def value(states: Tensor, weight: Tensor) -> Tensor:
        case.states = states
        case.markov.markov_w2.weight = torch.nn.Parameter(weight)
        return case.sums(OBJECTIVES[name], 5).objective

    states = case.states.clone().requires_grad_(True)
    value(states, head.detach()).backward()
    direction = torch.randn_like(states)
    with torch.no_grad():
        up = value(states + 1e-6 * direction, head.detach())
        down = value(states - 1e-6 * direction, head.detach())
    slope = (states.grad * direction).sum()  # type: ignore[operator]
    assert slope.item() == pytest.approx(((up - down) / 2e-6).item(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("head", [GatedMarkovHead, RNNHead])
@pytest.mark.parametrize("supervised", [True, False])
def test_heads_that_read_the_block(head: type[SequentialHead], supervised: bool) -> None:
    """Codes of a slot hang on earlier slots: gradients reach those, and never a slot behind."""
    case, objective = Case(), OBJECTIVES["all dpace"]
    case.markov = head(19, 4, hidden=6).double()
    if not supervised:
        case.supervised = torch.zeros_like(case.supervised)
    expected = case.gradients(lambda: case.plain(objective)) if supervised else None
    case.states = case.states.detach()
    case.states[~case.supervised] = torch.nan
    got = case.gradients(lambda: case.sums(objective, 5).objective)
    for name, gradient in got.items():
        if expected is None:
            assert not gradient.any(), name
        else:
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10, msg=name)


def test_dpace_weights_by_hand() -> None:
    """Data tokens at 1, 0.5, 0: smoothed 1, 0.75, 0.5, so a block gets in 1 + 0.75 + 0.375."""
    grid = Grid(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0]), 2, 3)
    chance = torch.tensor([1.0, 0.5, 0.0, 0.2], dtype=torch.float64)
    weights = dpace_weights(-chance.log(), grid, None)
    expected = torch.tensor([2.125, 1.125, 0.375, 0.6], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


def test_a_perfect_drafter_minimises_every_objective() -> None:
    case = Case()
    torch.nn.init.zeros_(case.markov.markov_w2.weight)
    case.states = case.target.clone()
    for name in ("l1", "kl", "reverse_kl", "nla", "lk_hybrid"):
        value = case.sums(OBJECTIVES[name]).objective.item()
        assert value == pytest.approx(0, abs=1e-12), name
    # Every drafted token gets in: the supervised slots of the block, in units of a whole block.
    unit = torch.exp(-torch.arange(5).double() / 4).sum()
    value = case.sums(OBJECTIVES["length"]).objective
    torch.testing.assert_close(value, -unit * case.supervised.sum(), rtol=1e-12, atol=0)
    gradients = case.gradients(lambda: case.sums(OBJECTIVES["all"]).objective)
    own = case.gradients(lambda: case.sums(replace(NOTHING, ce=0.1, decay=2.5)).objective)
    # Only cross-entropy with the sampled tokens still pulls; the kink of L1 does not.
    torch.testing.assert_close(gradients["states"], own["states"], rtol=0, atol=1e-12)


def test_log_acceptance_keeps_its_gradient_where_tv_has_none() -> None:
    """p and q nearly disjoint: L1 is flat there, the log of the overlap is not, in float32 too."""
    case = Case(dtype=torch.float32)
    with torch.no_grad():
        case.states *= 12
        case.target *= -12
    double = case.double()
    flat = double.gradients(lambda: double.sums(OBJECTIVES["l1"]).objective)["states"]
    steep = double.gradients(lambda: double.sums(OBJECTIVES["nla"]).objective)["states"]
    logits = double.states @ double.head.T + double.markov.bias(double.markov.embed(double.prev))
    p, q = (double.target @ double.head.T).softmax(-1), logits.softmax(-1)
    apart = double.supervised & (torch.minimum(p, q).sum(-1) < 1e-6)
    assert apart.sum() >= 3
    assert flat.norm(dim=-1)[apart].max() < 1e-4
    # Not everywhere: where q is above p at all they share, the overlap is p, which does not move.
    assert (steep.norm(dim=-1)[apart] > 1).sum() >= 3
    plain = double.gradients(lambda: double.plain(OBJECTIVES["nla"]))["states"]
    single = case.gradients(lambda: case.sums(OBJECTIVES["nla"]).objective)["states"]
    assert_close(single, plain)


def test_a_fault_in_the_closed_form_would_be_seen() -> None:
    """Planted: the gradient of another objective is off by far more than the test's tolerance."""
    case = Case()
    wrong = case.gradients(lambda: case.sums(replace(OBJECTIVES["all"], nla=0.41)).objective)
    right = case.gradients(lambda: case.plain(OBJECTIVES["all"]))
    assert (wrong["states"] - right["states"]).abs().max() > 1e-3


def test_backward_scales_and_may_run_twice() -> None:
    case = Case()
    case.states.requires_grad_(True)
    total = case.sums(OBJECTIVES["deepspec"]).objective
    (once,) = torch.autograd.grad(total, case.states, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * total, case.states)
    torch.testing.assert_close(thrice, 3 * once, rtol=1e-14, atol=0)


def test_evaluation_forms_no_gradients() -> None:
    """Under no_grad the LM head runs outside autograd."""
    case, graded = Case(), []

    def to_logits(states: Tensor) -> Tensor:
        graded.append(torch.is_grad_enabled() or states.requires_grad)
        return states @ case.head.T

    with torch.no_grad():
        sums = distill_loss(
            case.states, case.target, case.prev, case.labels, case.supervised,
            to_logits=to_logits, markov_head=case.markov, confidence_head=None,
            objective=OBJECTIVES["all"], chunk=100,
        )  # fmt: skip
    assert graded
    assert not any(graded)
    assert not sums.objective.requires_grad
    torch.testing.assert_close(sums.objective, case.plain(OBJECTIVES["all"]), rtol=1e-12, atol=0)


def test_automatic_chunks_fill_a_stated_number_of_bytes() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (
        chunk_slots(163_840, cpu) * 163_840 * 4
        <= 2**25
        < (chunk_slots(163_840, cpu) + 1) * 163_840 * 4
    )
    assert chunk_slots(163_840, gpu) == 819
    assert chunk_slots(10**12, cpu) == 1
    case = Case()
    torch.testing.assert_close(
        case.sums(OBJECTIVES["all"]).objective, case.sums(OBJECTIVES["all"], 5).objective,
        rtol=1e-12, atol=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="at least one slot"):
        case.sums(OBJECTIVES["all"], 0)


def test_a_reduced_vocabulary_does_not_widen_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's logits of a chunk are over all ids, whatever the drafter's are over."""
    asked = []
    monkeypatch.setattr(loss, "chunk_slots", lambda width, _: asked.append(width) or 5)
    for case in (Case(), Case(kept=6)):
        case.sums(OBJECTIVES["deepspec"])
    assert asked == [19, 19]


def test_where_p_equals_q_the_distance_has_no_slope() -> None:
    """One equal pair among unequal ones: |x| has derivative 0 at 0, as torch has it."""
    ours = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[2.0, 1.0, 0.5]], dtype=torch.float64)
    assert ours.softmax(-1)[0, 2] == target.softmax(-1)[0, 2]  # a sum of two swapped terms
    head = VanillaMarkovHead(3, 1).double()
    torch.nn.init.zeros_(head.markov_w2.weight)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    sums = loss.distill_loss(
        ours[None], target[None], zero, zero, zero == 0,
        to_logits=lambda states: states * 1, markov_head=head, confidence_head=None,
        objective=OBJECTIVES["l1"],
    )  # fmt: skip
    [fused] = torch.autograd.grad(sums.loss(), ours)
    distance = (ours.softmax(-1) - target.softmax(-1)).abs().sum()
    assert_close(fused, torch.autograd.grad(distance, ours)[0], limit=1e-14)


def test_dpace_leaves_the_confidence_its_decay_weights() -> None:
    """Divided by blocks, a whole block's confidence loss is the weighted mean over its slots."""
    case = Case(blocks=4)
    case.supervised = torch.ones(4, 5, dtype=torch.bool)
    head = ConfidenceHead(6, 0).double()
    dpace, decay = (
        replace(NOTHING, ce=1e-30, confidence=1.0, slot_weights=weights)
        for weights in ("dpace", "decay")
    )
    both = [
        distill_loss(
            case.states, case.target, case.prev, case.labels, case.supervised,
            to_logits=lambda states: states @ case.head.T,
            markov_head=case.markov, confidence_head=head, objective=each,
        ).loss()
        for each in (dpace, decay)
    ]  # fmt: skip
    assert_close(both[0], both[1], limit=1e-12)


def test_settings_reach_the_objective() -> None:
    settings = TrainSettings(
        ce=0.1, tv=0.2, confidence=0.3, kl=0.4, reverse_kl=0.5, nla=0.6, lk_hybrid=0.7, length=0.8,
        slot_weights="dpace", decay=9.0,
    )  # fmt: skip
    expected = Objective(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, "dpace", 9.0)
    assert objective_of(settings) == expected
    with pytest.raises(UserError, match="slot_weights is 'dpase': expected decay or dpace"):
        TrainSettings(slot_weights="dpase")
    with pytest.raises(UserError, match="would learn no tokens"):
        TrainSettings(ce=0.0, tv=0.0)
    TrainSettings(ce=0.0, tv=0.0, nla=1.0)
    with pytest.raises(UserError, match=r"train\.kl is -1\.0"):
        TrainSettings(kl=-1.0)
