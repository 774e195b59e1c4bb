"""`dspark doctor CKPT`: is this drafter the one that was written, and does it go with its target?

A *finding* makes the exit code 1; a *note* is something that could not be looked at. The folder may
be of any layout that `dspark import` reads, so an exported drafter is examined where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch import Tensor

from dspark.doctor_target import TargetReport, examine_target
from dspark.doctor_tensors import examine_tensors, listed
from dspark.draft.checkpoint import read_calibration
from dspark.draft.folder import CONFIG_FILE, check_folder, read_object
from dspark.draft.golden import POSITIONS
from dspark.draft.golden_check import check_meaning, check_readings
from dspark.draft.golden_file import GOLDEN_FILE, Golden, digest, read_golden_file, runnable
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.interop.opening import OWN, Opened, open_drafter
from dspark.runtime.loading import LoadedTarget


@dataclass(frozen=True)
class CheckpointReport:
    """What was found. `layout` is None where the folder could not be read as a drafter.

    replayed: Positions of the golden vector that were run; empty if there is none.
    """

    folder: str
    layout: str | None
    replayed: tuple[int, ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    target: TargetReport | None

    @property
    def all_findings(self) -> tuple[str, ...]:
        """Those of the folder, then those beside the target."""
        return (*self.findings, *(self.target.findings if self.target else ()))

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.all_findings

    def to_dict(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"schema_version": 1, "ok": self.ok, **asdict(self)}


def examine_checkpoint(folder: Path, loaded: LoadedTarget | None = None) -> CheckpointReport:
    """Examine a drafter folder, and beside it a target if one is given. Changes nothing.

    Raises:
        UserError: No such folder, or no `config.json` in it. Whatever else is wrong is a finding.
    """
    check_folder(folder)
    findings: list[str] = []
    golden = None
    try:
        golden = read_golden_file(folder)
    except UserError as error:
        findings.append(str(error))
    try:
        opened = open_drafter(folder)
        tensors = opened.tensors()
    except UserError as error:
        findings += [str(error), *_edited(folder, golden)]
        return CheckpointReport(str(folder), None, (), tuple(findings), (), None)
    try:
        read_calibration(folder, opened.config)
    except UserError as error:
        findings.append(str(error))
    drafter = runnable(opened.config, tensors)
    findings += examine_tensors(tensors.items())
    findings += _compare(golden, drafter, tensors)
    beside = None if loaded is None else examine_target(folder, drafter, golden, loaded)
    return CheckpointReport(
        folder=str(folder),
        layout=opened.layout,
        replayed=POSITIONS if golden else (),
        findings=tuple(findings),
        notes=tuple(_notes(opened, golden, loaded)),
        target=beside,
    )


def render_checkpoint(report: CheckpointReport) -> None:
    """Print a report for people."""
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    say(f"[bold]{escape(report.folder)}[/]: layout {report.layout or 'not readable'}")
    if report.replayed:
        say(f"golden vector replayed at positions {', '.join(map(str, report.replayed))}")
    for trial in report.target.trials if report.target else ():
        mark = ", as recorded" if trial.recorded else ""
        slot = "predicts" if trial.slot_layout == "anchor" else "does not predict"
        say(
            f"taps {trial.tap_kind}, slot 0 {slot}{mark}: {trial.accepted_length:.2f} tokens a "
            f"round in {trial.rounds} greedy rounds"
        )
    for text in report.all_findings:
        say(f"[red]finding:[/] {escape(text)}")
    for text in report.notes:
        say(f"[yellow]note:[/] {escape(text)}")
    if report.ok:
        say("nothing found")


def _compare(
    golden: Golden | None, drafter: DSparkDrafter, tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """What is not as it was when the golden vector was written."""
    if golden is None:
        return
    yield from check_meaning(golden, drafter)
    changed = [
        name
        for name, kept in golden.digests.items()
        if name not in tensors or digest(tensors[name]) != kept
    ]
    if changed:
        yield f"weights are not those that were written: {listed(changed)}"
    yield from check_readings(golden, drafter)


def _edited(folder: Path, golden: Golden | None) -> list[str]:
    """For a folder that cannot be read: which keys of its configuration are not what they were."""
    if golden is None:
        return []
    try:
        raw = read_object(folder)
    except UserError:
        return []
    return [
        f"{CONFIG_FILE}: {key} is {raw[key]!r}, {value!r} when it was written"
        for key, value in golden.meaning.items()
        if key in raw and value is not None and raw[key] != value
    ]


def _notes(opened: Opened, golden: Golden | None, loaded: LoadedTarget | None) -> Iterator[str]:
    if not (opened.folder / GOLDEN_FILE).exists():
        yield (
            f"no {GOLDEN_FILE}: nothing says what this drafter computed when it was written; "
            "`dspark import` and every save add one"
        )
    elif loaded is not None and golden is not None and golden.target is None:
        yield "the golden vector was written without a target, so its own reading is not compared"
    if opened.layout != OWN:
        yield f"read as {opened.title}; `dspark import` makes it a drafter to run here"
