"""From a policy's name and a few values to the policy, with what the drafter's calibration fitted.

A value that is given holds; one that is not is what `dspark calibrate` fitted for the sampling
setting, and where nothing was fitted the policy's own stated default.

    auto    the policy that was best when thresholds were fitted; else `throughput` with a cost
            model, `confidence` with a calibrated head, `entropy`; each in turn with plain decoding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark.draft.calibration import Calibration, Stops
from dspark.errors import UserError
from dspark.runtime.cost_model import CostModel
from dspark.runtime.policies.auto import Auto
from dspark.runtime.policies.bands import HIGH, LOW, MOST_SIBLINGS, SIBLINGS, Bands
from dspark.runtime.policies.confidence import Confidence
from dspark.runtime.policies.entropy import Entropy
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.policies.frontier import Policy
from dspark.runtime.policies.throughput import Delayed, Throughput
from dspark.runtime.sampling import SamplingParams

POLICIES = ("fixed", "entropy", "confidence", "throughput", "throughput-delayed", "auto")
MIN_DRAFT = 2


@dataclass(frozen=True)
class PolicyChoice:
    """What was asked for.

    name          one of POLICIES
    draft_length  of `fixed` its length, of the others the most they draft; None: whole blocks,
                  8 at most for the others
    h_stop, s_stop  thresholds of `entropy` and `confidence`; None: fitted, or the default
    bands         whether high, low and siblings are in force
    graphs        whether rounds are recorded frames, which have step times of their own
    """

    name: str = "fixed"
    draft_length: int | None = None
    h_stop: float | None = None
    s_stop: float | None = None
    bands: bool = False
    high: float = HIGH
    low: float = LOW
    siblings: int = SIBLINGS
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise UserError(f"--policy: expected one of {', '.join(POLICIES)}; got {self.name!r}")
        if self.draft_length is not None and self.draft_length < 1:
            raise UserError(f"--draft-length: expected 1 or more; got {self.draft_length}")
        if self.siblings > MOST_SIBLINGS:
            raise UserError(f"--siblings: expected at most {MOST_SIBLINGS}; got {self.siblings}")

    @property
    def limits(self) -> dict[str, Any]:
        """min_draft and max_draft of a rule."""
        least = MIN_DRAFT if self.draft_length is None else min(MIN_DRAFT, self.draft_length)
        return {"min_draft": least, "max_draft": self.draft_length}


def make_policy(
    choice: PolicyChoice,
    sampling: SamplingParams,
    *,
    calibration: Calibration | None = None,
    has_confidence: bool = True,
    cost: CostModel | None = None,
) -> Policy:
    """The policy asked for, in front of its first round.

    Raises UserError where it needs a cost model or a confidence head that is not there, or where a
    value is out of range.
    """
    found = None if calibration is None else calibration.nearest(sampling)
    stops = None if found is None else found[0].stops
    policy = _inner(choice, choice.name, stops, found is not None, has_confidence, cost)
    if choice.bands:
        policy = Bands(policy, choice.high, choice.low, choice.siblings, choice.limits["min_draft"])
    if choice.name == "auto":
        policy = Auto(policy)
    if policy.needs_confidence and not has_confidence:
        asked = "--bands" if choice.bands else f"--policy {choice.name}"
        raise UserError(f"{asked}: the drafter has no confidence head; use fixed or entropy")
    return policy


def _inner(
    choice: PolicyChoice,
    name: str,
    stops: Stops | None,
    calibrated: bool,
    has_confidence: bool,
    cost: CostModel | None,
) -> Policy:
    limits = choice.limits
    if name == "fixed":
        fitted = stops.draft_length if stops is not None and choice.name == "auto" else None
        return Fixed(fitted if choice.draft_length is None else choice.draft_length)
    if name == "entropy":
        h_stop = choice.h_stop if stops is None or choice.h_stop is not None else stops.h_stop
        return Entropy(**limits) if h_stop is None else Entropy(**limits, h_stop=h_stop)
    if name == "confidence":
        s_stop = choice.s_stop if stops is None or choice.s_stop is not None else stops.s_stop
        return Confidence(**limits) if s_stop is None else Confidence(**limits, s_stop=s_stop)
    if name == "auto":
        best = _best(stops, calibrated, has_confidence, cost)
        return _inner(choice, best, stops, calibrated, has_confidence, cost)
    if cost is None:
        bench = f"dspark bench {'--graphs ' if choice.graphs else ''}--profile"
        raise UserError(
            f"--policy {name}: needs step times; measure them with `{bench}`, or "
            "give --cost-model FILE"
        )
    if name == "throughput":
        return Throughput(**limits, cost=cost)
    return Delayed(cost, limits=(limits["min_draft"], limits["max_draft"]))


def _best(
    stops: Stops | None, calibrated: bool, has_confidence: bool, cost: CostModel | None
) -> str:
    """What `auto` speculates with."""
    if stops is not None and (cost is not None or not stops.best.startswith("throughput")):
        return stops.best
    if not (calibrated and has_confidence):
        return "entropy"
    return "confidence" if cost is None else "throughput"
