"""The whole report: blocks, thresholds, runs, figures, page and pictures.

OUT/policies.json          every figure
OUT/policies.md            the page
OUT/threshold-sweep.png    acceptance rate and accepted length against the threshold
OUT/cost_model.json        the step times used, unless they were given
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.files import atomic_write_json, atomic_write_text, prepare_folder
from dspark.runtime.cost_model import COST_MODEL_FILE, CostModel
from dspark.runtime.policies import Confidence, Entropy
from dspark.runtime.policies.fitting import fit_stops
from dspark.runtime.policies.replay import H_GRID, S_GRID, Blocks, Point, sweep
from dspark.runtime.sampling import SamplingParams
from dspark_eval.asked import PUBLISHED_SEED
from dspark_eval.costs import find_costs
from dspark_eval.drafting import Drafted
from dspark_eval.environment import describe_environment
from dspark_eval.grading import confidence_warnings
from dspark_eval.intervals import sample_size_warnings
from dspark_eval.pair import Pair, load_pair
from dspark_eval.policies.arms import Arm, careful_arm, make_arms
from dspark_eval.policies.block import compare_methods
from dspark_eval.policies.measure import collect_blocks, figures, run_arms
from dspark_eval.policies.page import page
from dspark_eval.policies.sets import MIX, prompt_sets
from dspark_eval.report import progress
from dspark_eval.settings import EvalOptions
from dspark_eval.step_times import timed_by
from dspark_eval.suites import Suite, load_suites

SCHEMA_VERSION = 1
FIT_PROMPTS = 60


@dataclass(frozen=True)
class ReportOptions:
    """One report. cost_model: None = measured first. threads: 1 lets CPU time be told from waits.

    `n_prompts` of each set; thresholds are fitted on other prompts, of the validation split.
    """

    out: Path
    draft: Path | None = None
    target: str = "nano"
    n_prompts: int = 30
    max_new_tokens: int = 192
    temperature: float = 0.0
    seed: int = PUBLISHED_SEED
    threads: int = 1
    cost_model: Path | None = None
    quiet: bool = False


def run_report(options: ReportOptions) -> Path:
    """Measure and write everything; returns the page. Raises UserError as `dspark eval` does."""
    from dspark_eval.policies.plots import plot_sweeps

    sampling = SamplingParams(options.temperature)
    pair = _pair(options)
    prepare_folder(options.out)
    sets = prompt_sets(options.n_prompts, options.seed)
    (held_out,) = load_suites("nano-validation", n_prompts=FIT_PROMPTS, seed=options.seed)
    fitting = _blocks(pair, held_out, sampling, options)
    cost = _costs(pair, pair.prompt_ids(held_out), options)
    stops = fit_stops(fitting, cost)
    careful = careful_arm(fitting, cost)
    arms = make_arms(fitting.slots, stops, careful, cost, pair.target.supports_trees)
    results, sweeps = {}, {}
    for suite in sets:
        results[suite.name] = _run_set(pair, suite, arms, cost, sampling, options)
        sweeps[suite.name] = _sweeps(_blocks(pair, suite, sampling, options), cost)
    document = {
        "schema_version": SCHEMA_VERSION,
        "target": pair.target.name,
        "drafter": pair.drafter_name,
        "temperature": sampling.temperature,
        "n_prompts": options.n_prompts,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "timed_by": timed_by(pair.target.device),
        "stops": {"h_stop": stops.h_stop, "s_stop": stops.s_stop},
        "plain_s": cost.plain_s(),
        "step_times": {str(rows): value for rows, value in cost.step_times().items()},
        "break_even": {str(g): cost.break_even(g, 1 + g) for g in range(1, fitting.slots + 1)},
        "arms": {arm.name: arm.policy.settings() for arm in arms},
        "sets": results,
        "sweeps": sweeps,
        "block_verification": compare_methods(pair, sets[0], options),
        "mix": MIX,
        "environment": describe_environment(pair.target.device, pair.target.dtype),
        "warnings": [
            *pair.warnings,
            *_calibration_warnings(pair, arms, sampling),
            *(f"{s.name}: {text}" for s in sets for text in sample_size_warnings(len(s.rows))),
        ],
    }
    atomic_write_json(options.out / "policies.json", document)
    plot_sweeps(document, options.out / "threshold-sweep.png")
    atomic_write_text(options.out / "policies.md", page(document))
    return options.out / "policies.md"


def _pair(options: ReportOptions) -> Pair:
    from dspark.commands.options import default_draft

    return load_pair(
        EvalOptions(
            draft=options.draft or default_draft(),
            target=options.target,
            n_prompts=options.n_prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            threads=options.threads,
        )
    )


def _costs(pair: Pair, prompts: Sequence[list[int]], options: ReportOptions) -> CostModel:
    found = find_costs(
        pair,
        prompts,
        draft=options.out,
        cost_model=options.cost_model or options.out / COST_MODEL_FILE,
        profile=options.cost_model is None,
        quiet=options.quiet,
    )
    assert found is not None  # measured, or read from the file that was given
    return found.model


def _blocks(pair: Pair, suite: Suite, sampling: SamplingParams, options: ReportOptions) -> Blocks:
    prompts = pair.prompt_ids(suite)
    with progress(f"whole blocks of {suite.name}", len(prompts), options.quiet) as advance:
        return collect_blocks(
            pair, prompts, sampling, options.max_new_tokens, options.seed, advance
        )


def _run_set(
    pair: Pair,
    suite: Suite,
    arms: Sequence[Arm],
    cost: CostModel,
    sampling: SamplingParams,
    options: ReportOptions,
) -> dict[str, Any]:
    prompts = pair.prompt_ids(suite)
    with progress(f"policies on {suite.name}", len(prompts), options.quiet) as advance:
        runs = run_arms(
            pair, prompts, arms, sampling, options.max_new_tokens, options.seed, advance
        )
    rows = [figures(run, runs[0], cost, greedy=sampling.greedy, seed=options.seed) for run in runs]
    return {"n_prompts": len(prompts), "rows": rows}


def _sweeps(blocks: Blocks, cost: CostModel) -> dict[str, list[dict[str, Any]]]:
    """Replays of the two threshold rules."""
    found = {"entropy": sweep(lambda h: Entropy(h_stop=h), H_GRID, blocks, cost)}
    if blocks.confidence is not None:
        found["confidence"] = sweep(lambda s: Confidence(s_stop=s), S_GRID, blocks, cost)
    return {name: list(map(_point, points)) for name, points in found.items()}


def _point(point: Point) -> dict[str, Any]:
    return {"threshold": point.threshold, **vars(point.replay)}


def _calibration_warnings(pair: Pair, arms: Sequence[Arm], sampling: SamplingParams) -> list[str]:
    found = (confidence_warnings(pair, Drafted(arm.policy), sampling) for arm in arms)
    return list(dict.fromkeys(line for lines in found for line in lines))
