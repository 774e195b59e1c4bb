"""Lines under the tables: what a figure rests on, and what would make it mean something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dspark.runtime.cost_model import cost_model_from_dict
from dspark.wording import counted
from dspark_eval.cells import interval, number, percent, rate
from dspark_eval.verdicts import verdict

SHOWN_MISMATCHES = 3


def policy_words(run: Mapping[str, Any]) -> str:
    """The policy with its settings, in a few words."""
    settings = dict(run["policy_settings"])
    length, inner = settings["draft_length"], settings.get("inner", {})
    bands = settings.get("bands", inner.get("bands"))
    words = [run["policy"]]
    words += [f"around {inner['name']}"] if inner else []
    for name in ("h_stop", "s_stop"):
        value = settings.get(name, inner.get(name))
        words += [] if value is None else [f"{name} {value:g}"]
    words += [f"at most {length}" if run["policy"] != "fixed" else f"{length}"]
    if bands is not None:
        words += [
            f"bands at {bands['high']:g} and {bands['low']:g} with "
            f"{counted(bands['siblings'], 'sibling')}"
        ]
    words += [f"{run['verification']} verification"]
    return ", ".join(words)


def outcome_lines(run: Mapping[str, Any], name: str) -> Iterator[str]:
    """How rounds ended, and what became of the positions of each band."""
    levels = run["levels"]
    if levels is None:
        return
    ends = ", ".join(f"{key.replace('_', ' ')} {percent(value)}" for key, value in levels.items())
    yield (
        f"{name}: rounds ended {ends}; {number(run['rows_per_round'], 2)} rows a "
        f"round, {number(run['draft_length_mean'], 2)} of them drafts that were judged"
    )
    if run["bands"] is not None:
        parts = (_band(band, found) for band, found in run["bands"].items())
        yield f"{name}: drafted positions by band {', '.join(parts)}"


def _band(band: str, found: Mapping[str, Any]) -> str:
    rate = found["acceptance"]
    what = "never reached"
    if rate is not None:
        few = f", few: of {counted(found['n_prompts'], 'prompt')}" * found["few"]
        what = f"accepted {percent(rate)} of {found['reached']}{few}"
    return f"{band} {percent(found['share'])} ({what})"


def relaxed_line(run: Mapping[str, Any], name: str) -> Iterator[str]:
    """For a lossy run: by how much, beside whatever else is said of it."""
    found = run["relaxed"]
    if found is None:
        return
    change = found["accuracy_change"]
    shift = "not measured" if change is None else f"{100 * change:+.1f} points"
    yield (
        f"{name}: RELAXED acceptance, not the target's distribution: TV distance "
        f"{found['tv_mean']:.4f} per token on average, {found['tv_max']:.3f} at most; exact "
        f"answers {percent(found['exact_answers'])} against "
        f"{percent(found['exact_answers_lossless'])} without it ({shift})"
    )


def relaxed_label(run: Mapping[str, Any]) -> str:
    """The same in a table, in the row of the numbers it touches."""
    found = run["relaxed"]
    if found is None:
        return ""
    change = found["accuracy_change"]
    shift = "" if change is None else f", accuracy {100 * change:+.1f} points"
    return f"\nRELAXED: TV {found['tv_mean']:.4f}{shift}"


def stops_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Thresholds that were fitted along with a confidence."""
    stops = report["stops"]
    if stops is None:
        return
    rates = ", ".join(f"{name} {rate(value)}" for name, value in stops["tokens_per_s"].items())
    yield (
        f"temperature {report['temperature']:g}: h_stop {stops['h_stop']:g}, s_stop "
        f"{number(stops['s_stop'], 2)}, best constant length {stops['draft_length']}; modelled "
        f"tokens/s {rates}; `auto` takes {stops['best']}"
    )


def cost_lines(extra: Mapping[str, Any]) -> Iterator[str]:
    """Step times that were measured just now, and what they ask of a drafter."""
    if extra["profile"] is None:
        return
    model = cost_model_from_dict(extra["profile"])
    for costs in model.batches:
        lengths = sorted(costs.draft)
        pays = ", ".join(
            f"{number(model.break_even(g, 1 + g, costs.batch), 2)} (draft {g})" for g in lengths
        )
        rows = counted(1 + lengths[-1], "row")
        verify = f"{1e3 * costs.verify[1 + lengths[-1]]:.2f} ms"
        parts = f"draft {1e3 * costs.draft[lengths[-1]]:.2f} ms, verify {verify} of {rows}"
        kind = "step"
        if "frames" in model.environment:
            kind, parts = "frame", f"drafting {verify} of {rows}"
        yield (
            f"{kind} times, batch {costs.batch}: plain {1e3 * costs.plain:.2f} ms, {parts}; "
            f"speculation pays above tau = {pays}"
        )
    yield f"written to {extra['cost_model']}"


