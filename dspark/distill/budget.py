"""What a pruned drafter may cost: `params=0.5M`, `bytes=40%` or `ms=1.5`, and the size that fits.

Parameters and bytes are known for every size before it exists. Draft time is measured, on this
machine, with random weights, which cost what trained ones do: a bisection over budgets of bytes
finds the largest size that stays within the time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.cost import context_bytes, parameters, weight_bytes
from dspark.draft.model import DSparkDrafter
from dspark.draft.pruning.plan import Choice, choose
from dspark.draft.pruning.sizes import Cost, Grid, Size, resized
from dspark.errors import UserError
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.proposal import propose
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target

KINDS = ("params", "bytes", "ms")
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_HINT = "expected params=0.5M, params=50%, bytes=2M or ms=1.5"
WARMUP, DRAFTS, BISECTIONS = 4, 24, 10


@dataclass(frozen=True)
class Budget:
    """At most `value` of `kind`; a share of what the whole drafter has if `relative`."""

    kind: str
    value: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Budget:
        """From `kind=number`, the number with k, M, G or %. Raises UserError."""
        kind, _, number = text.partition("=")
        found = re.fullmatch(r"([0-9]*\.?[0-9]+)([kMG%]?)B?", number.strip())
        if kind not in KINDS or found is None:
            raise UserError(f"--budget {text}: {_HINT}")
        value, unit = float(found[1]), found[2]
        if unit == "%" and value > 100:
            raise UserError(f"--budget {text}: expected at most 100%, what the drafter has")
        factor = 0.01 if unit == "%" else _FACTORS[unit]
        return cls(kind, value * factor, unit == "%")

    def limit(self, whole: float) -> float:
        """The budget as a number, where the whole drafter costs `whole`."""
        return self.value * whole if self.relative else self.value

    def __str__(self) -> str:
        number = f"{100 * self.value:g}%" if self.relative else f"{self.value:.12g}"
        return f"{self.kind}={number}"


@dataclass(frozen=True, eq=False)
class Pricing:
    """How sizes are costed.

    dtype: of the weights that a draft step reads. context: tokens before the anchor, whose state
    or keys it reads too.
    """

    target: Target
    dtype: torch.dtype
    context: int

    def bytes(self, config: DraftConfig) -> int:
        """Bytes that one draft step reads: weights, LM head and context."""
        weights = weight_bytes(config, self.dtype).total
        return weights + context_bytes(config, self.context, self.dtype)

    def counted(self, kind: str) -> Cost:
        """The cost that is known without measuring."""
        return parameters if kind == "params" else self.bytes

    def milliseconds(self, config: DraftConfig) -> float:
        """Median time of a draft on this machine, with random weights."""
        target = self.target
        drafter = DSparkDrafter(config).to(target.device, self.dtype).eval()
        return draft_milliseconds(
            drafter, target, min(self.context, config.max_position_embeddings)
        )


@torch.no_grad()
def draft_milliseconds(drafter: DSparkDrafter, target: Target, length: int) -> float:
    """Median time of a greedy draft after `length` tokens: block and sequential head."""
    context = drafter.new_context(1, length)
    width = drafter.config.hidden_size * len(drafter.config.target_layer_ids)
    drafter.extend(context, torch.zeros(1, length, width, device=target.device))
    anchor = torch.tensor([1], device=target.device)
    generator = torch.Generator(target.device).manual_seed(0)
    head, slots = DraftHead(target, drafter.draft_ids), drafter.config.block_size
    times = []
    for draft in range(WARMUP + DRAFTS):
        started = time.perf_counter()
        propose(drafter, head, context, anchor, slots, SamplingParams(), generator)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        if draft >= WARMUP:
            times.append(1e3 * (time.perf_counter() - started))
    return sorted(times)[len(times) // 2]


def fit(
    budget: Budget, grid: Grid, prices: Mapping[str, Mapping[int, float]], pricing: Pricing
) -> Choice:
    """The best size within the budget. Raises UserError, naming the floor, if none is."""
    if budget.kind == "ms":
        return _fit_time(budget, grid, prices, pricing)
    costs = grid.costs(pricing.counted(budget.kind))
    choice = choose(grid, prices, costs, budget.limit(float(costs.max())))
    if choice is None:
        raise _too_small(budget, f"{costs.min():,.0f} {budget.kind}", grid)
    return choice


def check_reachable(budget: Budget, config: DraftConfig, pricing: Pricing) -> None:
    """Raises UserError, naming the floor, for a budget of counted things that no size meets."""
    if budget.kind == "ms":
        return
    grid = Grid.of(config, range(config.num_layers))
    costs = grid.costs(pricing.counted(budget.kind))
    if costs.min() > budget.limit(float(costs.max())):
        raise _too_small(budget, f"{costs.min():,.0f} {budget.kind}", grid)


def _fit_time(
    budget: Budget, grid: Grid, prices: Mapping[str, Mapping[int, float]], pricing: Pricing
) -> Choice:
    costs = grid.costs(pricing.bytes)
    timed: dict[Size, float] = {}

    def measure(size: Size) -> float:
        if size not in timed:
            timed[size] = pricing.milliseconds(resized(grid.config, size))
        return timed[size]

    whole = Size.of(grid.config)
    limit = budget.limit(measure(whole))
    if measure(whole) <= limit:
        return Choice(whole, measure(whole), 0.0)
    return bisected(grid, prices, costs, measure, limit, budget)


def bisected(
    grid: Grid,
    prices: Mapping[str, Mapping[int, float]],
    costs: object,
    measure: Callable[[Size], float],
    limit: float,
    budget: Budget,
) -> Choice:
    """The largest best size, by bytes, that `measure` finds within `limit`."""
    import numpy as np

    table = np.asarray(costs)
    low, high = float(table.min()), float(table.max())
    found = choose(grid, prices, table, low)
    assert found is not None
    if measure(found.size) > limit:
        raise _too_small(budget, f"{measure(found.size):.3g} ms", grid)
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        tried = choose(grid, prices, table, middle)
        assert tried is not None
        if measure(tried.size) <= limit:
            low, found = middle, tried
        else:
            high = middle
    return Choice(found.size, measure(found.size), found.expected)


def _too_small(budget: Budget, floor: str, grid: Grid) -> UserError:
    return UserError(
        f"--budget {budget}: below the smallest drafter, which takes {floor} (1 layer, 1 head, MLP "
        f"width {grid.mlp[0]}, markov rank {grid.ranks[0]}); raise it"
    )
