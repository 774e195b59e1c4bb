"""The process that watches over a model-written program, started by `code_tests` as a script.

    python -I code_child.py SECONDS MEMORY FILE_BYTES PROCESSES PROGRAM OUTPUT < nonce

The program runs in a child of it, within the limits, and writes to OUTPUT; after the last line of
PROGRAM the child prints the nonce. Then everything that the program started is killed: on Linux its
orphans come to this process (PR_SET_CHILD_SUBREAPER), whatever sessions they made, so none is left
when there is no child to wait for; elsewhere it is the program's process group. A SIGTERM ends the
program before its time. On stdout: the program's exit status, minus the signal that ended it, or
"timeout".
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

DEATH_SIGNAL, SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of <linux/prctl.h>."""
POLL = 0.005
CLEARING = 5.0
"""Seconds after which what cannot be killed is left."""


def main(arguments: list[str]) -> None:
    """Run, clear up, report."""
    seconds, memory, size, processes = map(int, arguments[:4])
    program, output = arguments[4:]
    nonce = sys.stdin.readline().strip()
    _control(SUBREAPER, 1)
    asked = Asked()
    signal.signal(signal.SIGTERM, asked)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _control(DEATH_SIGNAL, signal.SIGKILL)  # of this process, should the program end it
        _limit(seconds, memory, size, processes)
        _own_streams(output)
        sys.argv = [program]
        runpy.run_path(program, run_name="__main__")
        print(f"\n{nonce}")  # whatever the program left on its last line
        return
    status = _wait(child, time.monotonic() + seconds, asked)
    _clear(child)
    print("timeout" if status is None else status)


def _control(option: int, value: int) -> None:
    """prctl, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Asked:
    """Of a signal: whether it came. It interrupts nothing, least of all the clearing up."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: object) -> None:
        self.came = True


def _limit(seconds: int, memory: int, size: int, processes: int) -> None:
    """A session and limits of its own."""
    os.setsid()
    for name, value in (
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", size),
        ("RLIMIT_NPROC", processes),
        ("RLIMIT_CORE", 0),
    ):
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (wanted, wanted))


def _own_streams(output: str) -> None:
    """Nothing to read, and stdout into a file: the pipes are the watcher's."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(nothing, 0)
    os.dup2(written, 1)
    os.close(nothing)
    os.close(written)


def _wait(child: int, deadline: float, asked: Asked) -> int | None:
    """Its exit status; None if it runs longer, or is not to run on."""
    while time.monotonic() < deadline and not asked.came:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL)
    return None


def _clear(child: int) -> None:
    """End all that is left of the program, until there is nothing to wait for."""
    deadline = time.monotonic() + CLEARING
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        for process in _descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL)


def _descendants() -> list[int]:
    """Of this process, as /proc says; none where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # gone while it was read
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


if __name__ == "__main__":
    main(sys.argv[1:])
