"""Sections of `dspark bench` and of recorded frames: plain against speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import interval, number, percent, round_parts
from dspark_eval.plots import draw_positions, draw_speed, draw_split
from dspark_eval.report_notes import frame_line, mismatch_lines, policy_words
from dspark_eval.reporting.blocks import Block, Picture, Prose, Samples, Section, notes, table
from dspark_eval.reporting.figures import panel, plot_lengths, plot_timeline, with_legend
from dspark_eval.reporting.words import HOW_SURE, label, machine, name, positions_alt

Run = Mapping[str, Any]


def bench(source: str, value: Any) -> Section:
    """A table, the pictures of speed and acceptance, and the first setting's rounds closer up."""
    runs = value.get("runs", [value])
    return Section(f"Speed: {name(runs[0]['drafter'])}", tuple(_bench(runs)), source)


def _bench(runs: Sequence[Run]) -> Iterator[Block]:
    first, extra = runs[0], runs[0]["extra"]
    length = f"draft length {extra['draft_length']}"
    if first["policy"] != "fixed" or first.get("verification", "token") != "token":
        length = f"policy {policy_words(first)}"
    yield Prose(
        f"`{first['drafter']}` for `{first['target']}`, batch {first['batch']}, {length}, "
        f"{counted(first['n_prompts'], 'prompt')} of "
        f"{extra['prompts']}, at most {counted(first['max_new_tokens'], 'new token')}, seed "
        f"{extra['seed']}, {machine(first['environment'])}. Both ways in one process, in turn on "
        "every prompt; tokens per second after the first token; 95 % bootstrap over prompts."
    )
    yield table(
        "Each sampling setting",
        ("temperature", "plain, tokens/s", "speculative", "speed-up", "accepted length",
         "accepted drafts", f"ms a round: {' + '.join(part for part, _ in round_parts(first))}",
         "same text"),
        map(_bench_row, runs),
        texts=0,
    )  # fmt: skip
    yield from notes(
        line for run in runs for line in (*run["extra"]["warnings"], *_mismatches(run))
    )
    n = f"n = {counted(first['n_prompts'], 'prompt')}, {machine(first['environment'], short=True)}"
    yield Picture(
        "speed",
        "Tokens per second after the first token; whiskers: 95 % over prompts.",
        "; ".join(
            f"Temperature {run['temperature']:g}: plain {run['plain_tokens_per_s']:.1f}, "
            f"speculative {run['speculative_tokens_per_s']:.1f} tokens per second, speed-up "
            f"{run['speedup']:.2f}"
            for run in runs
        ),
        partial(panel, partial(draw_speed, runs=runs), title=n),
    )
    curves = {f"temperature {run['temperature']:g}": {**run, **run["extra"]} for run in runs}
    yield Picture(
        "acceptance",
        f"Chance that a draft is accepted once all before it were, by its position. {HOW_SURE}",
        positions_alt(curves),
        partial(
            panel, partial(draw_positions, curves=curves), title=n, size=with_legend(len(curves))
        ),
    )
    yield Picture(
        "rounds",
        "Where a round's time goes, beside the plain steps that give as many tokens.",
        "; ".join(
            f"Temperature {run['temperature']:g}: "
            f"{', '.join(f'{part} {ms:.2f}' for part, ms in round_parts(run))} milliseconds a round"
            for run in runs
        ),
        partial(panel, partial(draw_split, runs=runs), title=n),
    )
    yield from round_blocks(
        {f"temperature {run['temperature']:g}": {**run, **run["extra"]} for run in runs}
    )


def round_blocks(runs: Mapping[str, Run]) -> Iterator[Block]:
    """Draft lengths by entropy and a timeline of the first run, and the sampled texts of all."""
    setting, first = next(iter(runs.items()))
    bins = first.get("lengths_by_entropy", ())
    for key in _told(bins):
        verb = "sent to the target" if key == "verified" else "accepted"
        yield Picture(
            f"drafts-{key}",
            f"Drafts {verb} in a round, by how unsure the drafter was of the block ({setting}).",
            f"Mean number of drafts {verb}: "
            + "; ".join(f"{_mean(found[key]):.1f} {_bin(found)}" for found in bins),
            partial(
                plot_lengths,
                bins,
                key,
                f"{label(setting)}, n = {counted(sum(found['rounds'] for found in bins), 'round')}",
            ),
        )
    samples = first.get("samples", ())
    if samples:
        sample, plain_ms = samples[0], first.get("plain_ms_per_token")
        yield Picture(
            "timeline",
            f"The first rounds of one answer ({setting}, {sample['why']} accepted length): tokens "
            "over time, and the parts of each round below.",
            _timeline_alt(sample, plain_ms),
            partial(
                plot_timeline,
                sample,
                plain_ms,
                f"{label(setting)}, n = 1 answer of {counted(sample['tokens'], 'token')}",
            ),
        )
    entries = [{"label": key, **s} for key, r in runs.items() for s in r.get("samples", ())]
    if entries:
        yield Samples(tuple(entries))


