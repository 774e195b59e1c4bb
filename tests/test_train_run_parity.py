"""Training and decoding see the same blocks, and the drafter answers the same in both.

A K3 target writes a greedy text. The real decode loop then runs over it with a drafter whose
proposals are replaced by the text itself, so that every round is accepted in full; what each round
looked at is recorded. The same text as a training row must contain every one of those rounds: same
anchor, positions, context, tap rows, labels, and the same drafter logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.distill.batches import Batch, make_batch
from dspark.distill.chat import TrainingRow
from dspark.distill.taps import Features, target_features
from dspark.draft.anchors import Anchors, block_inputs, blocks, sample_anchors
from dspark.draft.config import DraftConfig
from dspark.draft.model import DSparkDrafter
from dspark.runtime import rounds as rounds_of_the_loop
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.k3_target import K3Target
from dspark.runtime.plain import plain_generate
from dspark.runtime.proposal import propose
from dspark.runtime.records import Proposal
from dspark.runtime.sampling import SamplingParams
from tests.k3_tiny import TINY, tiny_model, tiny_tokens
from tests.tolerance import assert_close

BLOCK = 5
NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Round:
    """What one draft pass saw and said: anchor and its position, taps before it, slot logits."""

    anchor: int
    position: int
    taps: Tensor
    logits: Tensor
    proposed: list[int] = field(default_factory=list)


class Recorder:
    """Stands in for `propose`: lets it run, records the block it drafted, proposes the text."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.rounds: list[Round] = []
        self.fed: list[Tensor] = []
        self.hidden = torch.empty(0)

    def watch(self, drafter: DSparkDrafter) -> None:
        """Keep the tap rows that reach the draft context, and the states of the last block."""
        extend, block_hidden = drafter.extend, drafter.block_hidden

        def watched(context: Any, features: Tensor, counts: Any = None) -> None:
            # The prompt comes whole, a round says how many rows of its pass it keeps.
            kept = features if counts is None else features[:, :counts]
            self.fed.append(kept.clone())
            extend(context, features, counts)

        def seen(block_embeds: Tensor, context: Any) -> Tensor:
            self.hidden = block_hidden(block_embeds, context)
            return self.hidden

        drafter.extend = watched  # type: ignore[method-assign]
        drafter.block_hidden = seen  # type: ignore[method-assign]

    def propose(
        self,
        drafter: DSparkDrafter,
        draft_head: DraftHead,
        context: Any,
        anchor: Tensor,
        draft_length: int,
        sampling: SamplingParams,
        generator: torch.Generator,
        *,
        siblings: int,
        rules: None,
        check: bool,
    ) -> Proposal:
        assert siblings == 0
        assert rules is None
        propose(
            drafter, draft_head, context, anchor, draft_length, sampling, generator, check=check
        )
        position = int(context.lengths)
        after = self.text[position : position + drafter.config.block_size]
        prev = torch.tensor([after])
        hidden, head = self.hidden[:, : len(after)], drafter.markov_head
        logits = draft_head.logits(hidden) + head.bias(head.codes(prev, hidden))
        proposed = self.text[position + 1 : position + 1 + draft_length]
        taps = torch.cat(self.fed, 1)[0]
        self.rounds.append(Round(int(anchor), position, taps, logits[0], proposed))
        tokens = torch.tensor([proposed])
        return Proposal(tokens, None, torch.ones(tokens.shape), torch.zeros(tokens.shape))


def make_drafter(target: K3Target, kind: str) -> DSparkDrafter:
    torch.manual_seed(5)
    drafter = DSparkDrafter(
        DraftConfig(
            hidden_size=target.hidden_size,
            num_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            target_layer_ids=(0, 2, 5),
            target_tap_kind=kind,
            mask_token_id=0,
            block_size=BLOCK,
            markov_rank=8,
        )
    )
    with torch.no_grad():  # large enough that a wrong row or position moves the logits
        for parameter in drafter.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(
                0.2 * torch.randn_like(parameter)
            )
    return drafter.eval()


@pytest.fixture(params=["attn_res_mixture", "raw_prefix"])
def setting(request: pytest.FixtureRequest) -> tuple[K3Target, DSparkDrafter, TrainingRow]:
    """Target, drafter, and the row that a greedy answer makes."""
    target = K3Target(tiny_model(), "tiny", (2,))
    prompt = tiny_tokens(1, 7)[0].tolist()
    answer = plain_generate(
        target, prompt, max_new_tokens=NEW_TOKENS, sampling=GREEDY, end_token_ids=()
    ).tokens
    mask = (False,) * len(prompt) + (True,) * len(answer)
    return target, make_drafter(target, request.param), TrainingRow((*prompt, *answer), mask)


