"""`dspark bench`: plain against speculative decoding, in one process, prompt by prompt.

What makes the comparison fair (eval/README.md has the reasons):

* the same target, weights, kernels, threads, prompts, sampling code and `max_new_tokens`;
* the two ways alternate on every prompt, and which goes first alternates too (A B, B A, A B, ...),
  so that a machine that warms up or slows down treats both alike;
* whole prompts are decoded before the clock counts, and thrown away;
* tokens per second counts the tokens after the first and their seconds: the first comes from
  prefill, which speculation does not touch. The figure with prefill stands beside it.

With `--graphs` both ways are recorded frames (`recorded.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dspark.errors import UserError
from dspark.files import atomic_write_json, prepare_folder
from dspark.runtime.k3_target import K3Target
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.target import Target
from dspark_eval import metrics, outcomes, step_times
from dspark_eval.busy import say_if_busy
from dspark_eval.costs import Costs, find_costs
from dspark_eval.document import run_document
from dspark_eval.drafting import Drafted
from dspark_eval.fidelity import collect, fidelity_warnings, judge
from dspark_eval.grading import confidence_warnings, exact_answers
from dspark_eval.lengths import long_contexts, require_proposals
from dspark_eval.lengths_by_entropy import lengths_by_entropy
from dspark_eval.mismatches import find_mismatches
from dspark_eval.pair import Pair, load_pair
from dspark_eval.recorded import UNDIVIDED, Frames, Recorder, frame_warnings, measure_eager
from dspark_eval.report import print_bench, progress
from dspark_eval.samples import asked, samples
from dspark_eval.settings import BenchOptions
from dspark_eval.speed import (
    PromptTimings,
    alone,
    details,
    hash_tokens,
    measure,
    summarize,
    summarize_peer,
)
from dspark_eval.suites import Suite, load_suites
from dspark_eval.transformers_peer import TransformersPeer
from dspark_eval.verdicts import eager_mismatches, mismatch_warnings

WARMUP_PEER_TOKENS = 32


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Measure every sampling setting asked for; print, write and plot as the options say.

    Returns the JSON document: the keys of one run at the top level (the first setting), and where
    several temperatures were asked for also `runs`, the list of all of them.
    Raises `UserError` when the drafter never proposes a token, and for what `load_pair` refuses.
    """
    suite = _one_suite(options)
    pair = load_pair(options)
    for file in (options.json, options.plot, options.cost_model if options.profile else None):
        if file is not None:
            prepare_folder(file.parent)
    say_if_busy()
    document = bench_pair(pair, suite, options)
    if options.json is not None:
        atomic_write_json(options.json, document)
    runs = document.get("runs", [document])
    if options.plot is not None:
        from dspark_eval.plots import plot_bench

        plot_bench(runs, options.plot)
    if not options.quiet:
        print_bench(runs)
    return document


def bench_pair(pair: Pair, suite: Suite, options: BenchOptions) -> dict[str, Any]:
    """The JSON document for a pair that is loaded already."""
    prompts = pair.prompt_ids(suite)
    recorder = None
    if options.graphs:
        recorder = Recorder(pair, prompts, options.batch, options.max_new_tokens)
    costs = _costs(pair, prompts, options, recorder)
    peer = _make_peer(pair.target) if options.peer else None
    runs: list[dict[str, Any]] = []
    for sampling in options.sampling():
        cost = None if costs is None else costs.model
        drafted = Drafted.of(options, pair.drafter, sampling, cost)
        frames = None if recorder is None else recorder.frames(sampling, drafted.policy)
        # the peer decodes greedily whatever the setting: once is enough
        once = None if runs else peer
        runs.append(
            _run_setting(pair, suite, prompts, options, sampling, drafted, costs, frames, once)
        )
    return {**runs[0], "runs": runs} if len(runs) > 1 else runs[0]


def _costs(
    pair: Pair, prompts: Sequence[list[int]], options: BenchOptions, recorder: Recorder | None
) -> Costs | None:
    """Step times, if they are to be measured or the policy reads them."""
    if not options.profile and not options.reads_costs:
        return None
    return find_costs(
        pair,
        prompts,
        draft=options.draft,
        cost_model=options.cost_model,
        profile=options.profile,
        batches=step_times.BATCHES,
        recorder=recorder,
        quiet=options.quiet,
    )


def _one_suite(options: BenchOptions) -> Suite:
    suites = load_suites(options.prompts, n_prompts=options.n_prompts, seed=options.seed)
    if len(suites) > 1:
        names = " or ".join(suite.name for suite in suites)
        raise UserError(f"--prompts {options.prompts}: bench measures one set; give {names}")
    return suites[0]


def _make_peer(target: Target) -> TransformersPeer:
    if not isinstance(target, K3Target):
        raise UserError("--peer: only a K3 or Kimi-Linear target has a peer; leave --peer out")
    return TransformersPeer(target.model.config, device=target.device, dtype=target.dtype)


