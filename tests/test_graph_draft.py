"""The draft of a frame, alone: every head against its formula, its draws against their numbers.

A toy target, contexts of different lengths side by side, and seats with different anchors. What is
drawn is held against the float64 distribution function of logits written from the formulas of the
heads (`hand_logits`), at the uniforms that the seed and the place give.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark import ops
from dspark.draft.anchors import block_inputs
from dspark.draft.config import MARKOV_HEAD_TYPES
from dspark.draft.vocabulary import reduce_vocabulary
from dspark.k3.storage import PrivateStorage
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.graph_draft import Drafting
from dspark.runtime.graph_seats import Chances, GraphSeats
from dspark.runtime.sampling import SamplingParams
from dspark_kernels.law import probs_of
from tests.draft_vocabulary_setup import IDS, hand_logits, toy_drafter
from tests.laws import reference
from tests.toy_target import ToyTarget

LENGTHS, ANCHORS = (4, 1, 6), (9, 40, 12)
GREEDY = SamplingParams()
SETTINGS = [GREEDY, SamplingParams(1.0), SamplingParams(0.7, 0.9), SamplingParams(1.3, 1.0, 3)]
HEADS = pytest.mark.parametrize("kind", MARKOV_HEAD_TYPES)


def drafting(kind: str, reduced: bool, target: ToyTarget) -> Drafting:
    """Three seats, LENGTHS behind them; gates that open and shut, confidences of all sizes."""
    drafter = toy_drafter(target, kind)
    if reduced:
        drafter = reduce_vocabulary(drafter, IDS)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "gate_proj" in name or "joint_proj" in name or "confidence" in name:
                parameter.normal_(0, 0.3)
    context = drafter.new_context(len(LENGTHS), 32, PrivateStorage())
    context.fix_shapes(in_place=True)
    tokens = torch.arange(18).view(3, 6) + 5
    out = target.forward(tokens, target.new_cache(3, 32), taps=drafter.taps, commit=True)
    assert out.taps is not None
    drafter.extend(context, out.taps, torch.tensor(LENGTHS))
    return Drafting(drafter, DraftHead(target, drafter.draft_ids), context)


def seats_for(target: ToyTarget, seed: int = 0) -> GraphSeats:
    seats = GraphSeats(len(ANCHORS), target.vocab_size, target.device, 4)
    for seat, anchor in enumerate(ANCHORS):
        seats.join(seat, torch.tensor([anchor]), 9, (), seed, seat)
    return seats


def states(made: Drafting, seats: GraphSeats) -> Tensor:
    """[B, G, D] of the block pass."""
    config = made.drafter.config
    block = block_inputs(seats.anchor, config.block_size, config.mask_token_id)
    return made.drafter.block_hidden(made.head.embed(block), made.context)


def formula(made: Drafting, head: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
    """[B, G, V'] float64 logits given the tokens before each slot [B, G]."""
    return torch.stack(
        [
            torch.stack(hand_logits(made.drafter, head, h, text))
            for h, text in zip(hidden, before.tolist(), strict=True)
        ]
    )


@HEADS
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("length", [1, 4])
@torch.inference_mode()
def test_scores_and_draws_are_those_of_the_formula(kind: str, reduced: bool, length: int) -> None:
    target = ToyTarget()
    made = drafting(kind, reduced, target)
    ids = IDS if reduced else torch.arange(target.vocab_size)
    for setting in SETTINGS:
        for seed in range(4):
            seats = seats_for(target, seed)
            hidden = states(made, seats)[:, :length]
            chances = Chances(setting, len(ANCHORS), target.device)
            found = made.propose(seats, length, chances)
            before = torch.cat((seats.anchor[:, None], found.tokens[:, :-1]), 1)
            logits = formula(made, target.weights["head"], hidden, before)
            near = {"rtol": 1e-5, "atol": 1e-4}
            torch.testing.assert_close(found.scores.double(), logits, **near)
            torch.testing.assert_close(found.peak.double(), logits.amax(-1), **near)
            q = logits.softmax(-1)
            entropy = -(q * logits.log_softmax(-1)).sum(-1)
            torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=1e-3)
            coins = ops.uniform(seats.seed, torch.tensor(LENGTHS), ops.DRAFT_STREAM, 4)
            held(found, logits, setting, coins, ids)


