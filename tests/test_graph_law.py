"""Recorded frames whose size depends on what was drafted: every text has the target's own law."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from dspark.runtime.cost_model import BatchCosts, CostModel
from dspark.runtime.graph_decode import GraphDecoder
from dspark.runtime.graph_prompts import PromptReader
from dspark.runtime.graph_sizes import SizeRule, frame_sizes, size_rule
from dspark.runtime.k3_target import K3Target
from dspark.runtime.policies import Auto, AutoSettings, Delayed, Fixed
from dspark.runtime.records import RoundRecord
from dspark.runtime.requests import Outcome, Request
from dspark.runtime.sampling import SamplingParams
from dspark_eval.fidelity import collect, judge
from tests.k3_tiny import tiny_model
from tests.test_graph_decode import BLOCK, DRAFTERS, PROMPTS, SMALL
from tests.tiny_drafters import make_drafter

SEATS = 4


class ByLetter:
    """Sizes that hang on every token of the newest letter, rejected and unsent ones included."""

    def __init__(self) -> None:
        self.size = BLOCK

    def join(self, seat: int) -> None:
        """Goes on as it is."""

    def next(self, seats: Sequence[int]) -> int:
        return self.size

    def learn(self, said: Mapping[int, Outcome]) -> None:
        for x in list(said.values())[:1]:
            self.size = (0, 1, 2, BLOCK)[int(1e4 * sum(x.entropy) + x.next_token) % 4]

    def observe(self, record: RoundRecord) -> None:
        """The letter has told enough."""


def by_letter(seats: int, block: int) -> SizeRule:
    """The same whatever the seats."""
    return ByLetter()


RATES = CostModel(
    (BatchCosts(1, 1.0, {1: 0.1, 8: 0.1}, {n: 0.75 + 0.25 * n for n in range(1, 10)}, 0.0),),
    "t",
    "d",
    0,
)
"""0, 1 or 2 is the fastest after a draft of a random drafter, by what the draft was."""


def by_rate(seats: int, block: int) -> SizeRule:
    """Sizes of `auto` that go by the newest draft of each seat alone."""
    policy = Auto(Delayed(RATES, weight=1.0, limits=(1, None)), AutoSettings(pause=1))
    return size_rule(policy, frame_sizes(policy, block), seats, block)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "kind"),
    [(by_letter, "kda"), (by_rate, "kda"), (by_letter, "rnn")],
    ids=["by letter", "by rate", "by letter, rnn"],
)
def test_frames_of_changing_size_keep_the_targets_law(
    rule: Callable[[int, int], SizeRule], kind: str
) -> None:
    """Every text held against the target's own law, token by token; a false alarm once in 1,000
    seeds. The same texts, held against a law that is a little warmer, are found out."""
    target, drafter = K3Target(tiny_model(SMALL), "tiny", ()), make_drafter(DRAFTERS[kind])
    sampling = SamplingParams(temperature=1.0)
    decoder = GraphDecoder(
        target,
        drafter,
        seats=SEATS,
        max_length=20,
        sampling=sampling,
        reader=PromptReader(target, drafter, remembers=True),
        policy=Auto(Fixed(BLOCK)),
    )
    decoder.rule = rule(SEATS, BLOCK)
    asked = [Request(PROMPTS[0], 12, index=i, end_token_ids=()) for i in range(600)]
    texts = [(PROMPTS[0], g.tokens) for g in decoder.generate_many(asked)]
    shares = [decoder.frame_sizes.count(size) / len(decoder.frame_sizes) for size in decoder.sizes]
    assert decoder.sizes == (0, 1, 2, BLOCK)
    assert sorted(shares)[1] > 0.04, "three sizes at least"
    found = judge(collect(target, texts, sampling, seed=0), sampling, tests=2)
    assert (found["tokens"], found["passed"]) == (7200, True)
    warmer = SamplingParams(temperature=1.15)
    assert judge(collect(target, texts, warmer, seed=0), warmer, tests=2)["passed"] is False