def _run_setting(
    pair: Pair,
    suite: Suite,
    prompts: Sequence[list[int]],
    options: BenchOptions,
    sampling: SamplingParams,
    drafted: Drafted,
    costs: Costs | None,
    frames: Frames | None,
    peer: TransformersPeer | None,
) -> dict[str, Any]:
    """Warm up, measure and summarise one sampling setting."""
    timings = _measure_setting(pair, prompts, options, sampling, drafted, frames, peer)
    require_proposals(timings, pair.drafter_name)
    mismatches = find_mismatches(pair.target, prompts, timings) if sampling.greedy else None
    unlike = None if mismatches is None else [asdict(entry) for entry in mismatches]
    lossless = _lossless(pair, prompts, timings, sampling, drafted, options)
    told = {"seed": options.seed, "batch": options.batch}
    rounds = metrics.pool(t.rounds for t in timings)
    graphs = None
    if frames is not None:
        asking = {"new": options.max_new_tokens, **told}
        graphs = frames.document(rounds, measure_eager(pair, prompts, timings, sampling, **asking))
    found = {
        "graphs": graphs,
        "lengths_by_entropy": lengths_by_entropy(rounds),
        "samples": samples(asked(suite, [t.speculative[0] for t in timings]), pair.chat.tokenizer),
        "mismatches": unlike,
        "lossless": lossless,
        "peer": None if peer is None else summarize_peer(timings, peer, seed=options.seed),
    }
    warnings = [
        *suite.notes,
        *suite.first_turn_note,
        *pair.warnings,
        *(() if costs is None else costs.warnings),
        *confidence_warnings(pair, drafted, sampling),
        *long_contexts(pair, timings),
        *fidelity_warnings(lossless),
        *mismatch_warnings(unlike, lossy=drafted.relaxed is not None),
        *mismatch_warnings(eager_mismatches(found), lossy=False),
        *frame_warnings(graphs),
        *metrics.sample_size_warnings(len(prompts)),
    ]
    asked_for = _asked_for(pair, suite, prompts, options, drafted, costs)
    return {
        **run_document(
            pair,
            drafted,
            sampling,
            max_new_tokens=options.max_new_tokens,
            summary=summarize(timings, **told) | (UNDIVIDED if options.graphs else {}),
            greedy_mismatches=None if mismatches is None else len(mismatches),
            relaxed=_relaxation(pair, suite, timings),
            batch=options.batch,
        ),
        "extra": {**asked_for, **details(timings, **told), **found, "warnings": warnings},
    }


def _asked_for(
    pair: Pair,
    suite: Suite,
    prompts: Sequence[list[int]],
    options: BenchOptions,
    drafted: Drafted,
    costs: Costs | None,
) -> dict[str, Any]:
    """What was measured on, for `extra`."""
    return {
        "prompts": suite.name,
        "prompts_available": suite.available,
        "prompts_sha256": hash_tokens(prompts),
        "draft_length": drafted.length(pair.drafter.config.block_size),
        "cost_model": None if costs is None else str(costs.path),
        "profile": costs.model.to_dict() if costs is not None and options.profile else None,
        "block_size": pair.drafter.config.block_size,
        "seed": options.seed,
        "repeats": options.repeats,
        "warmup_prompts": options.warmup,
    }


def _lossless(
    pair: Pair,
    prompts: Sequence[list[int]],
    timings: Sequence[PromptTimings],
    sampling: SamplingParams,
    drafted: Drafted,
    options: BenchOptions,
) -> dict[str, Any] | None:
    """Sampled texts of the first repeat against the target's law; greedy ones have plain decoding
    to agree with. None: greedy, or lossy by demand."""
    if sampling.greedy or drafted.relaxed is not None:
        return None
    texts = [
        (prompt, entry.speculative[0].tokens)
        for prompt, entry in zip(prompts, timings, strict=True)
    ]
    found = collect(pair.target, texts, sampling, seed=options.seed)
    return judge(found, sampling, tests=2 * len(options.temperature))


def _relaxation(
    pair: Pair, suite: Suite, timings: Sequence[PromptTimings]
) -> dict[str, Any] | None:
    """Right answers of the first repeat, plain beside relaxed."""
    exact, lossless = (
        exact_answers(pair, suite, [getattr(entry, way)[0] for entry in timings])
        for way in ("speculative", "plain")
    )
    return outcomes.relaxation(metrics.pool(t.rounds for t in timings), exact, lossless)


def _measure_setting(
    pair: Pair,
    prompts: Sequence[list[int]],
    options: BenchOptions,
    sampling: SamplingParams,
    drafted: Drafted,
    frames: Frames | None,
    peer: TransformersPeer | None,
) -> list[PromptTimings]:
    new = options.max_new_tokens
    if frames is None:
        plain = alone(pair.plain(sampling, new))
        speculative = alone(pair.speculative(sampling, new, drafted))
    else:
        plain, speculative = frames.plain, frames.speculative
    for index in range(options.warmup):
        prompt = prompts[-1 - index % len(prompts)]
        plain([prompt], options.seed)
        speculative([prompt], options.seed)
        if peer is not None:
            peer.measure(len(prompt), WARMUP_PEER_TOKENS)
    title = f"bench at temperature {sampling.temperature:g}"
    with progress(title, options.repeats * len(prompts), options.quiet) as advance:
        return measure(
            prompts,
            plain,
            speculative,
            repeats=options.repeats,
            seed=options.seed,
            batch=options.batch,
            peer=peer,
            advance=advance,
        )
