"""What the parts of a round cost on one machine: the step-time curve, as a file.

    plain      a step of one token                              seconds(batch)
    draft      a draft pass that walks g slots                  seconds(batch, g)
    verify     a target pass over n rows of each request        seconds(batch, n)
    other      commit, feeding the drafter, the host's share    seconds(batch)
    round      draft(g) + verify(n) + other
    break-even accepted length = round / plain: below it speculation loses

`dspark bench --profile` measures it for a target, a drafter and a machine; policies, `dspark
inspect` and `dspark calibrate` read it. Between two measured row counts time is interpolated, past
the last one the last slope goes on; a batch that was not measured is interpolated the same way.

Letters: B batch, g slots drafted, n rows of a request in a verify pass.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark.files import read_json

KIND = "dspark cost model"
COST_MODEL_FILE = "cost_model.json"
"""Its name beside a drafter."""
FRAME_COSTS_FILE = "frame_costs.json"
"""That of the times of recorded frames."""
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BatchCosts:
    """Seconds at one batch size, of real passes.

    draft   slots drafted -> seconds
    verify  rows of each request -> seconds, 1 row among them
    """

    batch: int
    plain: float
    draft: Mapping[int, float]
    verify: Mapping[int, float]
    other: float


@dataclass(frozen=True, eq=False)
class CostModel:
    """Measured costs by batch size, ascending, and where they were measured.

    Compared and hashed by identity: it is loaded once and shared.
    """

    batches: tuple[BatchCosts, ...]
    target: str
    drafter: str
    context_tokens: int
    machine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    def at(self, batch: int) -> BatchCosts:
        """The costs of a batch size, interpolated between those that were measured."""
        sizes = [costs.batch for costs in self.batches]
        if batch in sizes:
            return self.batches[sizes.index(batch)]
        if len(sizes) == 1:
            return replace(self.batches[0], batch=batch)
        mixed = {}
        for name in ("draft", "verify"):
            keys = sorted(set.intersection(*(set(getattr(c, name)) for c in self.batches)))
            mixed[name] = {
                key: interpolate({c.batch: getattr(c, name)[key] for c in self.batches}, batch)
                for key in keys
            }
        plain, other = (
            interpolate({c.batch: getattr(c, name) for c in self.batches}, batch)
            for name in ("plain", "other")
        )
        return BatchCosts(batch, plain, mixed["draft"], mixed["verify"], other)

    def plain_s(self, batch: int = 1) -> float:
        """Seconds of a plain step: one token for every row."""
        return self.at(batch).plain

    def round_s(self, drafted: int, rows: float, batch: int = 1) -> float:
        """Seconds of a round that drafts `drafted` slots and verifies `rows` rows per request.

        Rows of a batch whose requests verify different numbers may be a mean, hence a float.
        """
        costs = self.at(batch)
        if drafted == 0:
            return costs.plain
        return interpolate(costs.draft, drafted) + interpolate(costs.verify, rows) + costs.other

    def break_even(self, drafted: int, rows: float, batch: int = 1) -> float:
        """Accepted length at which such a round is as fast as plain decoding."""
        return self.round_s(drafted, rows, batch) / self.plain_s(batch)

    def step_times(self, batch: int = 1) -> dict[int, float]:
        """Rows -> seconds: 1 is a plain step, 1 + g a whole round of draft length g."""
        costs = self.at(batch)
        times = {1 + g: self.round_s(g, 1 + g, batch) for g in sorted(costs.draft)}
        return {1: costs.plain, **times}

    def summary(self) -> dict[str, Any]:
        """What to say of it beside numbers that rest on it."""
        sizes = [costs.batch for costs in self.batches]
        return {"target": self.target, "drafter": self.drafter, "batches": sizes}

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "drafter": self.drafter,
            "context_tokens": self.context_tokens,
            "machine": dict(self.machine),
            "environment": dict(self.environment),
            "batches": [_batch_dict(costs) for costs in self.batches],
        }


def interpolate(points: Mapping[int, float], at: float) -> float:
    """Piecewise linear through the points, the first and the last slope going on outside.

    A slope never leads below the nearest point's own value outward to the right, nor below 0.
    """
    keys = sorted(points)
    if len(keys) == 1:
        return points[keys[0]]
    index = min(max(bisect_left(keys, at), 1), len(keys) - 1)
    low, high = keys[index - 1], keys[index]
    slope = (points[high] - points[low]) / (high - low)
    if at > keys[-1]:
        slope = max(slope, 0.0)
        return points[high] + slope * (at - high)
    return max(points[low] + slope * (at - low), 0.0)


def is_cost_model(raw: Any) -> bool:
    """Whether a JSON value says that it is one."""
    return isinstance(raw, Mapping) and raw.get("kind") == KIND


def load_cost_model(path: Path) -> CostModel:
    """Read the file of `dspark bench --profile`. Raises UserError naming what is wrong in it."""
    raw = read_json(path)
    if not is_cost_model(raw):
        raise UserError(
            f"{path}: no cost model; `dspark bench --profile --cost-model F` writes one"
        )
    try:
        return cost_model_from_dict(raw)
    except ValueError as problem:
        raise UserError(f"{path}: {problem}; measure again with `dspark bench --profile`") from None


def cost_model_from_dict(raw: Mapping[str, Any]) -> CostModel:
    """The inverse of `CostModel.to_dict`. Raises ValueError: "key: what is wrong"."""
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version: {raw.get('schema_version')!r} given, {SCHEMA_VERSION} was expected"
        )
    entries = raw.get("batches")
    if not isinstance(entries, list) or not entries:
        raise ValueError("batches: a list with an entry for each batch size was expected")
    batches = tuple(sorted(map(_batch, entries), key=lambda costs: costs.batch))
    if len({costs.batch for costs in batches}) < len(batches):
        raise ValueError("batches: one batch size occurs twice")
    target, drafter, tokens = (raw.get(key) for key in ("target", "drafter", "context_tokens"))
    if not isinstance(target, str) or not isinstance(drafter, str) or type(tokens) is not int:
        raise ValueError("target, drafter, context_tokens: two names and a number were expected")
    facts = [raw.get(key) for key in ("machine", "environment")]
    machine, environment = (value if isinstance(value, Mapping) else {} for value in facts)
    return CostModel(batches, target, drafter, tokens, machine, environment)


def _batch_dict(costs: BatchCosts) -> dict[str, Any]:
    values = asdict(costs)
    for name in ("draft", "verify"):
        values[name] = {str(key): value for key, value in sorted(values[name].items())}
    return {key if key == "batch" else f"{key}_s": value for key, value in values.items()}


def _batch(raw: Any) -> BatchCosts:
    if not isinstance(raw, Mapping) or type(raw.get("batch")) is not int or raw["batch"] < 1:
        raise ValueError("batches: each entry needs `batch`, 1 or more")
    where = f"batch {raw['batch']}"
    costs = BatchCosts(
        raw["batch"],
        _seconds(raw.get("plain_s"), f"{where}: plain_s"),
        _curve(raw.get("draft_s"), f"{where}: draft_s", least=0.0),
        _curve(raw.get("verify_s"), f"{where}: verify_s"),
        _seconds(raw.get("other_s"), f"{where}: other_s", least=0.0),
    )
    if costs.plain == 0 or 1 not in costs.verify:
        raise ValueError(f"{where}: a plain step above 0 s and verify_s of 1 row were expected")
    return costs


def _curve(raw: Any, key: str, least: float | None = None) -> dict[int, float]:
    if not isinstance(raw, Mapping) or not raw or not all(k.isdecimal() and int(k) for k in raw):
        raise ValueError(f"{key}: an object of counts and seconds was expected")
    return {int(count): _seconds(value, f"{key}[{count}]", least) for count, value in raw.items()}


def _seconds(value: Any, key: str, least: float | None = None) -> float:
    good = type(value) in (int, float) and math.isfinite(value)
    if not good or value < 0 or (least is None and value == 0):
        raise ValueError(f"{key}: {value!r} given, seconds above 0 were expected")
    return float(value)


def curve(times: Sequence[float]) -> dict[int, float]:
    """Seconds of 1, 2, ... as a mapping, for curves written by hand."""
    return dict(enumerate(times, start=1))
