"""`python -m dspark_eval.lossless`: the short form, `--full` for the whole grid; exit code 1 if
a case deviates, a planted defect is missed, or the power falls short."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from dspark.files import atomic_write_json
from dspark_eval.lossless.statistics import ALPHA, TV
from dspark_eval.lossless.suite import DRAWS, Outcome, Report, run_suite


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say by the exit code whether everything was as it must be."""
    parser = argparse.ArgumentParser(prog="python -m dspark_eval.lossless", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every cell of the grid")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--draws", type=int, default=DRAWS, help="texts per case")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    progress = _show if sys.stderr.isatty() else _quiet
    report = run_suite(options.full, seed=options.seed, draws=options.draws, advance=progress)
    print(_summary(report, time.monotonic() - start))
    if options.json is not None:
        atomic_write_json(options.json, document(report))
    return 0 if report.passed else 1


def document(report: Report) -> dict:
    """The report as JSON."""
    return json.loads(
        json.dumps({**asdict(report), "power": report.power, "passed": report.passed})
    )


def _show(name: str) -> None:
    print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)


def _quiet(name: str) -> None:
    """Nobody is watching."""


def _summary(report: Report, seconds: float) -> str:
    sampled = [case for case in report.cases if case.p is not None]
    lines = [
        f"{len(report.cases)} cases, {len(sampled)} of them sampled, {report.draws} texts each",
        f"  each test at {report.level:.1e}: chance of a false alarm in the whole run below {ALPHA}",
        f"  power against a total variation of {TV}: at least {report.power:.4f}",
        f"  smallest p-value {min((c.p for c in sampled if c.p is not None), default=1.0):.2g}, "
        f"deviating: {len(report.failures)}",
        *(_line(case, "DEVIATES") for case in report.failures),
        f"{len(report.planted)} planted defects",
        *(_line(d, "MISSED" if d in report.missed else "caught") for d in report.planted),
        f"{'passed' if report.passed else 'FAILED'} in {seconds:.0f} s",
    ]
    return "\n".join(lines)


def _line(outcome: Outcome, word: str) -> str:
    if outcome.p is None:
        return f"  {word}  {outcome.name}: {outcome.wrong} texts are not the target's"
    return f"  {word}  {outcome.name}: TV {outcome.distance:.3f}, p {outcome.p:.1e}"


if __name__ == "__main__":
    sys.exit(main())