def held(
    found: ops.Drafted, logits: Tensor, setting: SamplingParams, coins: Tensor, ids: Tensor
) -> None:
    """Tokens and laws of a draft against float64 logits and the uniforms of its slots."""
    for b, k in np.ndindex(*found.tokens.shape):
        token = int((ids == found.tokens[b, k]).nonzero())
        if setting.greedy:
            assert token == int(logits[b, k].argmax())
            continue
        law = reference(logits[b, k], setting)
        law_of_row = type(found.law)(*(part[b, k] for part in found.law))
        said = probs_of(found.scores[b, k], law_of_row, torch.tensor(setting.temperature))
        np.testing.assert_allclose(said.numpy(), law, rtol=0, atol=1e-4)
        upto = law.cumsum()
        assert upto[token] - law[token] - 1e-4 <= float(coins[b, k]) <= upto[token] + 1e-4


@HEADS
@torch.inference_mode()
def test_codes_of_the_walk_are_those_of_training(kind: str) -> None:
    """Under teacher forcing on the tokens that were drawn: scores less the LM head's logits."""
    target = ToyTarget()
    made = drafting(kind, False, target)
    seats = seats_for(target)
    hidden = states(made, seats)
    found = made.propose(seats, 4, Chances(SamplingParams(1.0), len(ANCHORS), target.device))
    before = torch.cat((seats.anchor[:, None], found.tokens[:, :-1]), 1)
    head = made.drafter.markov_head
    bias = head.bias(head.codes(before, hidden))
    torch.testing.assert_close(found.scores - made.head.logits(hidden), bias, rtol=0, atol=1e-4)


@HEADS
@pytest.mark.parametrize("reduced", [False, True])
@torch.inference_mode()
def test_confidence_reads_the_token_before_and_not_the_code(kind: str, reduced: bool) -> None:
    target = ToyTarget()
    made = drafting(kind, reduced, target)
    seats = seats_for(target)
    hidden = states(made, seats)
    found = made.propose(seats, 4, Chances(SamplingParams(1.0), len(ANCHORS), target.device))
    assert found.confidence is not None
    before = torch.cat((seats.anchor[:, None], found.tokens[:, :-1]), 1)
    embed = made.drafter.markov_head.markov_w1.weight.double()[before]
    trust = made.drafter.confidence_head
    assert trust is not None
    inputs = torch.cat((hidden.double(), embed), -1)
    wanted = inputs @ trust.proj.weight.double()[0] + trust.proj.bias.double()
    torch.testing.assert_close(found.confidence.double(), wanted, rtol=1e-5, atol=1e-5)


@HEADS
@torch.inference_mode()
def test_a_drafter_without_confidence_says_none(kind: str) -> None:
    target = ToyTarget()
    made = drafting(kind, False, target)
    made.drafter.confidence_head = None
    chances = Chances(GREEDY, len(ANCHORS), target.device)
    assert made.propose(seats_for(target), 4, chances).confidence is None


@HEADS
@torch.inference_mode()
def test_a_draft_is_the_same_in_any_batch(kind: str) -> None:
    """A seat's block depends on its own text alone, and the context is left as it was."""
    target = ToyTarget()
    made = drafting(kind, False, target)
    seats, chances = seats_for(target), Chances(SamplingParams(1.0), len(ANCHORS), target.device)
    first = made.propose(seats, 4, chances)
    again = made.propose(seats, 4, chances)
    assert torch.equal(first.tokens, again.tokens)
    seats.anchor[1] = 50
    other = made.propose(seats, 4, chances)
    assert torch.equal(first.tokens[[0, 2]], other.tokens[[0, 2]])
    assert not torch.equal(first.scores[1], other.scores[1])


@HEADS
@torch.inference_mode()
def test_what_the_formulas_say_shows(kind: str) -> None:
    """Without gate or memory, slots behind the first would have other scores by far."""
    target = ToyTarget()
    made = drafting(kind, False, target)
    hidden = states(made, seats_for(target))
    head, prev = made.drafter.markov_head, torch.randint(64, (3, 4))
    codes = head.codes(prev, hidden)
    alone = head.codes(prev[:, 3:], hidden[:, 3:])  # the last slot as if it were the first
    remembers = (head.bias(codes[:, 3:]) - head.bias(alone)).abs().amax() > 0.1
    gated = (head.bias(codes) - head.bias(head.embed(prev))).abs().amax() > 0.1
    assert (bool(gated), bool(remembers)) == (kind != "vanilla", kind == "rnn")
