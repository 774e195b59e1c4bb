"""The loss against its formula in numpy, against NeMo's, and against everything that must not
change it: chunks, how rows are split over ranks, rows with nothing to learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dspark.distill.loss import LossSums, distill_loss
from dspark.distill.terms import Objective, slot_weights
from dspark.draft.heads import ConfidenceHead, VanillaMarkovHead
from tests import oracles
from tests.tolerance import assert_close

BLOCKS, SLOTS, WIDTH, VOCAB, RANK = 7, 5, 6, 17, 4


class Case:
    """Random inputs of `distill_loss` in one dtype, with the parameters that it trains."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.hidden = torch.randn(BLOCKS, SLOTS, WIDTH, dtype=dtype, requires_grad=True)
        self.target_hidden = torch.randn(BLOCKS, SLOTS, WIDTH, dtype=dtype)
        self.lm_head = torch.randn(VOCAB, WIDTH, dtype=dtype)
        self.markov = VanillaMarkovHead(VOCAB, RANK).to(dtype)
        self.confidence = ConfidenceHead(WIDTH, RANK).to(dtype)
        self.prev = torch.randint(VOCAB, (BLOCKS, SLOTS))
        self.labels = torch.randint(VOCAB, (BLOCKS, SLOTS))
        prefix = torch.tensor([5, 0, 1, 3, 5, 2, 4])
        self.supervised = torch.arange(SLOTS) < prefix[:, None]

    def sums(self, rows: slice = slice(None), chunk: int = 1000, **options: object) -> LossSums:
        arguments = {
            "confidence_head": self.confidence, "objective": Objective(), **options
        }  # fmt: skip
        return distill_loss(
            self.hidden[rows],
            self.target_hidden[rows],
            self.prev[rows],
            self.labels[rows],
            self.supervised[rows],
            to_logits=lambda states: states @ self.lm_head.T,
            markov_head=self.markov,
            chunk=chunk,
            **arguments,
        )

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        modules = {"markov": self.markov, "confidence": self.confidence}
        parameters = {"hidden": self.hidden}
        for name, module in modules.items():
            parameters |= {f"{name}.{key}": p for key, p in module.named_parameters()}
        for parameter in parameters.values():
            parameter.grad = None
        loss.backward()
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def in_numpy(case: Case) -> dict[str, np.ndarray]:
    """Per-position sums, slot by slot, straight from the formula in float64."""
    value = {
        name: tensor.detach().double().numpy()
        for name, tensor in (
            ("h", case.hidden),
            ("t", case.target_hidden),
            ("lm", case.lm_head),
            ("w1", case.markov.markov_w1.weight),
            ("w2", case.markov.markov_w2.weight),
            ("c", case.confidence.proj.weight[0]),
            ("b", case.confidence.proj.bias[0]),
        )
    }
    names = ("ce", "l1", "bce", "weight", "count", "acceptance", "confidence")
    sums = {name: np.zeros(SLOTS) for name in names}
    accepted_length = used = 0.0
    for block in range(BLOCKS):
        survival = 1.0
        used += bool(case.supervised[block, 0])
        accepted_length += bool(case.supervised[block, 0])
        for k in range(int(case.supervised[block].sum())):
            embed = value["w1"][case.prev[block, k]]
            q = softmax(value["lm"] @ value["h"][block, k] + value["w2"] @ embed)
            p = softmax(value["lm"] @ value["t"][block, k])
            tv = 0.5 * np.abs(q - p).sum()
            logit = value["c"] @ np.concatenate((value["h"][block, k], embed)) + value["b"]
            sure = 1 / (1 + np.exp(-logit))
            weight = np.exp(-k / 4)
            survival *= 1 - tv
            accepted_length += survival
            sums["ce"][k] -= weight * np.log(q[case.labels[block, k]])
            sums["l1"][k] += weight * 2 * tv
            sums["bce"][k] -= weight * ((1 - tv) * np.log(sure) + tv * np.log(1 - sure))
            sums["weight"][k] += weight
            sums["count"][k] += 1
            sums["acceptance"][k] += 1 - tv
            sums["confidence"][k] += sure
    return {**sums, "accepted_length": np.array(accepted_length), "blocks": np.array(used)}


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["fp64", "fp32"]
)
def test_every_sum_equals_the_formula(dtype: torch.dtype, limit: float) -> None:
    case = Case(dtype)
    reference, sums = in_numpy(case), case.sums()
    for name, expected in reference.items():
        actual = getattr(sums, name).detach().double().numpy()
        np.testing.assert_allclose(actual, expected, rtol=limit, atol=limit, err_msg=name)
    total = reference["weight"].sum()
    expected = 0.1 * reference["ce"].sum() + 0.9 * reference["l1"].sum() + reference["bce"].sum()
    np.testing.assert_allclose(sums.loss().item(), expected / total, rtol=limit)


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
def test_chunks_change_neither_sums_nor_gradients(chunk: int) -> None:
    case = Case()
    whole = case.sums()
    reference = case.gradients(whole.loss())
    parts = case.sums(chunk=chunk)
    for name in ("ce", "l1", "bce", "acceptance"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=0, atol=1e-10)
    gradients = case.gradients(parts.loss())
    assert (
        gradients.keys()
        == reference.keys()
        == {
            "hidden",
            "markov.markov_w1.weight",
            "markov.markov_w2.weight",
            "confidence.proj.weight",
            "confidence.proj.bias",
        }
    )
    for name, gradient in reference.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-10)


