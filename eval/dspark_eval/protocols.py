"""A published way to measure, by name: the settings that its numbers depend on, in one place.

`dspark-paper`: temperature 1.0, chain, block 7, standard rejection sampling, no threshold, first
turn only, accepted length with the bonus token (DSpark paper, Table 1; DeepSpec's evaluator, whose
files have later turns and whose reader drops them). What a protocol fixes cannot be given another
value beside it; what only makes a run larger or smaller can, and is stated with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.errors import UserError
from dspark.wording import counted
from dspark_eval.public_sets import PUBLIC_SETS


@dataclass(frozen=True)
class Protocol:
    """fixed: may not differ. usual: used unless something else is given, which is then said.
    dtype: what it ran in; any is allowed, and said."""

    name: str
    source: str
    fixed: Mapping[str, Any]
    usual: Mapping[str, Any]
    dtype: str
    counts: str


PROTOCOLS = {
    "dspark-paper": Protocol(
        name="dspark-paper",
        source="DSpark paper, Table 1; DeepSpec eval.py",
        fixed={
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "policy": "fixed",
            "draft_length": 7,
            "bands": False,
            "verification": "token",
            "relaxed": False,
            "turns": 1,
        },
        usual={"n_prompts": None, "max_new_tokens": 2048, "seed": 980406},
        dtype="bfloat16",
        counts="accepted length and acceptance rate with the bonus token, pooled over rounds: "
        "accepted_length and acceptance_rate_with_bonus",
    )
}


def find_protocol(name: str) -> Protocol:
    """Raises UserError for a name that is none."""
    if name not in PROTOCOLS:
        raise UserError(f"--protocol: expected one of {', '.join(PROTOCOLS)}; got {name!r}")
    return PROTOCOLS[name]


def with_protocol(name: str | None, given: Mapping[str, Any], all_: Mapping[str, Any]) -> dict:
    """`all_` options with the protocol's in place of those that were not `given` by the user."""
    if name is None:
        return dict(all_)
    protocol = find_protocol(name)
    return {**all_, **protocol.fixed, **protocol.usual, **given}


def check_protocol(name: str | None, options: Any) -> None:
    """Raise UserError if options have another value than the protocol fixes."""
    if name is None:
        return
    for key, wanted in find_protocol(name).fixed.items():
        value = getattr(options, key)
        if value != wanted:
            option = f"--{key.replace('_', '-')}"
            raise UserError(
                f"{option}: protocol {name} has {wanted}, not {value}; leave {option} or "
                "--protocol out"
            )


@dataclass(frozen=True)
class Measured:
    """What a run had before it. blocks: trained block size by drafter; rows: prompts by set."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)


def departures(name: str | None, options: Any, measured: Measured | None = None) -> Iterator[str]:
    """Where a run differs from its protocol in what may differ, one sentence each.

    A drafter trained for another block and cut to the protocol's is one that the paper did not
    measure, and so is a set of fewer prompts than its own.
    """
    if name is None:
        return
    protocol = find_protocol(name)
    for key, wanted in protocol.usual.items():
        value = getattr(options, key)
        if value != wanted:
            usual = "the paper's number of each set" if wanted is None else wanted
            yield f"protocol {name}: {key} is {value} here, {usual} there"
    if options.dtype != protocol.dtype:
        yield f"protocol {name}: dtype is {options.dtype} here, {protocol.dtype} there"
    measured, block = measured or Measured(), protocol.fixed["draft_length"]
    for drafter, trained in measured.blocks.items():
        if trained != block:
            yield f"protocol {name}: {drafter} was trained with block {trained}, {block} there"
    for suite, rows in measured.rows.items():
        if suite in PUBLIC_SETS and rows != PUBLIC_SETS[suite].size:
            size = PUBLIC_SETS[suite].size
            yield f"protocol {name}: {suite} has {counted(rows, 'prompt')} here, {size} there"
        elif suite not in PUBLIC_SETS:
            yield f"protocol {name}: {suite} is none of the paper's sets"


def protocol_document(
    name: str | None, options: Any, measured: Measured | None = None
) -> dict[str, Any] | None:
    """For JSON, beside the numbers."""
    if name is None:
        return None
    protocol = find_protocol(name)
    return {
        "name": name,
        "source": protocol.source,
        "fixed": dict(protocol.fixed),
        "counts": protocol.counts,
        "departures": list(departures(name, options, measured)),
    }
