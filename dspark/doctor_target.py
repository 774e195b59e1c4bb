"""A drafter beside its target: the same tokenizer, template and states, and the layout that works.

Two things no shape tells, both of which leave a drafter that runs and accepts next to nothing:

    slot layout   slot 0, the anchor, predicts the token after it; or it does not, slot k predicts
                  token k, and a block of G slots proposes G - 1 tokens
    tap kind      which of the target's states a tap holds, where the target offers several

Each way is tried: a few prompts are decoded greedily, and accepted length tells. It is a measure
of the target's own greedy text, the same for all ways, so a handful of prompts is enough to tell a
way that works from one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dspark.assets import asset
from dspark.distill.fingerprint import check_stored_tokenizer
from dspark.distill.identity import identity_warnings, trained_format
from dspark.distill.prompts import read_prompts
from dspark.draft.calibration import Calibration
from dspark.draft.checkpoint import check_target
from dspark.draft.config import DraftConfig
from dspark.draft.folder import CONFIG_FILE
from dspark.draft.golden import compare, read_target
from dspark.draft.golden_file import Golden
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.loading import LoadedTarget
from dspark.runtime.sampling import BadLogits, SamplingParams
from dspark.runtime.target import Target
from dspark.taps import TapSet

ANCHOR, MASK = "anchor", "mask"
PROMPTS, NEW_TOKENS = 4, 48
CLEARLY = 1.15
"""How many times the accepted length of the recorded way another must reach to be reported."""


@dataclass(frozen=True)
class Trial:
    """One way to run a drafter, and what the target accepted: tokens a round, its own included."""

    tap_kind: str
    slot_layout: str
    recorded: bool
    accepted_length: float
    rounds: int


@dataclass(frozen=True)
class TargetReport:
    """What is wrong beside this target, and every way that was tried (none, if sizes differ)."""

    name: str
    findings: tuple[str, ...]
    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Reinterpreted:
    """A drafter run as if its taps were of another kind, or its anchor slot did not predict.

    Everything that is not reinterpreted is the drafter's own; the runtime sees an ordinary one.
    """

    def __init__(self, drafter: DSparkDrafter, target: Target, kind: str, layout: str) -> None:
        self._drafter, self._masked = drafter, layout == MASK
        config = drafter.config
        self.calibration: Calibration | None = None
        self.confidence_head = None
        self.taps = TapSet(config.target_layer_ids, kind)
        self.draft_ids = drafter.draft_ids
        self.markov_head = drafter.markov_head
        self.new_context = drafter.new_context
        self.extend = drafter.extend
        self.config = SimpleNamespace(
            block_size=config.block_size - self._masked, mask_token_id=config.mask_token_id
        )
        self._mask = target.embed(torch.tensor([[config.mask_token_id]], device=target.device))

    def block_hidden(self, block_embeds: Tensor, context: Any) -> Tensor:
        """As of `DSparkDrafter`; with mask slots only, one slot more runs and the first is cut."""
        if not self._masked:
            return self._drafter.block_hidden(block_embeds, context)
        more = self._mask.expand(len(block_embeds), 1, -1)
        return self._drafter.block_hidden(torch.cat((block_embeds, more), 1), context)[:, 1:]


def examine_target(
    folder: Path, drafter: DSparkDrafter, golden: Golden | None, loaded: LoadedTarget
) -> TargetReport:
    """Hold a drafter against a target, in the target's dtype and on its device."""
    target, config = loaded.target, drafter.config
    findings: list[str] = []
    same = _said(findings, lambda: check_stored_tokenizer(folder, loaded.tokenizer))
    fits = _said(findings, lambda: _fits(folder, config, target))
    chat = trained_format(folder, config.target, loaded.tokenizer)
    if same is not None:
        findings += identity_warnings(config.target, chat, same_tokenizer=same)
    if not fits:
        return TargetReport(target.name, tuple(findings), ())
    drafter = drafter.to(device=target.device, dtype=target.dtype)
    findings += _same_reading(drafter, golden, target)
    rows = read_prompts([asset("prompts/test.jsonl")], strict=True).rows
    chosen = rows[:: len(rows) // PROMPTS][:PROMPTS]
    prompts = [chat.prompt_ids(row.prompt) for row in chosen]
    try:
        trials = try_ways(drafter, target, prompts)
    except BadLogits as error:
        return TargetReport(target.name, (*findings, str(error)), ())
    findings += better_ways(trials)
    return TargetReport(target.name, tuple(findings), tuple(trials))


def _fits(folder: Path, config: DraftConfig, target: Target) -> bool:
    check_target(folder / CONFIG_FILE, config, target)
    return True


def _said(findings: list[str], check: Callable[[], bool]) -> bool | None:
    """The answer of a check; what it refuses becomes a finding, and the answer None."""
    try:
        return check()
    except UserError as error:
        findings.append(str(error))
        return None


def _same_reading(drafter: DSparkDrafter, golden: Golden | None, target: Target) -> list[str]:
    """Does the drafter compute behind this target what it did behind the one it was saved with?"""
    if golden is None or golden.target is None:
        return []
    kept = golden.target
    found = read_target(drafter, target, kept.ids)
    dtypes = (getattr(torch, kept.dtype), target.dtype)
    coarse = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    bad = compare(kept.logits, found.logits, coarse)
    if bad is None and found.ids == kept.ids:
        return []
    where = "" if bad is None else f" (slot {bad[0]}: logit {bad[2]}, {bad[1]} when written)"
    return [
        f"golden vector: behind target {target.name} the drafter does not compute what it did "
        f"behind its own{where}: other target weights, or taps of other layers or another kind"
    ]


def try_ways(
    drafter: DSparkDrafter, target: Target, prompts: Sequence[Sequence[int]]
) -> list[Trial]:
    """The recorded way first, then the other slot layout, then the other tap kinds."""
    recorded = (drafter.config.target_tap_kind, ANCHOR)
    ways = [recorded]
    if drafter.config.block_size > 1:
        ways.append((recorded[0], MASK))
    ways += [(kind, ANCHOR) for kind in target.tap_kinds if kind != recorded[0]]
    return [_try(drafter, target, prompts, *way, recorded=way == recorded) for way in ways]


def _try(
    drafter: DSparkDrafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    kind: str,
    layout: str,
    *,
    recorded: bool,
) -> Trial:
    way = Reinterpreted(drafter, target, kind, layout)
    decoder = SpeculativeDecoder(target, way)
    rounds = [
        record
        for prompt in prompts
        for record in decoder.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            sampling=SamplingParams(),
            draft_length=way.config.block_size,
        ).rounds
    ]
    length = sum(record.emitted for record in rounds) / max(len(rounds), 1)
    return Trial(kind, layout, recorded, length, len(rounds))


def better_ways(trials: Sequence[Trial]) -> list[str]:
    """A sentence if another way is accepted clearly more than the recorded one, the first."""
    recorded = trials[0]
    best = max(trials, key=lambda trial: trial.accepted_length)
    if best.accepted_length < CLEARLY * recorded.accepted_length:
        return []
    if best.slot_layout != recorded.slot_layout:
        what = "slot layout: with the anchor slot not predicting"
        then = "it was trained in the other layout (sample_from_anchor false), not run here"
    else:
        what = f"target_tap_kind: with taps of kind {best.tap_kind}"
        then = f"{CONFIG_FILE} says {recorded.tap_kind}; it was trained on the other kind"
    return [
        f"{what} {best.accepted_length:.2f} tokens a round are accepted, "
        f"{recorded.accepted_length:.2f} as recorded: {then}"
    ]
