"""The command line: one application, one file per command in `dspark/commands`.

Each command imports what it needs when it runs, so `--help` answers at once. `dspark.console` turns
what goes wrong into one line and an exit code. Defaults that a dataclass owns are repeated in the
commands only to be shown by `--help`; a test holds them equal.
"""

from __future__ import annotations

import sys

from dspark import console
from dspark.commands.app import app
from dspark.commands.bench import bench
from dspark.commands.calibrate import calibrate
from dspark.commands.data import data
from dspark.commands.distill import distill
from dspark.commands.doctor import doctor
from dspark.commands.evaluate import evaluate
from dspark.commands.export import export
from dspark.commands.generate import generate
from dspark.commands.import_ import import_
from dspark.commands.inspect import inspect
from dspark.commands.prune import prune
from dspark.commands.report import report
from dspark.commands.study import study

__all__ = [
    "app",
    "bench",
    "calibrate",
    "data",
    "distill",
    "doctor",
    "evaluate",
    "export",
    "generate",
    "import_",
    "inspect",
    "main",
    "prune",
    "report",
    "study",
]


def main() -> None:
    """Entry point of the console script and of `python -m dspark`."""
    sys.exit(console.run(app, sys.argv[1:]))