def test_no_more_than_a_chunk_of_logits_exists_at_once() -> None:
    """Count what the LM head is asked for: supervised slots only, `chunk` of them at a time."""
    case = Case()
    sizes: list[int] = []

    def to_logits(states: Tensor) -> Tensor:
        sizes.append(states.shape[0])
        return states @ case.lm_head.T

    distill_loss(
        case.hidden,
        case.target_hidden,
        case.prev,
        case.labels,
        case.supervised,
        to_logits=to_logits,
        markov_head=case.markov,
        confidence_head=None,
        objective=Objective(),
        chunk=8,
    )
    assert max(sizes) == 8
    assert sum(sizes) == 2 * int(case.supervised.sum())  # drafter and target, once each


@pytest.mark.parametrize("chunk", [4, 1000])
def test_gradients_of_hidden_states_pass_gradcheck(chunk: int) -> None:
    case = Case()

    def loss(hidden: Tensor) -> Tensor:
        case.hidden = hidden
        # BCE's target 1 - TV is a constant by definition, so finite differences exclude it.
        return case.sums(chunk=chunk, objective=Objective(confidence=0.0)).loss()

    assert torch.autograd.gradcheck(loss, (case.hidden,), atol=1e-6, fast_mode=True)


def test_confidence_target_carries_no_gradient() -> None:
    """d BCE / d logit = sigmoid(c) - (1 - TV), and only the head's inputs carry it back."""
    case = Case()
    sums = case.sums(objective=Objective(ce=0.0, l1=0.0))
    gradients = case.gradients(sums.objective)
    expected = (torch.exp(-torch.arange(SLOTS) / 4.0) * (sums.confidence - sums.acceptance)).sum()
    assert_close(gradients["confidence.proj.bias"][0], expected.detach(), limit=1e-9)
    assert not gradients["markov.markov_w2.weight"].any()  # feeds TV only


def test_one_rank_or_two_or_accumulated_the_loss_is_the_same() -> None:
    """Blocks split [0..2 | 3..6]: sums add up, and so do gradients over the global weight."""
    case = Case()
    whole = case.sums()
    reference = case.gradients(whole.loss())
    total = whole.weight.sum().detach()
    halves = [slice(0, 3), slice(3, BLOCKS)]
    losses = [case.sums(rows).loss(total) for rows in halves]
    torch.testing.assert_close(sum(losses), whole.loss(), rtol=0, atol=1e-12)
    gradients = case.gradients(sum(losses))
    for name, gradient in reference.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-12)
    added = case.sums(halves[0]).detached() + case.sums(halves[1]).detached()
    torch.testing.assert_close(added.acceptance, whole.acceptance, rtol=0, atol=1e-12)
    assert not added.objective.requires_grad


def test_rows_of_one_and_nine_tokens_weigh_by_token_not_by_row() -> None:
    """Per-token losses 2.0 and 1.0 over 1 and 9 tokens give 1.1; a mean of means gives 1.5."""

    def sums(values: list[float]) -> LossSums:
        ce, count, zero = (
            torch.tensor([sum(values)]),
            torch.tensor([float(len(values))]),
            torch.zeros(1),
        )
        others = dict.fromkeys(
            ("nla", "kl", "reverse_kl", "l1", "bce", "acceptance", "confidence"), zero
        )
        return LossSums(
            objective=ce.sum(), normaliser=count.sum(), ce=ce, weight=count, count=count,
            accepted_length=zero.sum(), blocks=zero.sum(), **others,
        )  # fmt: skip

    both = sums([2.0]) + sums([1.0] * 9)
    assert both.loss().item() == pytest.approx(1.1)