def _told(bins: Sequence[Run]) -> Iterator[str]:
    """Numbers of drafts worth a picture: a policy that always sends the same has none of them."""
    if not bins:
        return
    sent = [sum(column) for column in zip(*(found["verified"] for found in bins), strict=True)]
    if max(sent) < 0.6 * sum(sent):
        yield "verified"
    yield "accepted"


def _mean(counts: Sequence[int]) -> float:
    return sum(k * count for k, count in enumerate(counts)) / sum(counts)


def _bin(found: Run) -> str:
    high = "up" if found["high"] is None else f"to {found['high']:g}"
    return f"from {found['low']:g} {high} nats"


def _timeline_alt(sample: Run, plain_ms: float | None) -> str:
    rounds = sample["rounds"]
    spent = sum(r["draft_ms"] + r["verify_ms"] + r["other_ms"] for r in rounds)
    text = f"{sum(r['emitted'] for r in rounds)} tokens in {len(rounds)} rounds, {spent:.0f} ms"
    return text if plain_ms is None else f"{text}; a plain step takes {plain_ms:.1f} ms"


def _bench_row(run: Run) -> Sequence[str]:
    mismatches, prompts = run["greedy_mismatches"], run["n_prompts"]
    return (
        f"{run['temperature']:g}",
        number(run["plain_tokens_per_s"], 1),
        number(run["speculative_tokens_per_s"], 1),
        f"{number(run['speedup'], 2)}x {interval(run['speedup_ci95'])}",
        f"{number(run['accepted_length'], 2)} {interval(run['accepted_length_ci95'])}",
        percent(run["acceptance_rate"]),
        " + ".join(number(ms, 2) for _, ms in round_parts(run)),
        "-" if mismatches is None else f"{prompts - mismatches} of {prompts}",
    )


def _mismatches(run: Run) -> Iterator[str]:
    setting = f"temperature {run['temperature']:g}"
    yield from mismatch_lines(run, setting)
    yield from frame_line(run, setting)


def frames(source: str, value: Any) -> Section:
    """Recorded frames, plain and speculative, by prompt set."""
    plain = "; plain decoding was the fastest" if value["chosen"] == "plain" else ""
    blocks: list[Block] = [
        Prose(
            f"`{value['target']}`, {counted(value['batch'], 'seat')}, draft length "
            f"{value['draft_length']}{plain}, temperature {value['temperature']:g}, "
            f"{machine(value['environment'])}. Both ways are recorded graphs of one process: "
            f"`{value['command']}`"
        ),
        table(
            "Each prompt set",
            ("prompt set", "prompts", "plain, tokens/s", "speculative", "speed-up",
             "accepted length", "frame p50, ms", "frame p99, ms", "same text"),
            (_frames_row(suite, found) for suite, found in value["suites"].items()),
        ),
    ]  # fmt: skip
    curves = {
        f"{label(suite)} (n = {counted(found['n_prompts'], 'prompt')})": found
        for suite, found in value["suites"].items()
    }
    where = machine(value["environment"], short=True)
    drawn = partial(
        panel, partial(draw_positions, curves=curves), title=where, size=with_legend(len(curves))
    )
    caption = "Chance that a draft is accepted once all before it were, by its position."
    blocks.append(Picture("acceptance", caption, positions_alt(curves), drawn))
    blocks += notes(value.get("warnings", ()))
    return Section(f"Recorded frames: {name(value['target'])}", tuple(blocks), source)


def _frames_row(suite: str, found: Run) -> Sequence[str]:
    plain, fast, equal = found["plain"], found["speculative"], found["texts_equal"]
    return (
        suite,
        str(found["n_prompts"]),
        number(plain["tokens_per_s"], 1),
        number(fast["tokens_per_s"], 1),
        f"{number(found['speedup'], 2)}x {interval(found['speedup_ci95'])}",
        f"{number(found['accepted_length'], 2)} {interval(found['accepted_length_ci95'])}",
        number(fast["frame_ms_p50"], 2),
        number(fast["frame_ms_p99"], 2),
        "-" if equal is None else f"{equal} of {found['n_prompts']}",
    )
