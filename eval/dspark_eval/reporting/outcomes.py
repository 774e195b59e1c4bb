"""Tables of an evaluation that say what became of drafts: by position, end of round, band, entropy.

Every share stands with its interval and with what it is of. `few`: under `MIN_PROMPTS` prompts
got there, and the interval itself is not to be relied on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark_eval.cells import NOT_MEASURED, interval, number, percent, percent_of
from dspark_eval.reporting.blocks import Block, table

Suites = Mapping[str, Mapping[str, Any]]


def positions_table(suites: Suites) -> Block:
    """Conditional acceptance; what an older file does not tell of its n is left out."""
    longest = max(len(suite["conditional_acceptance"]) for suite in suites.values())
    return table(
        "Conditional acceptance by draft position",
        ("prompt set", *map(str, range(1, longest + 1))),
        ((name, *_positions(suite, longest)) for name, suite in suites.items()),
    )


def _positions(suite: Mapping[str, Any], longest: int) -> Iterator[str]:
    chances = suite["conditional_acceptance"]
    sure = suite.get("positions", {}).get("conditional_acceptance", ())
    for at in range(longest):
        chance = chances[at] if at < len(chances) else None
        known = sure[at] if at < len(sure) and "n" in sure[at] else None
        yield (
            number(chance, 2)
            if chance is None or known is None
            else (f"{chance:.2f} {interval(known['ci95'])}\nof {_of(known['n'], known['few'])}")
        )


def _of(n: float, few: bool) -> str:
    return f"{n:.0f}, few" if few else f"{n:.0f}"


def outcome_tables(suites: Suites) -> Iterator[Block]:
    """How rounds ended, bands, entropy: those that the file tells."""
    ended = {name: s["level_estimates"] for name, s in suites.items() if s.get("level_estimates")}
    if ended:
        yield table(
            "How rounds ended",
            ("prompt set", "all accepted", "sibling", "corrected", "cut", "plain step"),
            ((name, *map(percent_of, found.values())) for name, found in ended.items()),
        )
    banded = [(name, s["bands"]) for name, s in suites.items() if s.get("bands")]
    rows = [(name, band, found) for name, bands in banded for band, found in bands.items()]
    if rows:
        yield table(
            "Drafts by band of confidence",
            ("prompt set", "band", "share of drafts", "prompts", "reached", "of those accepted"),
            (
                (name, band, percent(found["share"]), *_accepted(found))
                for name, band, found in rows
            ),
            texts=2,
        )
    bins = [(name, b) for name, s in suites.items() for b in s.get("entropy", {}).get("bins", ())]
    if bins:
        yield table(
            "Drafts by entropy of the drafter",
            ("prompt set", "nats", "share of drafts", "prompts", "reached", "of those accepted"),
            ((name, _nats(b), percent(b["share"]), *_accepted(b)) for name, b in bins),
            texts=2,
        )


def _accepted(found: Mapping[str, Any]) -> Sequence[str]:
    sure = {"value": found["acceptance"], "ci95": found.get("acceptance_ci95")}
    prompts = found.get("n_prompts")
    return (
        NOT_MEASURED if prompts is None else _of(prompts, found["few"]),
        str(found["reached"]),
        percent_of(sure),
    )


def _nats(found: Mapping[str, Any]) -> str:
    high = "and more" if found["high"] is None else f"to {found['high']:g}"
    return f"{found['low']:g} {high}"


def task_cell(found: Mapping[str, Any] | None) -> str:
    """A share of right answers, and of how many."""
    if found is None:
        return NOT_MEASURED
    return f"{percent_of(found)}\nof {found['n']:.0f}"
