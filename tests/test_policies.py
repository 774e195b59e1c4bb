"""Policies: what they may know, decisions computed by hand, allocation against brute force."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.cost_model import BatchCosts, CostModel, curve
from dspark.runtime.policies import (
    Auto,
    Bands,
    Confidence,
    Delayed,
    Entropy,
    Fixed,
    Frontier,
    Policy,
    Throughput,
    band_names,
    plan_block,
)
from dspark.runtime.records import Plan, Proposal, RoundRecord


def proposal(confidence: Tensor | None, entropy: Tensor | None = None) -> Proposal:
    """A block whose tokens are their own position: nothing here may depend on them."""
    shape = confidence if confidence is not None else entropy
    assert shape is not None
    tokens = torch.arange(shape.shape[1]).expand(shape.shape)
    return Proposal(
        tokens, None, confidence, torch.ones_like(shape) if entropy is None else entropy
    )


def rows(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values)


def cost(base: float = 10.0, row: float = 1.0, batch: int = 1, longest: int = 30) -> CostModel:
    """A round of n rows per request takes base + row * n * batch seconds; drafting is free."""
    verify = curve([base + row * n * batch for n in range(1, longest + 1)])
    return CostModel(
        (BatchCosts(batch, base + row * batch, {1: 0.0, 8: 0.0}, verify, 0.0),), "", "", 1
    )


def cut(policy: Policy, block: Proposal, limits: list[int] | None = None) -> list[int]:
    bounds = None if limits is None else torch.tensor(limits)
    return plan_block(policy, block, bounds).lengths.tolist()


def record(confidence: Sequence[float], accepted: int = 0) -> RoundRecord:
    k = len(confidence)
    entropy = (1.0,) * k
    return RoundRecord(k, k, accepted, accepted + 1, 2, 0.0, 1.0, 0.0, tuple(confidence), entropy)


EVERY: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(5),
    "entropy": lambda: Entropy(h_stop=1.0),
    "confidence": lambda: Confidence(s_stop=0.4),
    "throughput": lambda: Throughput(cost=cost(4, 1)),
    "throughput-packed": lambda: Throughput(cost=cost(4, 1), packed=True),
    "throughput-delayed": lambda: Delayed(cost(4, 1), start=(0.9,) * 8),
    "auto": lambda: Auto(Confidence(s_stop=0.4)),
    "bands": lambda: Bands(Confidence(s_stop=0.2), high=0.8, low=0.4),
    "bands-throughput": lambda: Bands(Throughput(cost=cost(4, 1)), high=0.8, low=0.4),
    "bands-fixed": lambda: Bands(Fixed()),
}
TOGETHER = ("throughput", "throughput-packed", "bands-throughput")
"""Those that decide about the rows of a batch together: only one alone goes by its own features."""
every_policy = pytest.mark.parametrize("name", EVERY)


# -- what a policy may know ------------------------------------------------------------------------


class Nosy:
    """Looks at everything that a frontier holds, position after position."""

    name, siblings, needs_confidence = "nosy", 0, True

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.other: list[object] = []

    def plan(self, frontier: Frontier) -> None:
        for _ in range(frontier.slots):
            held = {**vars(frontier), "confidence": frontier.confidence, "width": frontier.width}
            self.seen.append({k: v for k, v in held.items() if isinstance(v, Tensor)})
            self.other = [v for v in held.values() if not isinstance(v, Tensor)]
            frontier.extend(frontier.open)


def test_a_frontier_holds_the_features_of_one_position_and_no_tokens():
    """Every tensor on it is [B]; what is not a tensor is a number or a function."""
    confidence = 0.1 * torch.arange(8).view(1, 8) + 0.1
    entropy = 10.0 * confidence
    nosy = Nosy()
    plan_block(nosy, proposal(confidence, entropy))  # type: ignore[arg-type]
    assert len(nosy.seen) == 8
    for k, seen in enumerate(nosy.seen):
        assert {tuple(value.shape) for value in seen.values()} == {(1,)}
        assert seen["confidence"].item() == confidence[0, k]
        assert seen["entropy"].item() == entropy[0, k]
        later = set(confidence[0, k + 1 :].tolist() + entropy[0, k + 1 :].tolist())
        assert later.isdisjoint(
            {value.item() for value in seen.values() if value.is_floating_point()}
        )
    assert all(isinstance(v, int | list) or callable(v) for v in nosy.other)


def test_the_types_offer_a_policy_no_proposal():
    for name in ("plan", "observe", "draft_length"):
        given_types = str(inspect.signature(getattr(Policy, name)))
        assert "Proposal" not in given_types
        assert "Tensor" not in given_types
    public = {name for name in dir(Frontier) if not name.startswith("_")}
    assert public == {"confidence", "decided", "extend", "extend_unseen", "width"}


@pytest.mark.parametrize("name", [name for name in EVERY if name not in TOGETHER])
def test_later_features_never_change_an_earlier_decision(name):
    """Whatever stands behind position k, permuted or replaced, positions up to k stay decided.

    A row cut at L has decided on positions 1..L and against L + 1: the same as long as those
    features are. One row of the three is left as it was: it may not change at all.
    """
    generator = torch.Generator().manual_seed(5)
    for trial in range(60):
        confidence = torch.rand(3, 8, generator=generator) ** 0.3
        entropy = 2 * torch.rand(3, 8, generator=generator)
        before = plan_block(EVERY[name](), proposal(confidence, entropy))
        k = 1 + trial % 7
        shuffle = torch.cat((torch.arange(k), k + torch.randperm(8 - k, generator=generator)))
        if trial % 2:
            changed = confidence[:, shuffle], entropy[:, shuffle]
        else:
            new = torch.rand(3, 8, generator=generator)
            behind = torch.arange(8) >= k
            changed = (
                torch.where(behind, new, confidence),
                torch.where(behind, 2 * new, entropy),
            )
        after = plan_block(EVERY[name](), proposal(*changed))
        assert torch.equal(before.lengths.clamp(max=k), after.lengths.clamp(max=k))
        assert torch.equal(before.siblings[:, :k], after.siblings[:, :k])


@pytest.mark.parametrize("name", TOGETHER)
def test_later_features_never_change_an_earlier_decision_of_a_batch(name):
    """In the order in which positions are decided: the decisions before the change are the same.

    A row alone is a function of its own features. In a batch, a changed c_k+1 of one row may change
    what others do afterwards, never whether that row's k is verified.
    """
    generator = torch.Generator().manual_seed(6)
    for trial in range(100):
        confidence = torch.rand(1 + 2 * (trial % 2), 8, generator=generator) ** 0.3
        before = plan_block(EVERY[name](), proposal(confidence)).lengths
        row, k = trial % confidence.shape[0], 2 + trial % 6
        changed = confidence.clone()
        changed[row, k:] = torch.rand(8 - k, generator=generator)
        after = plan_block(EVERY[name](), proposal(changed)).lengths
        assert (before[row] >= k) == (after[row] >= k)
        if before[row] < k:  # the changed features were never shown
            assert torch.equal(before, after)


def test_a_policy_that_reads_confidence_says_so_to_a_drafter_without_a_head():
    block = proposal(None, torch.zeros(1, 4))
    with pytest.raises(UserError, match="no confidence head"):
        plan_block(Confidence(), block)
    assert cut(Entropy(), block) == [4]
    assert cut(Fixed(3), block) == [3]
    assert {name for name, make in EVERY.items() if not make().needs_confidence} == {
        "fixed",
        "entropy",
    }


# -- decisions by hand -----------------------------------------------------------------------------


def test_confidence_stops_where_the_product_falls_below_the_threshold():
    """0.9, 0.81, 0.729, ... >= 0.6 for four positions; 1, 1, 0.5 for two and, at 0.5, for all."""
    block = proposal(rows([0.9] * 8, [1, 1, 0.5, 1, 1, 1, 1, 1]))
    assert cut(Confidence(s_stop=0.6), block) == [4, 2]
    assert cut(Confidence(s_stop=0.5), block) == [6, 8]
    assert cut(Confidence(s_stop=0.0), block) == [8, 8]
    assert cut(Confidence(s_stop=1.0, min_draft=0), block) == [0, 2]


def test_a_row_that_has_stopped_does_not_start_again():
    """The second position is below the mean that is asked for, the later mean is not."""
    block = proposal(None, rows([0.0, 3.0, 0.0, 0.0]))
    assert cut(Entropy(h_stop=1.0, min_draft=1), block) == [1]
    assert cut(Entropy(h_stop=1.0, min_draft=2), block) == [4]  # mean of three: 1.0


def test_entropy_is_a_running_mean_in_nats():
    """Means 0.5, 0.5, 1, 1.25 against 1: three; against 0.5: two; the floor is min_draft."""
    block = proposal(None, rows([0.5, 0.5, 2.0, 2.0, 9.0]))
    assert cut(Entropy(h_stop=1.0), block) == [3]
    assert cut(Entropy(h_stop=0.5), block) == [2]
    assert cut(Entropy(h_stop=0.0, min_draft=4), block) == [4]


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("fixed", "bands-fixed")])
def test_bounds_hold_whatever_the_rule_says(name):
    sure, lost = proposal(torch.ones(1, 8), torch.zeros(1, 8)), torch.full((1, 8), 1e-6)
    hopeless = proposal(lost, torch.full((1, 8), 50.0))
    if name == "throughput-delayed":
        policy = EVERY[name]()
        policy.observe(record([1e-6] * 8))
        for _ in range(60):
            policy.observe(record([1e-6] * 8))
        assert cut(policy, hopeless) == [2]
        return
    assert cut(EVERY[name](), sure) == [8]
    assert cut(EVERY[name](), hopeless) == [2]


def test_max_draft_is_eight_or_the_block_and_what_is_asked_for():
    assert [Confidence().draft_length(block) for block in (4, 7, 8, 16)] == [4, 7, 8, 8]
    assert Confidence(max_draft=3).draft_length(16) == 3
    sure = proposal(torch.ones(1, 8))
    assert cut(Confidence(max_draft=3), sure) == [3]
    assert cut(Throughput(cost=cost(), max_draft=3), sure) == [3]
    assert cut(Throughput(cost=cost(), max_draft=3, packed=True), sure) == [3]
    assert Fixed().draft_length(7) == 7
    with pytest.raises(UserError, match="max_draft"):
        Confidence(min_draft=4, max_draft=3)
    with pytest.raises(UserError, match="min_draft"):
        Entropy(min_draft=-1)


@every_policy
def test_limits_of_rows_hold_and_an_idle_row_gets_nothing(name):
    block = proposal(torch.ones(4, 8), torch.zeros(4, 8))
    lengths = cut(EVERY[name](), block, [8, 1, 0, 3])
    assert all(length <= limit for length, limit in zip(lengths, [8, 1, 0, 3], strict=True))
    assert lengths[1:] == [1, 0, 3]


@every_policy
def test_an_empty_proposal_is_an_empty_plan(name):
    plan = plan_block(EVERY[name](), proposal(torch.ones(2, 0)))
    assert plan.lengths.tolist() == [0, 0]
    assert plan.siblings.shape == (2, 0)


@pytest.mark.parametrize("name", ["fixed", "entropy", "confidence", "bands", "bands-fixed"])
def test_rows_of_different_lengths_are_cut_as_each_is_alone(name):
    """One row wants 8, another 2: neither changes what the other gets."""
    confidence = torch.stack((torch.full((8,), 0.99), torch.full((8,), 0.05), torch.rand(8)))
    entropy = torch.stack((torch.full((8,), 0.01), torch.full((8,), 4.0), torch.rand(8)))
    together = plan_block(EVERY[name](), proposal(confidence, entropy))
    for row in range(3):
        alone = plan_block(
            EVERY[name](), proposal(confidence[row : row + 1], entropy[row : row + 1])
        )
        assert alone.lengths[0] == together.lengths[row]
        assert torch.equal(alone.siblings[0], together.siblings[row])
    if name in ("entropy", "confidence"):
        assert together.lengths[:2].tolist() == [8, 2]


# -- bands -----------------------------------------------------------------------------------------


def test_bands_by_hand():
    """High 0.95: alone. Mid 0.5: two siblings. Low 0.2: kept at 2, where min_draft says so, with
    siblings as any position that is not high; at 5 it is the end."""
    block = proposal(rows([0.95, 0.2, 0.5, 0.95, 0.2, 0.99, 0.99, 0.99]))
    plan = plan_block(Bands(Fixed()), block)
    assert plan.lengths.tolist() == [4]
    assert plan.siblings.tolist() == [[0, 2, 2, 0, 0, 0, 0, 0]]
    assert band_names([0.95, 0.2, 0.5, 0.9, 0.2, 0.3]) == (
        "high", "mid", "mid", "high", "low", "mid",
    )  # fmt: skip


@pytest.mark.parametrize("least", [0, 1, 2])
def test_a_low_band_cuts_right_behind_the_shortest_draft(least):
    low = Proposal(
        torch.zeros(1, 4, dtype=torch.int64), None, torch.full((1, 4), 0.1), torch.ones(1, 4)
    )
    assert plan_block(Bands(Fixed(), min_draft=least), low).lengths.tolist() == [least]


def test_bands_leave_the_rest_to_the_policy_below():
    block = proposal(rows([0.95, 0.8, 0.8, 0.8, 0.8]))
    plan = plan_block(Bands(Confidence(s_stop=0.5), count=3), block)
    assert plan.lengths.tolist() == cut(Confidence(s_stop=0.5), block) == [3]
    assert plan.siblings.tolist() == [[0, 3, 3, 0, 0]]
    assert plan_block(Bands(Fixed(2), count=1), block).siblings.tolist() == [[0, 1, 0, 0, 0]]
    with pytest.raises(UserError, match=r"low 0\.8"):
        Bands(Fixed(), high=0.5, low=0.8)


def test_throughput_pays_for_the_rows_of_siblings():
    """E grows by 0.6 (+ 0.4 * 0.5 = 0.8 with siblings) for 1 row, or for 3.

    T = 6 + n: 1 / 7 against 1.6 / 8 for a row, which pays; with siblings 1.8 / 10 pays too, at
    two rows more for each further one (expected 1.8 + 0.6 * 0.8 = 2.28, 2.28 / 13 = 0.1754 < 0.18)
    it does not, while alone 1.96 / 9 = 0.2178 > 0.2 does.
    """
    block = proposal(torch.full((1, 4), 0.6))
    alone = Throughput(0, cost=cost(6, 1), rescue=0.5)
    assert cut(Throughput(0, 2, cost=cost(6, 1)), block) == [2]
    assert cut(Bands(alone, min_draft=0), block) == [1]


# -- throughput ------------------------------------------------------------------------------------


def rate(
    lengths: Sequence[int], confidence: Tensor, seconds: Callable[[int], float], n: int
) -> float:
    survival = confidence.double().cumprod(1)
    tokens = sum(1 + float(survival[b, :k].sum()) for b, k in enumerate(lengths))
    return tokens / seconds(n)


def test_throughput_by_hand():
    """T = 4 + n, c = 0.8: 1/5, 1.8/6, 2.44/7, 2.952/8, 3.3616/9, 3.689/10: the last falls."""
    block = proposal(torch.full((1, 8), 0.8))
    assert cut(Throughput(cost=cost(4, 1)), block) == [4]
    assert cut(Throughput(cost=cost(400, 1)), block) == [8]
    assert cut(Throughput(cost=cost(0, 1)), block) == [2]  # the floor: a row costs a whole step


def test_throughput_stops_early_where_a_longer_block_would_pay_again():
    """Verify times step up at 4 rows and are flat after: the best of all lengths is 8, which only
    a look at c_4.. could tell; it stops before the step."""
    steps = curve([10, 10, 10, 16, 16, 16, 16, 16, 16])
    model = CostModel((BatchCosts(1, 10, {8: 0.0}, steps, 0.0),), "", "", 1)
    confidence = torch.full((1, 8), 0.95)
    assert cut(Throughput(cost=model), proposal(confidence)) == [2]
    rates = [rate([k], confidence, lambda n: steps[n], 1 + k) for k in range(9)]
    assert max(range(9), key=rates.__getitem__) == 8


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.05, 1), min_size=4, max_size=4), min_size=1, max_size=3),
    st.floats(0.5, 30),
)
def test_greedy_allocation_is_the_best_of_all_allocations(values, base):
    """Each row's survival falls and every row costs the same, so taking the best next position
    while it pays is optimal over all cuts of all rows: tokens per second against enumeration."""
    confidence = torch.tensor(values)
    batch = len(values)
    model = CostModel(
        (BatchCosts(batch, base, {4: 0.0}, curve([base + n * batch for n in range(1, 14)]), 0.0),),
        "", "", 1,
    )  # fmt: skip
    got = cut(Throughput(0, cost=model, packed=True), proposal(confidence))
    best = max(
        rate(k, confidence, lambda n: base + n, batch + sum(k))
        for k in itertools.product(range(5), repeat=batch)
    )
    found = rate(got, confidence, lambda n: base + n, batch + sum(got))
    assert found == pytest.approx(best, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.05, 1), min_size=5, max_size=5), min_size=1, max_size=4),
    st.floats(0.5, 30),
)
def test_a_padded_batch_takes_the_best_common_length(values, base):
    confidence = torch.tensor(values)
    batch = len(values)
    got = cut(Throughput(0, cost=cost(base, 1, batch)), proposal(confidence))
    assert len(set(got)) == 1
    rates = [rate([k] * batch, confidence, lambda n: base + n, batch * (1 + k)) for k in range(6)]
    assert rates[got[0]] == pytest.approx(max(rates), rel=1e-5)


# -- what is learnt --------------------------------------------------------------------------------


def test_the_delayed_length_moves_as_stated_and_a_new_request_starts_from_the_start():
    """Known: a threshold that kept its first value, since updates went to a copy.

    T = 4 + n. At c = 0.8 the best length is 4 (see above), at c near 1 it is 8, at 0.05 the floor.
    """
    policy = Delayed(cost(4, 1), start=(0.8,) * 8, weight=0.5)
    block = proposal(torch.full((1, 8), 0.01))
    assert cut(policy, block) == [4]  # the block's own confidence plays no part
    lengths = []
    for _ in range(6):
        policy.observe(record([0.05] * 8))
        lengths += cut(policy, block)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 2
    for _ in range(6):
        policy.observe(record([1.0] * 8))
    assert cut(policy, block) == [8]
    assert cut(policy.fresh(), block) == [4]
    assert cut(policy, block) == [8]
    assert policy.survival is not None
    assert policy.survival[0] == pytest.approx(1 - 0.95 * 0.5**6, abs=0.02)


def test_a_round_without_a_draft_teaches_nothing():
    """A row at its last token beside others: the first round stays as long as a round may be."""
    policy = Delayed(cost(4, 1))
    policy.observe(record([]))
    assert policy.length(8) == 8


def test_short_rounds_teach_the_positions_they_drafted():
    policy = Delayed(cost(4, 1), start=(0.8, 0.5, 0.5), weight=0.5)
    policy.observe(record([0.4]))
    assert policy.survival == pytest.approx([0.6, 0.4, 0.2])
    policy.observe(record([]))
    assert policy.survival == pytest.approx([0.6, 0.4, 0.2])


@every_policy
def test_settings_are_json_and_name_the_policy(name):
    import json

    said = EVERY[name]().settings()
    assert json.loads(json.dumps(said)) == said
    assert said["name"] == EVERY[name]().name
    assert ("bands" in said) == name.startswith("bands")


def test_a_plan_is_a_plan():
    assert isinstance(plan_block(Fixed(), proposal(torch.ones(1, 3))), Plan)
