"""`dspark eval`: how much of a draft is accepted, and how well the drafter knows it, by prompt set.

Only speculative decoding runs: its answers are the target's (at temperature 0 token for token), so
answers with a known result are graded as they are. Sets are never merged into one figure, since
the topic of a prompt moves accepted length more than most changes to a drafter do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dspark.draft.calibration import NOT_CALIBRATED, describe
from dspark.draft.reliability import average, reliability, survival
from dspark.files import atomic_write_json, prepare_folder
from dspark.runtime.confidence import confidence_rounds
from dspark.runtime.records import RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark_eval import metrics, outcomes, profiles
from dspark_eval.costs import Costs, find_costs
from dspark_eval.document import SCHEMA_VERSION, run_document
from dspark_eval.drafting import Drafted
from dspark_eval.grading import exact_answers
from dspark_eval.lengths import long_contexts, require_proposals
from dspark_eval.lengths_by_entropy import lengths_by_entropy
from dspark_eval.pair import Pair, load_pair
from dspark_eval.report import print_eval, progress
from dspark_eval.samples import asked, samples
from dspark_eval.settings import EvalOptions
from dspark_eval.speed import PromptTimings, hash_tokens, summarize
from dspark_eval.suites import Suite, load_suites

EVAL_FILE = "eval.json"
PLOT_FILE = "acceptance.png"
SANE = 0.5
"""Share of exact answers below which a target in a long context is said to have lost its way."""


def run_eval(options: EvalOptions) -> dict[str, Any]:
    """Evaluate each prompt set; print, and write eval.json and acceptance.png into `out`.

    Raises `UserError` for what `load_suites` and `load_pair` refuse.
    """
    suites = [
        suite
        for name in options.suites
        for suite in load_suites(name, n_prompts=options.n_prompts, seed=options.seed)
    ]
    pair = load_pair(options)
    if options.out is not None:
        prepare_folder(options.out)
    document = eval_pair(pair, suites, options)
    if options.out is not None:
        from dspark_eval.plots import plot_eval

        atomic_write_json(options.out / EVAL_FILE, document)
        plot_eval(document, options.out / PLOT_FILE)
    if not options.quiet:
        print_eval(document)
    return document


def eval_pair(pair: Pair, suites: Sequence[Suite], options: EvalOptions) -> dict[str, Any]:
    """The JSON document for a pair that is loaded already: the setting, then each set by name."""
    sampling = options.sampling()
    costs = _costs(pair, suites, options)
    cost = None if costs is None else costs.model
    drafted = Drafted.of(options, pair.drafter, sampling, cost)
    results = {}
    for suite in suites:
        with progress(f"eval {suite.name}", len(suite.rows), options.quiet) as advance:
            results[suite.name] = _eval_suite(pair, suite, drafted, options, advance)
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
        "suites": results,
        "warnings": [
            *pair.warnings,
            *(costs.warnings if costs is not None else ()),
            *_confidence_warnings(pair, sampling),
            *_sense_warnings(suites, results),
            *(note for s in suites for note in s.notes),
            *(f"{name}: {text}" for name, suite in results.items() for text in suite["warnings"]),
            *few,
        ],
    }


def _costs(pair: Pair, suites: Sequence[Suite], options: EvalOptions) -> Costs | None:
    """The step times that the policy reads, or that were asked for; None for neither."""
    if not options.reads_costs and not options.profile:
        return None
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


def _sense_warnings(suites: Sequence[Suite], results: Mapping[str, Any]) -> Iterator[str]:
    """Long contexts in which the target itself has lost its way."""
    for suite in suites:
        exact = results[suite.name]["exact_answers"]
        if suite.context is not None and exact is not None and exact < SANE:
            yield (
                f"{suite.name}: the target itself gets {100 * exact:.0f} % of these right; "
                "accepted length there is that of text the target makes no sense of"
            )


def _eval_suite(
    pair: Pair,
    suite: Suite,
    drafted: Drafted,
    options: EvalOptions,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """The keys of a bench run, what concerns plain decoding null, and the keys of an evaluation."""
    prompts = pair.prompt_ids(suite)
    sampling, most = options.sampling(), options.max_new_tokens
    decode = pair.speculative_after(prompts, sampling, most, drafted)
    timings = [PromptTimings(len(prompt)) for prompt in prompts]
    for index, (prompt, entry) in enumerate(zip(prompts, timings, strict=True)):
        answer = decode(prompt, options.seed + index)
        metrics.check_generation(answer)
        entry.speculative.append(answer)
        advance()
    require_proposals(timings, pair.drafter_name)
    answers = [entry.speculative[0] for entry in timings]
    by_prompt = [answer.rounds for answer in answers]
    exact = exact_answers(pair, suite, answers)
    lossless = None
    if drafted.relaxed is not None:
        decode = pair.speculative_after(prompts, sampling, most, replace(drafted, relaxed=None))
        strict = [decode(prompt, options.seed + index) for index, prompt in enumerate(prompts)]
        lossless = exact_answers(pair, suite, strict)
    buckets = profiles.context_buckets([entry.prompt_length for entry in timings], by_prompt)
    return {
        **run_document(
            pair,
            drafted,
            sampling,
            max_new_tokens=most,
            summary=summarize(timings, seed=options.seed),
            greedy_mismatches=None,
            relaxed=outcomes.relaxation(metrics.pool(by_prompt), exact, lossless),
        ),
        "n_rounds": sum(map(len, by_prompt)),
        "prompts_available": suite.available,
        "prompts_sha256": hash_tokens(prompts),
        "prefix_survival": metrics.prefix_survival(metrics.pool(by_prompt)),
        "accepted_length_percentiles": metrics.accepted_length_percentiles(by_prompt),
        "loop_share": metrics.loop_share([answer.tokens for answer in answers]),
        "accepted_length_without_loops": metrics.accepted_length_without_loops(answers),
        "context_buckets": [asdict(bucket) for bucket in buckets],
        "warnings": long_contexts(pair, timings),
        "finished_share": sum(answer.finish == "end" for answer in answers) / len(answers),
        "exact_answers": exact,
        "confidence": confidence_report(pair, sampling, by_prompt),
        "lengths_by_entropy": lengths_by_entropy(metrics.pool(by_prompt)),
        "samples": samples(asked(suite, answers), pair.chat.tokenizer),
    }


def confidence_report(
    pair: Pair, sampling: SamplingParams, by_prompt: Sequence[Sequence[RoundRecord]]
) -> dict[str, Any] | None:
    """How far the reported confidence may be believed, by slot; None without a confidence head.

    `calibrated_for` is the setting of the calibration entry that was applied, None if none was.
    """
    rounds = confidence_rounds(by_prompt, pair.drafter.config.block_size)
    if not len(rounds):
        return None
    calibration = pair.drafter.calibration
    applied = None if calibration is None else calibration.nearest(sampling)
    # As reported: the calibration is in the records already.
    found = reliability(survival(rounds.logits, (1.0,) * rounds.slots), rounds)
    return {
        "calibrated_for": applied and describe(applied[0]),
        "exact_setting": applied is not None and applied[1],
        "average_ece": found.average_ece,
        "average_ece_floor": average(found.ece_floor),
        **asdict(found),
    }
