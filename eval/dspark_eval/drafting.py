"""How a run drafts and verifies: the options that `bench` and `eval` share, and what they become.

Values that only a switched-off part would read are refused, not ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from dspark.errors import UserError
from dspark.runtime.cost_model import CostModel
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.judge import Method
from dspark.runtime.policies import Auto, Policy
from dspark.runtime.policies.bands import HIGH, LOW, SIBLINGS
from dspark.runtime.policies.choose import PolicyChoice, make_policy
from dspark.runtime.prefix_cache import PrefixCache
from dspark.runtime.proposal import Drafter
from dspark.runtime.relaxed import Relaxed
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval.asked import Asked
from dspark_eval.speed import Decode


@dataclass(frozen=True, kw_only=True)
class Drafting(Asked):
    """Options of a call that decodes by rounds.

    policy, draft_length   see `PolicyChoice`
    bands, high, low, siblings   thresholds and siblings count with `bands` alone; None: the default
    verification   "token" or "block"
    relaxed        also accept typical tokens: lossy
    """

    draft_length: int | None = None
    policy: str = "fixed"
    bands: bool = False
    high: float | None = None
    low: float | None = None
    siblings: int | None = None
    verification: str = "token"
    relaxed: bool = False

    def check(self) -> None:
        """Raises UserError naming the option that is wrong."""
        super().check()
        if self.draft_length is not None and self.draft_length < 1:
            raise UserError(f"--draft-length: expected 1 or more; got {self.draft_length}")
        for name in ("high", "low", "siblings"):
            if getattr(self, name) is not None and not self.bands:
                raise UserError(f"--{name}: a setting of the bands; give --bands with it")
        if self.siblings is not None and self.siblings < 0:
            raise UserError(f"--siblings: expected 0 or more; got {self.siblings}")
        if self.verification not in get_args(Method):
            raise UserError(
                f"--verification: expected {' or '.join(get_args(Method))}; got "
                f"{self.verification!r}"
            )
        if self.cost_model is not None and not (self.reads_costs or self.profile):
            raise UserError(f"--cost-model: policy {self.policy} reads no step times; leave it out")
        if self.relaxed and self.verification != "token":
            raise UserError("--relaxed: works with --verification token")
        self.choice()

    @property
    def reads_costs(self) -> bool:
        """Whether decisions rest on step times."""
        return self.policy.startswith("throughput") or self.policy == "auto"

    def choice(self) -> PolicyChoice:
        """What was asked for, defaults filled in."""
        given = {"high": self.high, "low": self.low, "siblings": self.siblings}
        values = {name: value for name, value in given.items() if value is not None}
        bands: dict[str, Any] = {"high": HIGH, "low": LOW, "siblings": SIBLINGS, **values}
        return PolicyChoice(self.policy, self.draft_length, bands=self.bands, **bands)


@dataclass(frozen=True, eq=False)
class Drafted:
    """How one sampling setting is decoded; the policy starts anew with every prompt."""

    policy: Policy
    method: Method = "token"
    relaxed: Relaxed | None = None

    @classmethod
    def of(
        cls,
        options: Drafting,
        drafter: Drafter,
        sampling: SamplingParams,
        cost: CostModel | None,
    ) -> Drafted:
        """Raises UserError for what `make_policy` refuses."""
        policy = make_policy(
            options.choice(),
            sampling,
            calibration=drafter.calibration,
            has_confidence=drafter.confidence_head is not None,
            cost=cost,
        )
        method: Method = "block" if options.verification == "block" else "token"
        return cls(policy, method, Relaxed() if options.relaxed else None)

    def decode(
        self,
        target: Target,
        drafter: Drafter,
        sampling: SamplingParams,
        max_new_tokens: int,
        prefix_cache: PrefixCache | None = None,
    ) -> Decode:
        """Prompt and seed to an answer; `prefix_cache`: see `SpeculativeDecoder.generate`."""
        generate = partial(
            SpeculativeDecoder(target, drafter).generate,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            policy=self.policy,
            method=self.method,
            relaxed=self.relaxed,
            prefix_cache=prefix_cache,
        )
        return lambda prompt, seed: generate(prompt, seed=seed)

    def settings(self, block_size: int) -> dict[str, Any]:
        """For JSON: every value that the run's rounds depend on."""
        relaxed = None
        if self.relaxed is not None:
            names = ("high", "epsilon", "delta")
            relaxed = {name: getattr(self.relaxed, name) for name in names}
        length = self.length(block_size)
        return {**self.policy.settings(), "draft_length": length, "relaxed": relaxed}

    def length(self, block_size: int) -> int:
        """The most that a round drafts."""
        policy = self.policy.inner if isinstance(self.policy, Auto) else self.policy
        return min(policy.draft_length(block_size), block_size)
