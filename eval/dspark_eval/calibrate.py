"""`dspark calibrate`: fit what a drafter's confidence is worth, on rounds of the decode loop.

    prompts it was not trained on -> rounds with whole blocks -> temperatures and curves
        DRAFT/calibration.json                        what decoding uses from then on
        OUT/reliability.json, reliability-t*.png      predicted against observed survival, by slot
    with step times (--profile, --cost-model)         thresholds of draft-length policies too
        SGLANG/sts-t*.json, sps.json                  the same for SGLang: temperatures, cost table

Figures after the fit are of prompts that it has not seen: halves of the prompts judge each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.draft.calibration import (
    CALIBRATION_FILE,
    MIN_REACHED,
    Calibration,
    Fitted,
    Stops,
    measured,
)
from dspark.draft.checkpoint import read_calibration, read_config
from dspark.draft.reliability import BINS, ConfidenceRounds, Floats, average, bin_sums, survival
from dspark.draft.scaling import fit_setting
from dspark.errors import UserError
from dspark.files import atomic_write_json, prepare_folder
from dspark.runtime.confidence import collect_records, confidence_rounds
from dspark.runtime.cost_model import CostModel
from dspark.runtime.policies.fitting import fit_stops
from dspark.runtime.policies.replay import whole_blocks
from dspark.runtime.records import RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark.wording import counted
from dspark_eval.costs import Costs, find_costs
from dspark_eval.environment import describe_environment
from dspark_eval.intervals import sample_size_warnings
from dspark_eval.pair import Pair, load_pair
from dspark_eval.report import print_calibration, progress
from dspark_eval.settings import CalibrateOptions
from dspark_eval.sglang_files import setting_name, sps_table, sts_table
from dspark_eval.suites import load_suites

RELIABILITY_FILE = "reliability.json"
SCHEMA_VERSION = 1
NO_STOPS = (
    "no thresholds were fitted for draft-length policies, which takes step times: give --profile"
)


def run_calibrate(options: CalibrateOptions) -> dict[str, Any]:
    """Fit, write into the drafter's folder, report. Returns what `reliability.json` holds.

    Raises `UserError` for what `load_suites` and `load_pair` refuse, for a drafter without a
    confidence head, too few prompts, entries of more prompts (but for `replace`), and a folder that
    cannot be written.
    """
    suites = [
        suite
        for name in options.suites
        for suite in load_suites(name, n_prompts=options.n_prompts, seed=options.seed)
    ]
    if not options.replace:
        _check_kept(options, sum(len(suite.rows) for suite in suites))
    pair = load_pair(options)
    if pair.drafter.confidence_head is None:
        raise UserError(f"{options.draft}: this drafter has no confidence head; nothing to fit")
    if options.out is not None:
        prepare_folder(options.out)
    prompts = [ids for suite in suites for ids in pair.prompt_ids(suite)]
    if len(prompts) < 2:
        raise UserError(f"--suite: {len(prompts)} prompt; at least 2 are needed, half are held out")
    dataset = ", ".join(suite.name for suite in suites)
    costs = find_costs(
        pair,
        prompts,
        draft=options.draft,
        cost_model=options.cost_model,
        profile=options.profile,
        quiet=options.quiet,
    )
    fitted, reports = [], []
    for sampling in options.sampling():
        records = _collect(pair, prompts, sampling, options)
        rounds = confidence_rounds(records, pair.drafter.config.block_size)
        entry, scores = _fit(rounds, sampling, options)
        if costs is not None:
            entry = replace(entry, stops=stops_for(entry, records, costs.model))
        fitted.append(entry)
        reports.append(_report(rounds, entry, scores))
    document = {
        "schema_version": SCHEMA_VERSION,
        "target": pair.target.name,
        "drafter": pair.drafter_name,
        "dataset": dataset,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "bins": BINS,
        "settings": reports,
        "environment": describe_environment(pair.target.device, pair.target.dtype),
        "warnings": [
            *pair.warnings,
            *(costs.warnings if costs is not None else [NO_STOPS]),
            *sample_size_warnings(len(prompts)),
            *_doubts(pair.drafter.calibration, fitted),
            *(note for suite in suites for note in suite.notes),
        ],
    }
    _write(pair, fitted, document, costs, options)
    if not options.quiet:
        print_calibration(document, str(Path(options.draft) / CALIBRATION_FILE))
    return document


def _check_kept(options: CalibrateOptions, prompts: int) -> None:
    """Refuse to put a fit of fewer prompts in the place of one of more.

    What a fit is worth rests on its prompts. One that `distill` made belongs to the weights beside
    it, since whatever trains them writes the file anew.
    """
    calibration = read_calibration(options.draft, read_config(options.draft))
    if calibration is None:
        return
    for sampling in options.sampling():
        found = calibration.nearest(sampling)
        if found is not None and found[1] and found[0].prompts > prompts:
            raise UserError(
                f"{Path(options.draft) / CALIBRATION_FILE}: fitted on {found[0].prompts} prompts "
                f"at {found[0].setting}, which {prompts} would replace; give as many or more "
                "(--n-prompts, --suite), or --replace"
            )


def _collect(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    options: CalibrateOptions,
) -> list[list[RoundRecord]]:
    title = f"rounds at temperature {sampling.temperature:g}"
    with progress(title, len(prompts), options.quiet) as advance:
        return collect_records(
            pair.target,
            pair.drafter,
            prompts,
            sampling=sampling,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
            numbers=range(len(prompts)),
            advance=advance,
        )


def stops_for(
    entry: Fitted, by_prompt: Sequence[Sequence[RoundRecord]], cost: CostModel
) -> Stops | None:
    """Thresholds on the confidence as the new entry will report it; None: no whole block.

    The records hold the head's own confidence, so it is calibrated here first.
    """
    slots = len(entry.temperatures)
    try:
        blocks = whole_blocks(by_prompt, slots)
    except ValueError:
        return None
    assert blocks.confidence is not None  # `collect_records` asks for a head
    raw = torch.logit(blocks.confidence.double().clamp(1e-7, 1 - 2.0**-24)).float()
    return fit_stops(replace(blocks, confidence=entry.confidence(raw)), cost)


def _fit(
    rounds: ConfidenceRounds, sampling: SamplingParams, options: CalibrateOptions
) -> tuple[Fitted, Floats]:
    """The entry, and the survival [n, G] that its `ece_after` judged."""
    if rounds.prompts < 2:  # answers of one token have no round
        raise UserError(
            f"temperature {sampling.temperature:g}: {rounds.prompts} of the prompts had a round; "
            "at least 2 are needed; give more prompts, or a larger --max-new-tokens"
        )
    return fit_setting(rounds, sampling, seed=options.seed)


def _doubts(old: Calibration | None, fitted: Sequence[Fitted]) -> Iterator[str]:
    """What to say of entries that rest on little: slots without a fit, or half as many rounds."""
    for entry in fitted:
        found = None if old is None else old.nearest(entry)
        if found is not None and found[1] and found[0].rounds > 2 * entry.rounds:
            yield (
                f"{entry.setting}: a fit on {counted(entry.rounds, 'round')} has replaced one on "
                f"{found[0].rounds}"
            )
        if entry.sparse is not None:
            yield f"{entry.setting}: {entry.sparse} (fewer than {MIN_REACHED}); give more prompts"


def _report(rounds: ConfidenceRounds, entry: Fitted, curved: Floats) -> dict[str, Any]:
    """The entry, its averages over slots, and the points of the reliability diagram."""
    raw = survival(rounds.logits, (1.0,) * rounds.slots)
    diagram = []
    for slot in range(rounds.slots):
        seen = rounds.judged(slot)
        labels = rounds.survived(slot)[seen]
        diagram.append(
            {
                name: dict(
                    zip(
                        ("rounds", "predicted_sum", "survived"),
                        bin_sums(scores[seen, slot], labels).tolist(),
                        strict=True,
                    )
                )
                for name, scores in (("before", raw), ("after", curved))
            }
        )
    keys = ("ece_before", "ece_scaled", "ece_after", "ece_floor")
    facts = Calibration(None, (), (), 0, (entry,)).to_dict()["settings"][0]
    means = {f"average_{key}": average(getattr(entry, key)) for key in keys}
    return {**facts, **means, "diagram": diagram}


def _write(
    pair: Pair,
    fitted: Sequence[Fitted],
    document: dict[str, Any],
    costs: Costs | None,
    options: CalibrateOptions,
) -> None:
    """All files; `calibration.json` first, since it is what was asked for."""
    from dspark_eval.reliability import plot_reliability

    old = pair.drafter.calibration or measured(None, pair.drafter.config, 0)
    out = Path(options.draft) if options.out is None else options.out
    folder = Path(options.draft)
    try:
        atomic_write_json(folder / CALIBRATION_FILE, old.with_fitted(*fitted).to_dict())
        folder = out
        atomic_write_json(out / RELIABILITY_FILE, document)
        for report in document["settings"]:
            plot_reliability(document, report, out / f"reliability-{setting_name(report)}.png")
        if options.sglang is not None:
            folder = options.sglang
            for entry, report in zip(fitted, document["settings"], strict=True):
                table = sts_table(entry, document["dataset"])
                atomic_write_json(folder / f"sts-{setting_name(report)}.json", table)
            if costs is not None:
                atomic_write_json(folder / "sps.json", sps_table(costs.model.step_times()))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
