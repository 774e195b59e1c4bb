"""`calibration.json`: how far a drafter's confidence may be believed, and what puts it right.

    P_j = prod_{k<=j} sigmoid(l_k / T_k)            l_k: logit of the confidence head
    s_j = min_{i<=j} sigmoid(a_i ln P_i - b_i ln(1 - P_i) + d_i)
    confidence of slot j = s_j / s_{j-1}            s_0 = 1

There is one entry for each sampling setting, since what is accepted depends on how the target
samples, while l_k comes from the drafter at temperature 1 unfiltered, always. Temperatures
(`scaling`) and curves (`curves`) are fitted on rounds of the run-time process, so that the product
of the confidences, s_j, is the chance that a prefix survives; both are causal in the slots. A
setting without an entry uses the nearest, and whoever reports numbers says so. A drafter with no
entries reports its head's raw sigmoid.

Version 1 of the file had no entries, only the teacher-forced means that still stand beside them;
it is read as what it says. Version 2 is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark import ops
from dspark.draft.config import DraftConfig

CALIBRATION_FILE = "calibration.json"
SCHEMA_VERSION = 2
NOT_CALIBRATED = "the drafter's confidence is not calibrated; run `dspark calibrate`"
TEACHER_FORCED = "held-out rows, teacher-forced, temperature 1"

MIN_REACHED = 10
"""Rounds that must reach a slot; below, it is corrected as the slot before it."""

Slots = tuple[float | None, ...]


class Sampling(Protocol):
    """A sampling setting, as the runtime's `SamplingParams` has it. Temperature 0 is greedy."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int: ...


@dataclass(frozen=True)
class Stops:
    """Where drafts stop at one sampling setting, fitted on a step-time curve; it is the machine's.

    h_stop        nats, running mean of the entropy        (policy `entropy`)
    s_stop        calibrated survival; None: no head       (policy `confidence`)
    draft_length  best constant one                        (policy `fixed`)
    best          the policy with most modelled tokens per second
    tokens_per_s  of each policy, modelled, "plain" among them
    measured_on   the processor or GPU of the step times
    """

    h_stop: float
    s_stop: float | None
    draft_length: int
    best: str
    tokens_per_s: Mapping[str, float]
    measured_on: str | None


@dataclass(frozen=True)
class Fitted:
    """What corrects one sampling setting, and what it was worth on held-out rounds.

    temperature, top_p, top_k  the target's and the drafter's sampling; 0 temperature is greedy
    method       how rounds were verified: "token", one accept-or-reject per token
    temperatures [G] > 0, what the logits of a slot are divided by
    curves       [G] of (a, b, d), a and b >= 0; (1, 1, 0) changes nothing
    ece_before   [G] ECE of the survival product with the raw sigmoid; None: slot never verified
    ece_scaled   [G] with the temperatures alone, which is what other engines use
    ece_after    [G] with temperatures and curves; like ece_scaled on prompts not fitted on
    ece_floor    [G] what a perfect forecast would show on as many rounds: ECE is never 0
    auc          [G] of the calibrated s; None also where all rounds ended alike
    brier        [G] likewise
    average_ece_after_ci95  of the mean over slots, resampling prompts; None below two prompts
    rounds, prompts         how many were fitted on, and judged
    reached      [G] rounds in which a slot was verified and all before it accepted; below
                 `MIN_REACHED` it has temperature and curve of the slot before. None: not kept then
    stops        thresholds of draft-length policies; None: fitted without step times
    """

    temperature: float
    top_p: float
    top_k: int
    method: str
    temperatures: tuple[float, ...]
    curves: tuple[tuple[float, float, float], ...]
    ece_before: Slots
    ece_scaled: Slots
    ece_after: Slots
    ece_floor: Slots
    auc: Slots
    brier: Slots
    average_ece_after_ci95: tuple[float, float] | None
    rounds: int
    prompts: int
    stops: Stops | None = None
    reached: tuple[int, ...] | None = None

    def confidence(self, logits: Tensor) -> Tensor:
        """Raw logits [..., g] of the first g slots -> calibrated confidence, same shape, fp32."""
        return ops.calibrate(logits, _on_device(self.temperatures, self.curves, logits.device))

    @property
    def setting(self) -> str:
        """For messages: "temperature 1, top-p 0.95"."""
        return describe(self)

    @property
    def sparse(self) -> str | None:
        """For messages, the slots that too few rounds reached; None: there are none, or unknown."""
        few = [count for count in self.reached or () if count < MIN_REACHED]
        if not few:
            return None
        first, last = len(self.temperatures) - len(few) + 1, len(self.temperatures)
        slots = f"slots {first} to {last}" if len(few) > 1 else f"slot {last}"
        how = f"corrected as slot {first - 1}" if first > 1 else "not corrected"
        return f"{slots} reached by n = {', '.join(map(str, few))} rounds: {how}"


