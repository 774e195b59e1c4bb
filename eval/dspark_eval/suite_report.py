"""One prompt set of `dspark eval`: its conversations decoded, and all that is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dspark.runtime.cost_model import CostModel
from dspark.runtime.records import Generation
from dspark_eval import fidelity, metrics, outcomes, profiles, sweeps
from dspark_eval.concurrency import serve
from dspark_eval.confidence import confidence_report
from dspark_eval.conversations import Conversation, Turn, broken_notes, hold_conversations
from dspark_eval.document import run_document
from dspark_eval.drafting import Drafted
from dspark_eval.grading import Grades, answer_texts, grade
from dspark_eval.intervals import paired, share
from dspark_eval.lengths import long_contexts, require_proposals
from dspark_eval.lengths_by_entropy import lengths_by_entropy
from dspark_eval.mismatches import find_mismatches
from dspark_eval.pair import Pair
from dspark_eval.rounds_file import RoundsFile
from dspark_eval.samples import Answered, samples
from dspark_eval.settings import EvalOptions
from dspark_eval.speed import PromptTimings, hash_tokens, summarize
from dspark_eval.suites import Suite
from dspark_eval.verdicts import mismatch_warnings


@dataclass(frozen=True)
class SuiteRun:
    """What is evaluated: a pair on one set, and how. tests: of losslessness, in the whole run.
    rounds: takes every round, where they are asked for."""

    pair: Pair
    suite: Suite
    drafted: Drafted
    options: EvalOptions
    cost: CostModel | None = None
    tests: int = 2
    rounds: RoundsFile | None = None


def eval_suite(run: SuiteRun, advance: Callable[[], None]) -> dict[str, Any]:
    """The keys of a bench run, what concerns plain speed null, and the keys of an evaluation."""
    pair, options, sampling = run.pair, run.options, run.options.sampling()
    prompts = pair.prompt_ids(run.suite)
    held = _hold(run, prompts, run.drafted, advance)
    if run.rounds is not None:
        run.rounds.add(run.suite, held)
    timings = [conversation.timings for conversation in held]
    require_proposals(timings, pair.drafter_name)
    turns = [turn for conversation in held for turn in conversation.turns]
    by_prompt = [timing.rounds for timing in timings]
    rounds, answers = metrics.pool(by_prompt), [turn.answer for turn in turns]
    grades = _grade(run, held)
    plain = _plain(run, held, grades)
    lossless = _lossless(run, turns)
    summary = summarize(timings, seed=options.seed)
    return {
        **run_document(
            pair,
            run.drafted,
            sampling,
            max_new_tokens=options.max_new_tokens,
            summary=summary,
            greedy_mismatches=None if plain is None else plain["greedy_mismatches"],
            relaxed=_relaxation(run, prompts, held, grades),
        ),
        "n_rounds": len(rounds),
        "emitted": [sum(record.emitted for record in own) for own in by_prompt],
        "rounds": [len(own) for own in by_prompt],
        "n_turns": len(turns),
        "prompts_available": run.suite.available,
        "prompts_sha256": hash_tokens(prompts),
        **_acceptance(run, held, by_prompt),
        "loop_share": metrics.loop_share([answer.tokens for answer in answers]),
        "accepted_length_without_loops": metrics.accepted_length_without_loops(answers),
        "warnings": [
            *long_contexts(pair, timings),
            *broken_notes(held),
            *grades.notes,
            *fidelity.fidelity_warnings(lossless),
            *mismatch_warnings(
                None if plain is None else plain["mismatches"],
                lossy=run.drafted.relaxed is not None,
            ),
        ],
        "finished_share": sum(answer.finish == "end" for answer in answers) / len(answers),
        "exact_answers": grades.share,
        "task": _share(grades.marks),
        "plain": plain,
        "lossless": lossless,
        "served": _served(run, prompts),
        "confidence": confidence_report(pair, sampling, by_prompt),
        "samples": samples([Answered(t.question, t.answer) for t in turns], pair.chat.tokenizer),
    }


def _hold(
    run: SuiteRun, prompts: Sequence[list[int]], drafted: Drafted, advance: Callable[[], None]
) -> list[Conversation]:
    """Decode every conversation. Where all are of one turn, a long beginning is read once."""
    pair, options, rows = run.pair, run.options, run.suite.rows
    several = options.turns != 1 and any(row.later_turns for row in rows)
    sampling, most = options.sampling(), options.max_new_tokens
    decode = (
        pair.speculative(sampling, most, drafted)
        if several
        else pair.speculative_after(prompts, sampling, most, drafted)
    )
    return hold_conversations(
        pair.chat,
        rows,
        prompts,
        decode,
        seed=options.seed,
        turns=options.turns,
        advance=advance,
    )


def _acceptance(
    run: SuiteRun, held: Sequence[Conversation], by_prompt: Sequence[metrics.Rounds]
) -> dict[str, Any]:
    """Every figure with its interval, and acceptance as a function of what a round met."""
    rounds, seed = metrics.pool(by_prompt), run.options.seed
    by_turn = [(i, turn) for i, conversation in enumerate(held) for turn in conversation.turns]
    buckets = profiles.context_buckets(
        [len(turn.prompt) for _, turn in by_turn],
        [turn.answer.rounds for _, turn in by_turn],
        owners=[owner for owner, _ in by_turn],
    )
    found = metrics.estimates([conversation.answers for conversation in held], seed=seed)
    positions = metrics.position_estimates(by_prompt, seed=seed)
    chain = run.drafted.method == "token"  # block verification of a cut block judges otherwise
    curve = sweeps.threshold_curve(by_prompt) if chain else None
    return {
        "accepted_length_without_bonus": metrics.accepted_length_without_bonus(rounds),
        "block_efficiency": found["block_efficiency"].value,
        "draft_share": metrics.draft_share(rounds),
        "prefix_survival": metrics.prefix_survival(rounds),
        "accepted_length_percentiles": metrics.accepted_length_percentiles(by_prompt),
        "estimates": {name: asdict(value) for name, value in found.items()},
        "positions": {k: [asdict(value) for value in v] for k, v in positions.items()},
        "level_estimates": {
            name: asdict(value) for name, value in outcomes.level_estimates(by_prompt).items()
        },
        "context_buckets": [asdict(bucket) for bucket in buckets],
        "entropy": asdict(profiles.entropy_profile(by_prompt)),
        "lengths_by_entropy": lengths_by_entropy(rounds),
        "thresholds": None if curve is None else [asdict(point) for point in curve],
        "goodput": None
        if run.cost is None or not chain
        else [asdict(point) for point in sweeps.goodput(by_prompt, run.cost)],
    }


# ------------------------------------------------------------------ right answers, right texts


def _grade(run: SuiteRun, held: Sequence[Conversation]) -> Grades:
    """The last answer of each conversation; one that broke off early is not graded."""
    texts = answer_texts(run.pair, [conversation.answers[-1] for conversation in held])
    found = grade(run.suite, texts, run_code=run.options.run_code)
    marks = (
        None if conversation.broken else mark
        for mark, conversation in zip(found.marks, held, strict=True)
    )
    return replace(found, marks=tuple(marks))


def _share(marks: Sequence[bool | None]) -> dict[str, Any] | None:
    known = [mark for mark in marks if mark is not None]
    return asdict(share(known)) if known else None


def _plain(run: SuiteRun, held: Sequence[Conversation], grades: Grades) -> dict[str, Any] | None:
    """Plain decoding on the first `--plain` conversations, turn by turn after the same history.

    `greedy_mismatches`: answers that are not the same text at temperature 0. `task`: its right
    answers, and those of speculative decoding over them on the same prompts, in pairs.
    """
    options, some = run.options, held[: run.options.plain]
    if not some:
        return None
    sampling, total = options.sampling(), len(run.suite.rows)
    decode = run.pair.plain(sampling, options.max_new_tokens)
    timings: list[PromptTimings] = []
    last: list[Generation] = []
    for index, conversation in enumerate(some):
        for number, turn in enumerate(conversation.turns):
            answer = decode(turn.prompt, options.seed + index + number * total)
            timings.append(PromptTimings(len(turn.prompt), [answer], [turn.answer]))
        last.append(answer)
    suite = replace(run.suite, rows=run.suite.rows[: len(some)])
    marks = grade(suite, answer_texts(run.pair, last), run_code=options.run_code).marks
    both = [
        ((float(a), 1.0), (float(b), 1.0))
        for a, b in zip(grades.marks, marks, strict=False)
        if a is not None and b is not None
    ]
    prompts = [turn.prompt for conversation in some for turn in conversation.turns]
    found = find_mismatches(run.pair.target, prompts, timings) if sampling.greedy else None
    against = paired([a for a, _ in both], [b for _, b in both], seed=options.seed)
    return {
        "n_prompts": len(some),
        "n_answers": len(timings),
        "greedy_mismatches": None if found is None else len(found),
        "mismatches": None if found is None else [asdict(entry) for entry in found],
        "against_speculative": asdict(against) if both else None,
        "task": _share(marks),
    }


def _lossless(run: SuiteRun, turns: Sequence[Turn]) -> dict[str, Any] | None:
    """See `fidelity`. None: switched off, lossy by demand, or contexts too long to read again."""
    if not run.options.check_texts or run.drafted.relaxed is not None or run.suite.context:
        return None
    sampling = run.options.sampling()
    texts = [(turn.prompt, turn.answer.tokens) for turn in turns]
    found = fidelity.collect(run.pair.target, texts, sampling, seed=run.options.seed)
    return fidelity.judge(found, sampling, tests=run.tests)


def _served(run: SuiteRun, prompts: Sequence[list[int]]) -> list[dict[str, Any]] | None:
    """First turns at every concurrency asked for; None without any."""
    options = run.options
    if not options.concurrency:
        return None
    found = serve(
        run.pair,
        prompts,
        run.drafted,
        options.sampling(),
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        sizes=options.concurrency,
    )
    return [asdict(point) for point in found]


def _relaxation(
    run: SuiteRun, prompts: Sequence[list[int]], held: Sequence[Conversation], grades: Grades
) -> dict[str, Any] | None:
    """What a relaxed run cost, against the same prompts without relaxation; None if lossless."""
    if run.drafted.relaxed is None:
        return None
    strict = _hold(run, prompts, replace(run.drafted, relaxed=None), lambda: None)
    rounds = metrics.pool(answer.rounds for c in held for answer in c.answers)
    return outcomes.relaxation(rounds, grades.share, _grade(run, strict).share)
