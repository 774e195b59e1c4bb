"""Budgets and the choice of a size: against brute force, and refusals that name the floor."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from dspark.distill.budget import Budget, Pricing, bisected, fit
from dspark.distill.effects import points
from dspark.draft.cost import parameters
from dspark.draft.pruning.plan import choose, expected_loss
from dspark.draft.pruning.sizes import Grid, Size, resized
from dspark.errors import UserError
from tests.tiny_drafters import FULL
from tests.toy_target import ToyTarget

GRID = Grid.of(FULL, (1, 0))
PRICES = {
    "layers": {1: 0.9, 2: 0.0},
    "heads": {1: 0.2, 2: 0.0},
    "mlp": {16: 0.5, 48: 0.1, 80: 0.0},
    "rank": {8: 0.05, 12: 0.0},
}
PRICING = Pricing(ToyTarget(), torch.float32, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "kind", "value", "relative"), [
    ("params=0.5M", "params", 5e5, False), ("params=50%", "params", 0.5, True),
    ("bytes=2M", "bytes", 2e6, False), ("bytes=1.5GB", "bytes", 1.5e9, False),
    ("ms=1.5", "ms", 1.5, False), ("ms=80%", "ms", 0.8, True),
    ("params=700k", "params", 7e5, False),
])  # fmt: skip
def test_budgets_as_they_are_written(text: str, kind: str, value: float, relative: bool) -> None:
    found = Budget.parse(text)
    assert (found.kind, found.relative) == (kind, relative)
    assert found.value == pytest.approx(value)
    assert Budget.parse(str(found)) == found


@pytest.mark.parametrize(
    "text", ["", "50%", "params", "params=", "params=-1", "params=1e6", "size=3", "params=101%",
             "ms=nan", "bytes=1.2.3"],
)  # fmt: skip
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"^--budget {text}: expected "):
        Budget.parse(text)


def test_the_choice_is_the_best_of_all_sizes() -> None:
    costs = GRID.costs(parameters)
    expected = expected_loss(GRID, PRICES)
    for budget in np.linspace(costs.min(), costs.max(), 25):
        choice = choose(GRID, PRICES, costs, float(budget))
        assert choice is not None
        by_hand = [
            (expected[index], -costs[index])
            for index in product(*map(range, GRID.shape))
            if costs[index] <= budget
        ]
        assert (choice.expected, -choice.cost) == pytest.approx(min(by_hand))
        assert parameters(resized(FULL, choice.size)) == choice.cost <= budget
    assert choose(GRID, PRICES, costs, float(costs.min()) - 1) is None


def test_prices_are_read_off_lines_and_never_reward_cutting() -> None:
    expected = expected_loss(GRID, PRICES)
    whole = tuple(n - 1 for n in GRID.shape)
    assert expected[whole] == 0.0
    at = dict(zip(GRID.mlp, expected[1, 1, :, 1], strict=True))
    assert at == pytest.approx({16: 0.5, 32: 0.3, 48: 0.1, 64: 0.05, 80: 0.0})
    noisy = PRICES | {"mlp": {16: 0.02, 48: 0.1, 80: 0.0}, "heads": {1: -0.3, 2: 0.0}}
    expected = expected_loss(GRID, noisy)
    assert bool((np.diff(expected, axis=2) <= 0).all())
    assert expected[1, 0, -1, 1] == 0.0


def test_layers_go_in_the_order_that_was_measured() -> None:
    assert GRID.layers(1) == (0,)
    assert GRID.layers(2) == (0, 1)
    four = Grid.of(replace(FULL, num_layers=4), (2, 0, 3, 1))
    assert four.layers(2) == (1, 3)


def test_prices_are_measured_at_the_ends_and_between() -> None:
    assert points(tuple(range(1, 9))) == [1, 2, 4, 6, 8]
    assert points((16, 32, 48, 64, 80)) == [16, 32, 64, 80]
    assert points((1,)) == [1]


@pytest.mark.parametrize("kind", ["params", "bytes"])
def test_all_of_it_keeps_all_and_almost_nothing_is_refused(kind: str) -> None:
    assert fit(Budget(kind, 1.0, True), GRID, PRICES, PRICING).size == Size.of(FULL)
    floor = int(GRID.costs(PRICING.counted(kind)).min())
    smallest = fit(Budget(kind, floor, False), GRID, PRICES, PRICING)
    assert smallest.size == Size((0,), 1, 16, 8)
    for value in (0.0, 0.01):
        with pytest.raises(UserError, match=f"smallest drafter, which takes {floor:,} {kind}"):
            fit(Budget(kind, value, True), GRID, PRICES, PRICING)


def test_time_is_searched_for_by_measuring() -> None:
    """A clock that is known: the search ends at the largest best size within the time."""
    costs = GRID.costs(PRICING.bytes)

    def clock(size: Size) -> float:
        return PRICING.bytes(resized(FULL, size)) / 1e4

    limit = float(np.quantile(costs, 0.4)) / 1e4
    found = bisected(GRID, PRICES, costs, clock, limit, Budget("ms", limit, False))
    assert found.cost == clock(found.size) <= limit
    direct = choose(GRID, PRICES, costs, limit * 1e4)
    assert direct is not None
    assert found.size == direct.size
    with pytest.raises(UserError, match=r"smallest drafter, which takes [\d.]+ ms"):
        bisected(GRID, PRICES, costs, clock, 0.1, Budget("ms", 0.1, False))


def test_a_draft_is_really_timed() -> None:
    config = replace(
        FULL, hidden_size=PRICING.target.hidden_size, vocab_size=PRICING.target.vocab_size,
        mask_token_id=0,
    )  # fmt: skip
    assert PRICING.milliseconds(config) > 0