@dataclass(frozen=True)
class Calibration:
    """Everything the file holds.

    The first four fields are teacher-forced means per block slot, None where nothing was measured:
    measured_on says how, and is None if nothing was measured at all; rows is the number of rows.
    They show how wrong the head was where it was trained; `settings` corrects the run-time process.
    """

    measured_on: str | None
    confidence_per_slot: Slots
    acceptance_per_slot: Slots
    rows: int
    settings: tuple[Fitted, ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether any setting was fitted."""
        return bool(self.settings)

    @property
    def slots(self) -> int:
        """G, the block size it belongs to."""
        return len(self.confidence_per_slot)

    def nearest(self, sampling: Sampling) -> tuple[Fitted, bool] | None:
        """The entry to use for a sampling setting, and whether it was fitted for exactly that one.

        Nearest in temperature, then in top-p, then in top-k. None: nothing was fitted.
        """
        if not self.settings:
            return None
        best = min(self.settings, key=lambda entry: _distance(entry, sampling))
        return best, not any(_distance(best, sampling))

    def confidence(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Raw logits [..., g] of the first g slots -> confidence, fp32; raw if nothing fits."""
        found = self.nearest(sampling)
        return torch.sigmoid(logits.float()) if found is None else found[0].confidence(logits)

    def warning(self, sampling: Sampling) -> str | None:
        """What to say beside numbers that rest on the confidence at that setting, if anything."""
        found = self.nearest(sampling)
        if found is None:
            return NOT_CALIBRATED
        entry, exact = found
        if exact:
            return None
        return (
            f"the drafter's confidence was not calibrated for {describe(sampling)}: the entry for "
            f"{entry.setting} is used; add one with `dspark calibrate`"
        )

    def with_fitted(self, *entries: Fitted) -> Calibration:
        """These entries added, each in place of the one for the same setting, sorted."""
        for entry in entries:
            for name, found in (("temperatures", entry.temperatures), ("curves", entry.curves)):
                if len(found) != self.slots:
                    raise ValueError(f"{len(found)} {name} for {self.slots} slots")
        kept = [old for old in self.settings if all(any(_distance(old, new)) for new in entries)]
        ordered = sorted([*kept, *entries], key=lambda e: (e.temperature, e.top_p, e.top_k))
        return replace(self, settings=tuple(ordered))

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "calibrated": self.calibrated,
            "measured_on": self.measured_on,
            "confidence_per_slot": list(self.confidence_per_slot),
            "acceptance_per_slot": list(self.acceptance_per_slot),
            "rows": self.rows,
            "settings": [_entry_dict(entry) for entry in self.settings],
        }


def describe(sampling: Sampling) -> str:
    """A setting in words; what greedy decoding ignores is left out."""
    words = [f"temperature {sampling.temperature:g}"]
    if sampling.temperature > 0:
        words += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        words += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    return ", ".join(words)


def measured(held_out: Mapping[str, Any] | None, config: DraftConfig, rows: int) -> Calibration:
    """From the teacher-forced report of an evaluation on `rows` rows; None: there was none.

    `held_out` has `acceptance` and `confidence_per_slot`; a drafter without a confidence head says
    nothing, whatever stands there.
    """
    nothing = (None,) * config.block_size
    if held_out is None:
        return Calibration(None, nothing, nothing, 0)
    confidence = held_out["confidence_per_slot"] if config.enable_confidence_head else nothing
    return Calibration(TEACHER_FORCED, tuple(confidence), tuple(held_out["acceptance"]), rows)


@lru_cache(maxsize=64)
def _on_device(
    temperatures: tuple[float, ...],
    curves: tuple[tuple[float, float, float], ...],
    device: torch.device,
) -> Tensor:
    """[4, G] rows T, a, b, d. Copied once: a round must not wait for the host."""
    rows = [temperatures, *zip(*curves, strict=True)]
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.float32, device=device)


def _distance(entry: Sampling, sampling: Sampling) -> tuple[float, float, float]:
    """(temperature, top-p, top-k), each 0 if alike. Greedy decoding has no use for the others."""
    gap = abs(entry.temperature - sampling.temperature)
    if entry.temperature == sampling.temperature == 0:
        return gap, 0.0, 0.0
    # 1 / k, so that 0, which keeps every token, is next to a large k.
    k_gap = abs(_inverse(entry.top_k) - _inverse(sampling.top_k))
    return gap, abs(entry.top_p - sampling.top_p), k_gap


def _inverse(k: int) -> float:
    return 1 / k if k else 0.0


def _entry_dict(entry: Fitted) -> dict[str, Any]:
    return {key: _listed(value) for key, value in asdict(entry).items()}


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value
