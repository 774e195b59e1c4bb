"""`python -m dspark_eval.lossless [--full]`: exit code 1 if a case does not have the target's law,
a planted defect is not found, or a test has too little power."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.console import Parser, module_command
from dspark.files import atomic_write_json
from dspark.seeds import seed_argument
from dspark_eval.environment import heading
from dspark_eval.lossless.report import DRAWS, run_suite


@module_command
def main(arguments: Sequence[str]) -> int:
    """Run, print, and say by the exit code whether everything was as it must be."""
    parser = Parser(prog="python -m dspark_eval.lossless", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every cell of the grid")
    parser.add_argument("--seed", type=seed_argument, default=0, help="of all draws")
    parser.add_argument("--draws", type=int, default=DRAWS, help="texts per sampled case")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    facts = heading("lossless", arguments, options.seed, torch.device("cpu"), torch.float32)
    start = time.monotonic()
    report = run_suite(
        options.full,
        seed=options.seed,
        draws=options.draws,
        workers=options.workers,
        advance=_show if sys.stderr.isatty() else lambda name: None,
    )
    print(f"{report.text()} in {time.monotonic() - start:.0f} s")
    if options.json is not None:
        atomic_write_json(options.json, {**facts, **report.document()})
    return 0 if report.passed else 1


def _show(name: str) -> None:
    print(f"\r\033[K{name}", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
