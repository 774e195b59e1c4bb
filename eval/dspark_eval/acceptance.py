"""`dspark eval`: how much of a draft is accepted, and how well the drafter knows it, by prompt set.

Speculative decoding runs, and the target reads every text once more to see that it is its own
(`fidelity`); plain decoding runs beside it where asked for (`--plain`). Sets are never merged into
one figure, since the topic of a prompt moves accepted length more than most changes to a drafter
do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dspark.draft.calibration import NOT_CALIBRATED
from dspark.files import atomic_write_json, prepared_folder
from dspark.runtime.loading import SHIPPED, target_folder
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics
from dspark_eval.busy import say_if_busy
from dspark_eval.concurrency import check_concurrency
from dspark_eval.confidence import confidence_report as confidence_report
from dspark_eval.costs import Costs, find_costs
from dspark_eval.document import SCHEMA_VERSION
from dspark_eval.drafting import Drafted
from dspark_eval.grading import exact_answers as exact_answers
from dspark_eval.measured_files import drafter_files, target_files
from dspark_eval.pair import Pair, load_pair
from dspark_eval.protocols import Measured, departures, protocol_document
from dspark_eval.report import print_eval, progress
from dspark_eval.rounds_file import RoundsFile
from dspark_eval.settings import EvalOptions
from dspark_eval.suite_report import SuiteRun, eval_suite
from dspark_eval.suites import CODE, Suite, load_all_suites

EVAL_FILE = "eval.json"
PLOT_FILE = "acceptance.png"
SANE = 0.5
"""Share of exact answers below which a target in a long context is said to have lost its way."""


def run_eval(options: EvalOptions) -> dict[str, Any]:
    """Evaluate each prompt set; print, and write eval.json and acceptance.png into `out`, and where
    asked for every round (`rounds_file`).

    Raises `UserError` for what `load_suites` and `load_pair` refuse.
    """
    suites = load_all_suites(
        options.suites, n_prompts=options.n_prompts, seed=options.seed, folder=options.suite_dir
    )
    for suite in suites:
        check_concurrency(options.concurrency, len(suite.rows), suite.name)
    pair = load_pair(options)
    with ExitStack() as places:
        if options.out is not None:
            places.enter_context(prepared_folder(options.out, f"--out {options.out}"))
        if options.rounds is not None:
            asked = f"--rounds {options.rounds}"
            places.enter_context(prepared_folder(options.rounds.parent, asked))
        document = _measure_and_write(pair, suites, options)
    if not options.quiet:
        print_eval(document)
    return document


def _measure_and_write(pair: Pair, suites: Sequence[Suite], options: EvalOptions) -> dict[str, Any]:
    if options.concurrency or options.profile:
        say_if_busy()
    rounds = None if options.rounds is None else RoundsFile()
    document = eval_pair(pair, suites, options, rounds)
    if options.rounds is not None and rounds is not None:
        rounds.write(options.rounds)
    if options.out is not None:
        from dspark_eval.plots import plot_eval

        atomic_write_json(options.out / EVAL_FILE, document)
        plot_eval(document, options.out / PLOT_FILE)
    return document


def eval_pair(
    pair: Pair, suites: Sequence[Suite], options: EvalOptions, rounds: RoundsFile | None = None
) -> dict[str, Any]:
    """The JSON document for a pair that is loaded already: the setting, then each set by name.
    `rounds` takes every round."""
    sampling = options.sampling()
    costs = _costs(pair, suites, options)
    cost = None if costs is None else costs.model
    identity = {  # before anything is measured: a file may be replaced meanwhile
        "drafter": drafter_files(Path(options.draft)),
        "target": target_files(target_folder(options.target), pair.chat.tokenizer),
    }
    drafted = Drafted.of(options, pair.drafter, sampling, cost)
    results = {}
    for suite in suites:
        with progress(f"eval {suite.name}", len(suite.rows), options.quiet) as advance:
            run = SuiteRun(pair, suite, drafted, options, cost, 2 * len(suites), rounds)
            results[suite.name] = eval_suite(run, advance)
    measured = Measured(
        {pair.drafter_name: pair.drafter.config.block_size}, {s.name: len(s.rows) for s in suites}
    )
    few = [f"{s.name}: {w}" for s in suites for w in metrics.sample_size_warnings(len(s.rows))]
    return {
        "schema_version": SCHEMA_VERSION,
        "target": pair.target.name,
        "drafter": pair.drafter_name,
        "temperature": sampling.temperature,
        "draft_length": drafted.length(pair.drafter.config.block_size),
        "policy": drafted.policy.name,
        "verification": drafted.method,
        "seed": options.seed,
        "command": options.command,
        "identity": identity,
        "protocol": protocol_document(options.protocol, options, measured),
        "suites": results,
        "warnings": [
            *departures(options.protocol, options, measured),
            *pair.warnings,
            *(costs.warnings if costs is not None else ()),
            *_confidence_warnings(pair, sampling),
            *_sense_warnings(suites, results, options.target),
            *(note for s in suites for note in s.notes),
            *(f"{name}: {text}" for name, suite in results.items() for text in suite["warnings"]),
            *few,
        ],
    }


def _costs(pair: Pair, suites: Sequence[Suite], options: EvalOptions) -> Costs | None:
    """Step times: measured now for one request, those the policy reads, or what lies beside the
    drafter (`dspark bench --profile` measures batches too: goodput needs them)."""
    return find_costs(
        pair,
        pair.prompt_ids(suites[0]),
        draft=options.draft,
        cost_model=options.cost_model,
        profile=options.profile,
        quiet=options.quiet,
    )


def _confidence_warnings(pair: Pair, sampling: SamplingParams) -> list[str]:
    if pair.drafter.confidence_head is None:
        return []
    if pair.drafter.calibration is None:
        return [NOT_CALIBRATED]
    said = pair.drafter.calibration.warning(sampling)
    return [] if said is None else [said]


def _sense_warnings(
    suites: Sequence[Suite], results: Mapping[str, Any], target: str | Path
) -> Iterator[str]:
    """Long contexts in which the target itself has lost its way, and code asked of the nano."""
    for suite in suites:
        if suite.name == CODE and str(target) in SHIPPED:
            yield f"{CODE}: {target} cannot write Python; these prompts are for other targets"
        exact = results[suite.name]["exact_answers"]
        if suite.context is not None and exact is not None and exact < SANE:
            yield (
                f"{suite.name}: the target itself gets {100 * exact:.0f} % of these right; "
                "accepted length there is that of text the target makes no sense of"
            )