@pytest.fixture
def rounds(setting: Any, monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """The rounds of the real loop over that text, every proposal accepted."""
    target, drafter, row = setting
    recorder = Recorder(list(row.ids))
    recorder.watch(drafter)
    monkeypatch.setattr(rounds_of_the_loop, "propose", recorder.propose)
    prompt = list(row.ids[: row.loss_mask.index(True)])
    generation = SpeculativeDecoder(target, drafter).generate(
        prompt,
        max_new_tokens=NEW_TOKENS,
        sampling=GREEDY,
        draft_length=BLOCK,
        end_token_ids=(),
    )
    assert generation.tokens == list(row.ids[len(prompt) :])
    assert all(entry.accepted == entry.drafted for entry in generation.rounds)
    assert len(recorder.rounds) >= NEW_TOKENS // (BLOCK + 1)
    return recorder.rounds


def as_batch(row: TrainingRow, positions: list[int]) -> Batch:
    """The row with exactly these anchors."""
    batch = make_batch([row], [0], anchors=1, seed=0, epoch=0)
    anchors = Anchors(torch.tensor([positions]), torch.ones(1, len(positions), dtype=torch.bool))
    return Batch(batch.row_ids, batch.ids, batch.valid, batch.loss_mask, anchors)


def train_logits(
    target: K3Target, drafter: DSparkDrafter, batch: Batch, features: Features
) -> Tensor:
    """Training's logits [A, G, V], teacher-forced bias included."""
    block = blocks(batch.ids, batch.loss_mask, batch.anchors, BLOCK)
    inputs = block_inputs(block.prev[..., 0], BLOCK, drafter.config.mask_token_id)
    hidden = drafter.train_hidden(
        features.taps,
        batch.valid,
        target.embed(inputs),
        batch.anchors.positions,
        batch.anchors.valid,
    )
    codes = drafter.markov_head.codes(block.prev, hidden)
    return (target.logits(hidden) + drafter.markov_head.bias(codes))[0]


def test_every_round_of_decoding_is_a_block_that_training_can_sample(
    setting: Any, rounds: list[Round]
) -> None:
    _, _, row = setting
    mask = torch.tensor([row.loss_mask])
    possible = sample_anchors(mask, len(row.ids), torch.Generator().manual_seed(0))
    candidates = set(possible.positions[possible.valid].tolist())
    first = row.loss_mask.index(True)
    assert rounds[0].position == first  # the first anchor is the answer's first token
    assert {entry.position for entry in rounds} <= candidates
    # The last prompt token never is an anchor, and neither is a token without a successor.
    assert first - 1 not in candidates
    assert len(row.ids) - 1 not in candidates

    batch = as_batch(row, [entry.position for entry in rounds])
    block = blocks(batch.ids, batch.loss_mask, batch.anchors, BLOCK)
    for at, entry in enumerate(rounds):
        drafted = len(entry.proposed)
        assert block.prev[0, at, 0] == entry.anchor == row.ids[entry.position]
        assert block.labels[0, at, :drafted].tolist() == entry.proposed
        assert bool(block.supervised[0, at, :drafted].all())
        # Row p+k of the target judges the proposal of slot k: rows of the verify pass, in order.
        expected = list(range(entry.position, entry.position + drafted))
        assert block.rows[0, at, :drafted].tolist() == expected


def test_context_and_taps_are_those_before_the_anchor(setting: Any, rounds: list[Round]) -> None:
    target, drafter, row = setting
    features = target_features(target, as_batch(row, [0]), drafter.taps)
    for entry in rounds:
        assert len(entry.taps) == entry.position  # the anchor's own row has not been run yet
        assert_close(entry.taps, features.taps[0, : entry.position], limit=1e-5)


def test_drafter_logits_agree(setting: Any, rounds: list[Round]) -> None:
    target, drafter, row = setting
    batch = as_batch(row, [entry.position for entry in rounds])
    trained = train_logits(target, drafter, batch, target_features(target, batch, drafter.taps))
    for at, entry in enumerate(rounds):
        slots = len(entry.logits)
        assert_close(entry.logits, trained[at, :slots], limit=1e-5, what=f"round {at}")


def test_agreement_is_not_vacuous(setting: Any, rounds: list[Round]) -> None:
    """One position off, one tap row too many, or taps in another order are all seen."""
    target, drafter, row = setting
    positions = [entry.position for entry in rounds]
    batch = as_batch(row, positions)
    features = target_features(target, batch, drafter.taps)
    right = train_logits(target, drafter, batch, features)
    width = target.hidden_size
    swapped = torch.cat(
        [features.taps[..., width : 2 * width], features.taps[..., :width],
         features.taps[..., 2 * width :]], -1,
    )  # fmt: skip
    late = torch.roll(features.taps, 1, dims=1)
    for wrong in (swapped, late):
        other = train_logits(target, drafter, batch, Features(wrong, features.hidden))
        assert (other - right).abs().max() > 1e-2 * right.abs().max()


def test_blocks_ignore_target_states_the_runtime_would_not_have(
    setting: Any, rounds: list[Round]
) -> None:
    """Anchors closer than a block: changing states from an anchor on leaves its block bit-equal."""
    target, drafter, row = setting
    batch = as_batch(row, [10, 13])
    features = target_features(target, batch, drafter.taps)
    right = train_logits(target, drafter, batch, features)
    for at, anchor in enumerate((10, 13)):
        changed = features.taps.clone()
        changed[:, anchor:] = torch.randn_like(changed[:, anchor:])
        other = train_logits(target, drafter, batch, Features(changed, features.hidden))
        assert torch.equal(other[at], right[at])
        changed[:, anchor - 1] += 1.0
        other = train_logits(target, drafter, batch, Features(changed, features.hidden))
        assert not torch.equal(other[at], right[at])


def test_online_features_are_what_the_target_itself_uses() -> None:
    """Batched and padded, the post-norm state gives the logits of each row run alone."""
    target = K3Target(tiny_model(), "tiny", (2,))
    data = [
        TrainingRow(tuple(tiny_tokens(1, length, seed=length)[0].tolist()), (True,) * length)
        for length in (19, 11, 6)
    ]
    batch = make_batch(data, [0, 1, 2], anchors=2, seed=0, epoch=0)
    features = target_features(target, batch, make_drafter(target, "raw_prefix").taps)
    assert features.taps.shape == (3, 19, 3 * TINY.hidden_size)
    for at, row in enumerate(data):
        ids = torch.tensor([row.ids])
        output = target.forward(ids, target.new_cache(1, 32), commit=True)
        own = target.logits(features.hidden[at, : len(row.ids)])
        assert_close(own, target.logits(output.hidden)[0], limit=1e-5)
        assert features.hidden[at, len(row.ids) :].abs().sum() == 0
