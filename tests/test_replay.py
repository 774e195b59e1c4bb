"""Replayed policies: token counts by hand, and equality with real rounds where that is exact."""

from __future__ import annotations

import pytest
import torch

from dspark.runtime.cost_model import BatchCosts, CostModel, curve
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.policies import (
    Auto,
    Bands,
    Confidence,
    Delayed,
    Entropy,
    Fixed,
    Policy,
    Throughput,
)
from dspark.runtime.policies.auto import RunningTime, Times
from dspark.runtime.policies.fitting import fit_stops
from dspark.runtime.policies.replay import Blocks, best, replay, sweep, whole_blocks
from dspark.runtime.records import CORRECTED, RoundRecord
from dspark.runtime.sampling import SamplingParams
from tests.table_target import TableDrafter, TableTarget

COST = CostModel(
    (BatchCosts(1, 10, {1: 1.0, 4: 2.0}, curve([10.0, 11, 12, 13, 14]), 0.0),), "", "", 1,
    {"device_name": "a machine"},
)  # fmt: skip


def record(k: int, a: int, confidence: float = 0.5, emitted: int | None = None) -> RoundRecord:
    tokens = a + 1 if emitted is None else emitted
    verified = k if emitted is None else a
    return RoundRecord(
        k, verified, a, tokens, CORRECTED, 0, 0, 0, (confidence,) * k, (2 * confidence,) * k
    )


def test_tokens_of_a_shorter_cut_by_hand():
    """Accepted 0, 2, 4 of 4, and 3 ending the text there. Cut at 2: 1 + 3 + 3 + 3 tokens, 6 of 8
    accepted; at 4: 1 + 3 + 5 + 3 tokens, 9 of 15: nobody judges what follows an end token."""
    first, second = [record(4, 0), record(4, 2)], [record(4, 4), record(4, 3, emitted=3)]
    blocks = whole_blocks([first, second], 4)
    assert blocks.prompt.tolist() == [0, 0, 1, 1]
    two = replay(Fixed(2), blocks, COST)
    assert two.accepted_length == 10 / 4
    assert two.acceptance_rate == 6 / 8
    assert (two.drafted, two.verified, two.rows) == (2, 2, 3)
    assert two.tokens_per_s == pytest.approx(10 / (4 * (1 + 1 / 3 + 12)))
    three = replay(Fixed(3), blocks, COST)  # 1 + 3 + 4 + 3: an end token has no bonus after it
    assert three.accepted_length == 11 / 4
    four = replay(Fixed(4), blocks, COST)
    assert four.accepted_length == 12 / 4
    assert four.acceptance_rate == 9 / 15
    assert four.tokens_per_s == pytest.approx(12 / (4 * 16))


def test_rounds_that_say_less_are_left_out():
    kept = whole_blocks([[record(4, 1), record(3, 3), record(0, 0)]], 4)
    assert len(kept) == 1
    with pytest.raises(ValueError, match="whole block of 5"):
        whole_blocks([[record(4, 1)]], 5)
    with pytest.raises(ValueError, match="siblings"):
        replay(Bands(Fixed()), kept, COST)
    assert replay(Bands(Fixed(), count=0), kept, COST).rounds == 1


def stream(seed: int, n: int = 300, prompts: int = 6) -> Blocks:
    """Confidences that mean what they say, of two kinds of text."""
    generator = torch.Generator().manual_seed(seed)
    easy = torch.rand(n, 1, generator=generator) < 0.5
    noise = torch.rand(n, 4, generator=generator)
    confidence = torch.where(easy, 0.9 + 0.1 * noise, 0.2 + 0.4 * noise)
    hit = torch.rand(n, 4, generator=generator) < confidence
    accepted = hit.long().cumprod(1).sum(1)
    full = torch.full((n,), 4)
    prompt = torch.arange(n) * prompts // n
    return Blocks(confidence, 2 * (1 - confidence), accepted, full, accepted + 1, prompt)


def test_policies_alone_and_together_replay_alike():
    """Row-wise policies see all rounds at once; one round after the other gives the same."""
    blocks = stream(0)
    for policy in (Entropy(h_stop=0.7), Confidence(s_stop=0.4), Fixed(3)):

        class Slowly:
            """The same policy, which the replay does not recognise."""

            def __init__(self, inner: Policy) -> None:
                self.inner = inner
                self.siblings, self.name = 0, "slowly"

            def __getattr__(self, name: str) -> object:
                return getattr(self.inner, name)

            def fresh(self) -> Policy:
                return self.inner.fresh()

        assert replay(Slowly(policy), blocks, COST) == replay(policy, blocks, COST)  # type: ignore[arg-type]


