"""`python -m dspark_eval.policies --out DIR [--draft D]`: measure, and write the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dspark.console import Parser, module_command
from dspark.seeds import seed_argument
from dspark_eval.policies.report import ReportOptions, run_report


@module_command
def main(arguments: Sequence[str]) -> None:
    """Measure, and print where the page is."""
    parser = Parser(prog="python -m dspark_eval.policies", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--draft", type=Path, help="drafter; else where `dspark distill` writes")
    parser.add_argument("--target", default="nano")
    parser.add_argument("--n-prompts", type=int, default=30, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=seed_argument, default=980406)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cost-model", type=Path, help="step times; else they are measured")
    options = parser.parse_args(arguments)
    print(run_report(ReportOptions(**vars(options))))


if __name__ == "__main__":
    sys.exit(main())
