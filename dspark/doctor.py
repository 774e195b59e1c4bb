"""`dspark doctor`: what this machine offers, and what would make a run fail or a number mislead.

A *problem* (damaged shipped files, a backend asked for that cannot run) makes the exit code 1. A
*warning* is something to know before believing a measured time.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspark import __version__, assets, ops
from dspark.errors import UserError
from dspark.wording import counted

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "triton")


@dataclass(frozen=True)
class Report:
    """What was found; JSON-ready through `to_dict`. Absent or unknown is None, never a guess.

    backends: op -> {"runs": "torch" | "triton", "triton": "" or why Triton does not run it}.
    script: {"path": of the `dspark` on PATH or None, "ours": bool or None}.
    """

    versions: dict[str, str | None]
    devices: tuple[str, ...]
    threads: dict[str, int | str | None]
    backends: dict[str, dict[str, str]]
    assets: dict[str, Any]
    script: dict[str, Any]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way of a run."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"schema_version": 1, "ok": self.ok, **asdict(self)}


def examine() -> Report:
    """Look at everything; takes about a second and changes nothing."""
    threads = _threads(os.environ)
    script = _script(shutil.which("dspark"))
    problems: list[str] = []
    try:
        backends = _backends()
    except UserError as error:
        backends = {}
        problems.append(str(error))
    shipped = _assets(problems)
    versions: dict[str, str | None] = {name: _version(name) for name in _PACKAGES}
    return Report(
        versions={"dspark": __version__, "python": platform.python_version(), **versions},
        devices=_devices(),
        threads=threads,
        backends=backends,
        assets=shipped,
        script=script,
        problems=tuple(problems),
        warnings=(*_thread_warnings(threads), *_script_warnings(script)),
    )


def render(report: Report) -> None:
    """Print a report for people: a table on a terminal, elsewhere a line for each row."""
    console = Console(highlight=False)
    rows = list(_rows(report))
    if console.is_terminal:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        for name, text in rows:
            table.add_row(name, escape(text))
        console.print(table)
    else:
        wide = max(len(name) for name, _ in rows)
        for name, text in rows:
            console.print(f"{name:<{wide}}  {escape(text)}", soft_wrap=True)
    for text in report.problems:
        console.print(f"[red]problem:[/] {escape(text)}", soft_wrap=True)
    for text in report.warnings:
        console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    """Name and text of each line."""
    for name, version in report.versions.items():
        yield name, version or "not installed"
    for device in report.devices:
        yield "device", device
    yield "threads", ", ".join(f"{k} {_shown(v)}" for k, v in report.threads.items())
    for runs, names in _by_backend(report.backends).items():
        yield "kernels", f"{runs}: {', '.join(names)}"
    if report.assets["ok"]:
        files, size = report.assets["files"], report.assets["bytes"] / 1e6
        yield "shipped files", f"{files} intact, {size:.1f} MB"
    yield "script", _shown(report.script["path"])


def _by_backend(backends: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """What runs and why nothing faster does, to the ops it is so for."""
    found: dict[str, list[str]] = {}
    for op, backend in backends.items():
        why = f" (no Triton: {backend['triton']})" if backend["triton"] else ""
        found.setdefault(f"{backend['runs']}{why}", []).append(op)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[str, ...]:
    devices = [f"cpu: {platform.machine()}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        devices.append(f"cuda:{index}: {properties.name}, {gib:.0f} GiB")
    return tuple(devices)


def _threads(environment: Mapping[str, str]) -> dict[str, int | str | None]:
    # What this process may use, which in a container is less than what the machine has.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {
        "torch": torch.get_num_threads(),
        "usable_cores": cores,
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS"),
        "OMP_WAIT_POLICY": environment.get("OMP_WAIT_POLICY"),
    }


def _thread_warnings(threads: Mapping[str, int | str | None]) -> list[str]:
    found = []
    used, cores = threads["torch"], threads["usable_cores"]
    if isinstance(used, int) and isinstance(cores, int) and used > cores:
        found.append(
            f"torch uses {used} threads on {counted(cores, 'core')}; set OMP_NUM_THREADS={cores}"
        )
    passive = str(threads["OMP_WAIT_POLICY"] or "").lower() == "passive"
    if used != 1 and not passive:
        found.append(
            "idle OpenMP threads spin and take time from whatever else runs here; "
            "set OMP_WAIT_POLICY=passive before timing on CPU"
        )
    return found


def _backends() -> dict[str, dict[str, str]]:
    usable, why = ops.triton_usable()
    chosen = ops.backends()
    torch_only = os.environ.get("DSPARK_OPS") == "torch"

    def reason(name: str) -> str:
        if chosen[name] == "triton":
            return ""
        if not usable:
            return why
        return "DSPARK_OPS=torch" if torch_only else "this op has no Triton kernel"

    return {name: {"runs": chosen[name], "triton": reason(name)} for name in chosen}


def _assets(problems: list[str]) -> dict[str, Any]:
    """Compare the shipped files with their manifest; what is wrong is appended to `problems`."""
    try:
        report = assets.verify()
    except UserError as error:
        problems.append(str(error))
        return {"ok": False, "files": None, "bytes": None}
    for what in ("missing", "changed", "unlisted"):
        names = getattr(report, what)
        if names:
            problems.append(f"shipped files {what}: {', '.join(names)}; reinstall dspark")
    return {"ok": report.ok, "files": report.checked, "bytes": report.total_bytes}


def _script(path: str | None) -> dict[str, Any]:
    if path is None:
        return {"path": None, "ours": None}
    try:
        ours = b"dspark.cli" in Path(path).read_bytes()
    except OSError:
        return {"path": path, "ours": None}
    return {"path": path, "ours": ours}


def _script_warnings(script: Mapping[str, Any]) -> list[str]:
    if script["ours"] is False:
        return [
            f"{script['path']} is another package's command of the same name (dspark-mlx has "
            "one); use `python -m dspark`"
        ]
    return []


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