def test_thresholds_are_the_best_of_the_grid_and_beat_every_constant_length():
    """On text of two kinds a length that follows the confidence is worth more than any constant."""
    blocks = stream(1)
    stops = fit_stops(blocks, COST)
    fixed = {g: replay(Fixed(g), blocks, COST).tokens_per_s for g in range(1, 5)}
    assert stops.draft_length == max(fixed, key=fixed.__getitem__)
    assert stops.tokens_per_s["fixed"] == max(fixed.values())
    chosen = replay(Confidence(s_stop=stops.s_stop or 0.0), blocks, COST)
    assert chosen.tokens_per_s == stops.tokens_per_s["confidence"]
    for threshold in (0.0, 0.2, 0.5, 0.7, 0.9):
        other = replay(Confidence(s_stop=threshold), blocks, COST)
        assert other.tokens_per_s <= chosen.tokens_per_s
    assert stops.tokens_per_s["confidence"] > stops.tokens_per_s["fixed"]
    assert stops.tokens_per_s["throughput"] > stops.tokens_per_s["fixed"]
    assert stops.measured_on == "a machine"
    assert set(stops.tokens_per_s) >= {"throughput-delayed", "plain", "entropy"}
    silent = fit_stops(Blocks(None, blocks.entropy, *_counts(blocks)), COST)
    assert silent.s_stop is None
    assert set(silent.tokens_per_s) == {"plain", "fixed", "entropy"}


def _counts(blocks: Blocks) -> tuple[torch.Tensor, ...]:
    return blocks.accepted, blocks.verified, blocks.emitted, blocks.prompt


def test_a_sweep_trades_accepted_length_for_acceptance():
    """Monotone by construction: a higher threshold cuts no later, round by round."""
    points = sweep(lambda s: Confidence(s_stop=s), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), stream(2), COST)
    lengths = [point.replay.accepted_length for point in points]
    verified = [point.replay.verified for point in points]
    rates = [point.replay.acceptance_rate for point in points]
    assert lengths == sorted(lengths, reverse=True)
    assert verified == sorted(verified, reverse=True)
    # half of the text is hard: cutting there saves what is rejected most
    assert rates[0] < 0.6 < 0.7 < rates[1]  # type: ignore[operator]
    assert best(points).replay.tokens_per_s == max(point.replay.tokens_per_s for point in points)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Throughput(cost=COST),
        lambda: Delayed(COST),
        lambda: Auto(Confidence(s_stop=0.4), times=Times(RunningTime(10.0), RunningTime(14.0))),
    ],
    ids=["throughput", "delayed", "auto"],
)
def test_policies_that_learn_start_anew_with_each_prompt(make):
    blocks = stream(3, n=60, prompts=3)
    whole = replay(make(), blocks, COST)
    parts = []
    for prompt in range(3):
        rows = blocks.prompt == prompt
        assert blocks.confidence is not None
        columns = (blocks.accepted, blocks.verified, blocks.emitted, blocks.prompt)
        part = Blocks(blocks.confidence[rows], blocks.entropy[rows], *(c[rows] for c in columns))
        parts.append(replay(make(), part, COST))
    assert whole.accepted_length * 60 == pytest.approx(
        sum(part.accepted_length * part.rounds for part in parts)
    )


def test_a_replayed_cut_is_what_a_run_would_have_done_with_its_first_round():
    """First rounds start alike whatever the policy: there the model is exact, token for token."""
    target = TableTarget.random(7, seed=3)
    drafter = TableDrafter.of(target, 4, 0.6, seed=4)
    decoder = SpeculativeDecoder(target, drafter)
    greedy = SamplingParams()
    prompts = [[a, b] for a in range(6) for b in range(6)]

    def first(prompt: list[int], policy: Policy) -> RoundRecord:
        made = decoder.generate(prompt, max_new_tokens=12, sampling=greedy, policy=policy)
        return made.rounds[0]

    blocks = whole_blocks([[first(prompt, Fixed())] for prompt in prompts], 4)
    for policy in (Confidence(s_stop=0.3), Entropy(h_stop=1.2), Fixed(2)):
        real = [first(prompt, policy) for prompt in prompts]
        model = replay(policy, blocks, COST)
        assert model.accepted_length == sum(r.emitted for r in real) / len(real)
        assert model.verified == sum(r.verified for r in real) / len(real)
        assert model.acceptance_rate == sum(r.accepted for r in real) / sum(
            r.verified for r in real
        )
