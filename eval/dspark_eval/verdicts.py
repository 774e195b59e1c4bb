"""What the losslessness checks of a run come to: a sentence, a mark in its row, an exit code.

differs     some text is not the target's: `fidelity` says so, or greedy text left plain
            decoding's where the call was not close. `dspark eval` and `dspark bench` end with
            exit code 1 then, after everything is written
agrees      nothing was found, and beyond how large an error it would have been: no proof
untested    too few tokens, lossy by demand, or switched off
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dspark.wording import counted

NOT_LOSSLESS = "NOT LOSSLESS"
Checked = Mapping[str, Any]


def fails(found: Checked | None) -> bool:
    """Whether a check of `fidelity.judge` found texts that are not the target's."""
    return found is not None and found["passed"] is False


def defects(mismatches: list[dict[str, Any]] | None) -> int:
    """Greedy answers that left plain decoding's where the best two tokens were no near-tie."""
    return sum(not entry["near_tie"] for entry in mismatches or ())


def mismatch_warnings(mismatches: list[dict[str, Any]] | None, *, lossy: bool) -> list[str]:
    """A sentence if there are such answers; none of a run that is lossy by demand."""
    count = 0 if lossy else defects(mismatches)
    if not count:
        return []
    gap = max(entry["top2_gap"] for entry in mismatches or () if not entry["near_tie"])
    are, most = ("is", "of") if count == 1 else ("are", "up to")
    return [
        f"{NOT_LOSSLESS}: {counted(count, 'greedy answer')} {are} not plain decoding's, by a gap "
        f"of the top two logits {most} {gap:.3g}, more than rounding explains"
    ]


def suite_fails(suite: Checked) -> bool:
    """Of one prompt set of `dspark eval`."""
    plain = suite.get("plain")
    wrong = 0 if plain is None or suite["relaxed"] is not None else defects(plain["mismatches"])
    return fails(suite["lossless"]) or wrong > 0


def run_fails(run: Checked) -> bool:
    """Of one setting of `dspark bench`."""
    extra = run["extra"]
    wrong = 0 if run["relaxed"] is not None else defects(extra["mismatches"])
    return fails(extra["lossless"]) or wrong + defects(eager_mismatches(extra)) > 0


def eager_mismatches(extra: Checked) -> list[dict[str, Any]] | None:
    """Of plain recorded frames against plain decoding; None where there were no frames."""
    graphs = extra.get("graphs")
    return None if graphs is None else graphs["eager"]["mismatches"]


def mark(failed: bool) -> str:
    """What stands under the name of a row."""
    return f"\n{NOT_LOSSLESS}" * failed


def exit_code(document: Mapping[str, Any]) -> int:
    """1 if any row of an evaluation, a comparison or a bench is not the target's, else 0."""
    return int(any(_rows(document)))


def _rows(document: Mapping[str, Any]) -> Iterator[bool]:
    if document.get("kind") == "comparison":
        for suite in document["suites"].values():
            yield from (fails(entry["lossless"]) for entry in suite["contenders"])
    elif "suites" in document:
        yield from map(suite_fails, document["suites"].values())
    else:
        yield from map(run_fails, document.get("runs", [document]))


def verdict(found: Checked) -> str:
    """A check in a few words. An agreement says what it could have seen: it is no proof."""
    if found["method"] == "greedy":
        wrong = found["not_best"] - found["near_ties"]
        are = "is" if wrong == 1 else "are"
        return (
            f"differs: {counted(wrong, 'token')} {are} not the target's best" if wrong else "agrees"
        )
    if found["passed"] is None:
        return "untested: too few tokens"
    if not found["passed"]:
        return "differs from the target's law"
    rank = found["rank"]
    if rank is None:
        return "agrees, as far as so few tokens tell"
    return (
        f"agrees; would have seen a TV of {rank['detectable_tv']:.3f} or more at "
        f"{100 * rank['power']:g} %"
    )