@pytest.mark.parametrize("chunk", [2, 1000])
def test_a_batch_with_nothing_supervised_gives_exact_zeros(chunk: int) -> None:
    case = Case(torch.float32)
    case.supervised = torch.zeros_like(case.supervised)
    sums = case.sums(chunk=chunk)
    loss = sums.loss()
    assert loss.item() == 0
    assert sums.accepted_length == sums.blocks == 0
    gradients = case.gradients(loss)
    assert len(gradients) == 5
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_unsupervised_slots_are_never_read() -> None:
    case = Case()
    reference = case.sums()
    off = ~case.supervised
    with torch.no_grad():
        case.hidden[off] = torch.nan
    case.target_hidden[off] = torch.inf
    case.prev[off] = case.labels[off] = 10**6
    sums = case.sums()
    assert torch.equal(sums.ce, reference.ce)
    gradients = case.gradients(sums.loss())
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_first_slot_weighs_most_and_weights_fall() -> None:
    weights = slot_weights(8, 4.0, torch.zeros(1, dtype=torch.float64))
    assert weights[0] == 1
    torch.testing.assert_close(
        weights, torch.exp(-torch.arange(8).double() / 4), rtol=0, atol=1e-15
    )
    assert (weights.diff() < 0).all()


def test_a_perfect_drafter_is_accepted_for_sure() -> None:
    case = Case()
    nn.init.zeros_(case.markov.markov_w2.weight)
    case.target_hidden = case.hidden.detach()
    sums = case.sums()
    assert sums.l1.abs().max() == 0
    assert torch.equal(sums.acceptance, sums.count)
    # 1 + supervised slots per block, over the blocks that have any.
    assert sums.accepted_length.item() == sums.blocks.item() + case.supervised.sum().item()


def test_detached_confidence_leaves_the_backbone_as_without_a_head() -> None:
    case = Case()
    without = case.gradients(case.sums(confidence_head=None).loss())
    detached = case.gradients(case.sums(confidence_detach=True).loss())
    flowing = case.gradients(case.sums().loss())
    shared = ("hidden", "markov.markov_w1.weight", "markov.markov_w2.weight")
    for name in shared:
        assert torch.equal(detached[name], without[name])
    assert not torch.equal(flowing["hidden"], without["hidden"])
    assert "confidence.proj.weight" in detached
    assert "confidence.proj.weight" not in without


def test_halves_are_widened_before_any_softmax() -> None:
    """bf16 inputs: the loss equals the fp32 loss of the same (rounded) logits."""
    case = Case(torch.bfloat16)
    sums = case.sums(confidence_head=None)
    assert sums.ce.dtype == torch.float32
    wide = Case(torch.float64)
    on = case.supervised
    logits = case.hidden @ case.lm_head.T + case.markov.bias(case.markov.embed(case.prev))
    log_q = logits[on].double().log_softmax(-1)
    weight = torch.exp(-torch.arange(SLOTS).double() / 4).expand(BLOCKS, -1)[on]
    expected = -(weight * log_q.gather(-1, case.labels[on][:, None])[:, 0]).sum()
    # The logits of selected slots may round differently from those of all: one bf16 unit.
    assert sums.ce.sum().item() == pytest.approx(expected.item(), rel=5e-3)
    assert wide.sums().ce.dtype == torch.float64


@pytest.mark.oracle
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_gradients_and_diagnostics_equal_nemo(seed: int) -> None:
    nemo = oracles.require("nemo_automodel.components.speculative.dspark.loss")
    common = oracles.require("nemo_automodel.components.speculative.dspark.common")
    case = Case(torch.float32, seed)
    sums = case.sums(chunk=6)
    loss = sums.loss()
    gradient = case.gradients(loss)["hidden"]
    case.hidden.grad = None
    logits = case.hidden @ case.lm_head.T + case.markov.bias(case.markov.embed(case.prev))
    theirs, terms = nemo.compute_dspark_loss(
        outputs=common.DSparkForwardOutput(
            draft_logits=logits[None],
            target_ids=case.labels[None],
            eval_mask=case.supervised[None],
            block_keep_mask=torch.ones(1, BLOCKS, dtype=torch.bool),
            confidence_pred=case.confidence(case.hidden, case.markov.embed(case.prev))[None],
            aligned_target_logits=(case.target_hidden @ case.lm_head.T)[None],
        ),
        loss_decay_gamma=4.0,
        ce_loss_alpha=0.1,
        l1_loss_alpha=0.9,
        confidence_head_alpha=1.0,
        return_terms=True,
    )
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert_close(gradient, case.hidden.grad, limit=1e-5)
    assert_close(sums.acceptance, terms["accept_rate_per_pos_num"], limit=1e-6)
    assert_close(sums.count, terms["accept_rate_per_pos_den"], limit=1e-6)
    ours = (sums.accepted_length / sums.blocks).item()
    assert ours == pytest.approx((terms["tau_num"] / terms["tau_den"]).item(), rel=1e-6)