def frame_line(run: Mapping[str, Any], name: str) -> Iterator[str]:
    """Of recorded frames: what they were, and plain decoding pass by pass beside them."""
    graphs = run["extra"].get("graphs")
    if graphs is None:
        return
    eager, ratio = graphs["eager"], ""
    if eager["frames_over_eager"] is not None:
        bounds = interval(eager["frames_over_eager_ci95"])
        ratio = f", plain frames {number(eager['frames_over_eager'], 2)}x of it {bounds}".rstrip()
    yield (
        f"{name}: both ways by {graphs['frames']} frames of {counted(graphs['seats'], 'seat')}; "
        f"plain decoding pass by pass, one prompt at a time, "
        f"{rate(eager['plain_tokens_per_s'])} tokens/s{ratio} "
        f"({counted(eager['n_prompts'], 'prompt')})"
    )


def mismatch_lines(run: Mapping[str, Any], name: str) -> Iterator[str]:
    """Where greedy text left that of plain decoding, and how close the call was."""
    found = run["extra"]["mismatches"]
    if not found:
        return
    near = sum(entry["near_tie"] for entry in found)
    yield (
        f"{name}: {counted(len(found), 'answer')} unlike plain decoding's, {near} of them first at "
        "a near-tie of the two best tokens"
    )
    for entry in found[:SHOWN_MISMATCHES]:
        yield (
            f"  prompt {entry['prompt']}, token {entry['position']}: plain "
            f"{entry['plain_token']}, speculative {entry['speculative_token']}, gap of the top "
            f"two logits {entry['top2_gap']:.3g}"
        )


def evaluation_lines(suite: Mapping[str, Any], name: str) -> Iterator[str]:
    """What else an evaluation found: costs of a round, answers, texts, thresholds."""
    sure = suite["estimates"]["accepted_length"]
    turns = f" in {counted(suite['n_turns'], 'turn')}" * (suite["n_turns"] > suite["n_prompts"])
    spread = ""
    if sure["spread"] is not None:  # of one prompt there is none
        spread = f", accepted length of a prompt +- {number(sure['spread'], 2)}"
    yield (
        f"{name}: {counted(suite['n_rounds'], 'round')} of {counted(sure['n_prompts'], 'prompt')}"
        f"{turns}{spread}; without the bonus "
        f"{number(suite['accepted_length_without_bonus'], 2)}, block efficiency "
        f"{number(suite['block_efficiency'], 2)}, drafting takes "
        f"{percent(suite['draft_share'])} of the time"
    )
    yield from _task_lines(suite, name)
    if suite["lossless"] is not None:
        yield f"{name}: {lossless_words(suite['lossless'])}"
    if suite["thresholds"] is not None:
        points = ", ".join(
            f"{point['threshold']:g}: {number(point['accepted_length'], 2)} of "
            f"{number(1 + point['draft_length'], 2)}"
            for point in suite["thresholds"][::2]
        )
        yield f"{name}: tokens per round of rows sent, cut at confidence {points}"
    for point in suite["served"] or ():
        yield (
            f"{name}: {counted(point['concurrency'], 'request')} at once, measured: "
            f"{rate(point['speculative'])} tokens/s against {rate(point['plain'])} plain, "
            f"{number(point['speedup'], 2)}x {interval(point['speedup_ci95'])}".rstrip()
            + ", "
            f"{counted(point['groups'], 'group')}, prefill included"
        )
    for point in suite["goodput"] or ():
        yield (
            f"{name}: {counted(point['concurrency'], 'request')} at once: modelled tokens/s "
            f"{rate(point['speculative'])} (draft {point['draft_length']}) against "
            f"{rate(point['plain'])} plain, {number(point['speedup'], 2)}x"
        )


def _task_lines(suite: Mapping[str, Any], name: str) -> Iterator[str]:
    plain, task = suite["plain"], suite["task"]
    if task is not None:
        against = "" if plain is None else f", plain decoding {_share_words(plain['task'])}"
        yield f"{name}: right answers {_share_words(task)}{against}"
    if plain is not None and plain["greedy_mismatches"] is not None:
        same = plain["n_answers"] - plain["greedy_mismatches"]
        near = sum(entry["near_tie"] for entry in plain["mismatches"])
        odd = f", {near} of the others first at a near-tie" * bool(plain["mismatches"])
        yield (
            f"{name}: {same} of {counted(plain['n_answers'], 'answer')} equal to plain "
            f"decoding's{odd}"
        )


def _share_words(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return percent(None)
    bounds = found["ci95"]
    shown = "" if bounds is None else f" [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"
    return f"{percent(found['value'])}{shown} of {found['n']:.0f}"


def lossless_words(found: Mapping[str, Any]) -> str:
    """Whether the texts are the target's, and what would have been noticed."""
    tokens = counted(found["tokens"], "token", ",")
    if found["method"] == "greedy":
        near = counted(found["near_ties"], "near-tie")
        return f"{found['not_best'] - found['near_ties']} of {tokens} not the target's best, {near}"
    if found["passed"] is None:
        return f"{tokens}: too few to hold against the target's law"
    tests = [f"p {found[key]['p']:.2g} ({key})" for key in ("rank", "surprise") if found[key]]
    law = f"{', '.join(tests)}; false alarms below {found['false_alarm']:g} a run"
    if not found["passed"]:
        return f"{tokens} DO NOT AGREE WITH the target's law: {law}"
    return f"{tokens} against the target's law: {verdict(found)} ({law}; TV of ranks)"
