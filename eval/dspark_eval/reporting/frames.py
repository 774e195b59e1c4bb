"""Sections of recorded frames by rule (`frame_policies`) and of plain decoding beside the floor
that its bytes set (`decode_speed`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import NOT_MEASURED, interval, number, percent
from dspark_eval.reporting.blocks import Block, Prose, Section, notes, table
from dspark_eval.reporting.words import machine, name

Values = Mapping[str, Any]
HEADS = (
    "prompt set", "way", "prompts", "tokens/s", "speed-up", "accepted length", "frame p50, ms",
    "frame p99, ms", "experts of a layer", "J/token", "same text",
)  # fmt: skip


def by_rule(source: str, value: Any) -> Section:
    """A table for each batch and temperature, a row for each way on each set of prompts."""
    blocks: list[Block] = [
        Prose(
            f"`{value['target']}`, at most {counted(value['max_new_tokens'], 'new token')}, seed "
            f"{value['seed']}, {machine(value['environment'])}. All ways are recorded graphs of "
            f"one process that take turns on the prompts: `{value['command']}`"
        )
    ]
    for run in value["runs"]:
        title = f"{counted(run['batch'], 'seat')}, temperature {run['temperature']:g}"
        blocks.append(table(title, HEADS, _rows(run["sets"]), texts=2))
    blocks += notes(value["warnings"])
    return Section(f"Recorded frames by rule: {name(value['target'])}", tuple(blocks), source)


def speculative(value: Values) -> Iterator[tuple[str, float, Values, str]]:
    """Prompts and way, temperature, figures and equal texts of all but plain frames."""
    for run in value["runs"]:
        for suite, ways in run["sets"].items():
            for way, figures in list(ways.items())[1:]:
                said = f"{suite}, {way}, batch {run['batch']}"
                yield said, run["temperature"], figures, _same(figures)


def _rows(sets: Mapping[str, Mapping[str, Values]]) -> Iterator[Sequence[str]]:
    for suite, ways in sets.items():
        for way, found in ways.items():
            experts, joules = found["experts"], found["energy"]
            yield (
                suite,
                way,
                str(found["n_prompts"]),
                number(found["tokens_per_s"], 1),
                f"{number(found['speedup'], 2)}x {interval(found['speedup_ci95'])}",
                _length(found),
                number(found["frame_ms_p50"], 2),
                number(found["frame_ms_p99"], 2),
                NOT_MEASURED
                if experts is None
                else f"{number(experts, 1)} (of {counted(found['experts_prompts'], 'prompt')})",
                NOT_MEASURED if joules is None else number(joules["joules_per_token"], 3),
                _same(found),
            )


def _length(found: Values) -> str:
    if found.get("accepted_length") is None:
        return NOT_MEASURED
    return f"{number(found['accepted_length'], 2)} {interval(found['accepted_length_ci95'])}"


def _same(found: Values) -> str:
    if "divergences" not in found:
        return NOT_MEASURED
    n = found["n_prompts"]
    return f"{n - len(found['divergences'])} of {n} texts"


def floor(source: str, value: Any) -> Section:
    """Tokens per second against the time that a copy of a token's bytes takes."""
    rows = [
        ("floor of its bytes", number(value["floor_tokens_per_s"], 1), percent(1.0)),
        ("frames back to back", number(1e6 / value["frame_us"], 1), percent(value["frame_share"])),
        ("generate", number(value["generate_tokens_per_s"], 1), percent(value["generate_share"])),
    ]
    if "peer" in value:
        peer = value["peer"]
        share = peer["tokens_per_s"] / value["floor_tokens_per_s"]
        rows.append((peer["name"], number(peer["tokens_per_s"], 1), percent(share)))
    blocks: list[Block] = [
        Prose(
            f"`{value['shape']}`, {value['parameters'] / 1e9:.2f} billion parameters, "
            f"{value['bytes']['total'] / 1e9:.3f} GB a token, a copy at "
            f"{value['copy_bytes_per_s'] / 1e12:.3f} TB/s; generate: one prompt, "
            f"{counted(value['generate']['tokens'], 'token')}; seed {value['seed']}, "
            f"{machine(value['environment'])}: `{value['command']}`"
        ),
        table("Plain decoding, one request", ("way", "tokens/s", "of the floor"), rows),
        *notes(value["warnings"]),
    ]
    return Section(f"Decoding against its bytes: {value['shape']}", tuple(blocks), source)
